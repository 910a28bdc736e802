"""Looking at a body: what is read of it, and what is refused because decoders could differ on it."""

from __future__ import annotations

import json
import time
import tracemalloc
from typing import Any

import pytest

from gateway.errors import Code, GatewayError
from gateway.peek import LOOKED_AT, MAX_TOKENS, Peek, peek

COMPLETIONS = "/v1/completions"


def refused(body: bytes, *, path: str = "") -> GatewayError:
    with pytest.raises(GatewayError) as caught:
        peek(body, path=path)
    return caught.value


# ------------------------------------------------------------------------------------- what is read


@pytest.mark.parametrize(
    ("body", "seen"),
    [
        (b"{}", Peek(None, None, 1)),
        (b'{"model":"m","stream":true,"n":3}', Peek("m", True, 3)),
        (b'{"stream":false,"model":""}', Peek("", False, 1)),
        (b'{"model":null,"stream":null,"n":null,"background":null}', Peek(None, None, 1)),
        (b'{"model":"caf\xc3\xa9 \\u00e9\\n\\ud83d\\ude00"}', Peek("café é\n😀", None, 1)),
        (b'{"\\u006dodel":"m"}', Peek("m", None, 1)),
        (b'{"messages":[{"model":"x","stream":true,"n":9}],"model":"m"}', Peek("m", None, 1)),
        (b'{"a":"\\"model\\":\\"x\\"","model":"m"}', Peek("m", None, 1)),
        (b'{"background":false,"model":"m"}', Peek("m", None, 1)),
    ],
)
def test_the_fields_that_matter_are_read(body: bytes, seen: Peek) -> None:
    assert peek(body) == seen


def test_whitespace_may_stand_everywhere() -> None:
    space = b" \t\r\n"
    tokens = [
        b"{",
        b'"model"',
        b":",
        b'"m"',
        b",",
        b'"n"',
        b":",
        b"2",
        b",",
        b'"a"',
        b":",
        b"[ 1 , 2 ]",
        b"}",
    ]
    assert peek(space + space.join(tokens) + space) == Peek("m", None, 2)


@pytest.mark.parametrize(
    ("body", "sequences"),
    [
        (b'{"n":4}', 4),
        (b'{"n":2,"best_of":5}', 5),
        (b'{"n":5,"best_of":2}', 5),
        (b'{"n":0}', 1),
        (b'{"n":-3,"best_of":-1}', 1),
        (b'{"prompt":"one"}', 1),
        (b'{"prompt":["one"]}', 1),
        (b'{"prompt":["one","two","three"]}', 3),
        (b'{"prompt": [ "one" , "two" ] , "n" : 2}', 4),
        (b'{"prompt":[1,2,3]}', 1),
        (b'{"prompt":[[1,2],[3],[]]}', 3),
        (b'{"prompt":[{"prompt_string":"a"},{"prompt_string":"b"}]}', 2),
        (b'{"prompt":[1,"one",2]}', 1),
        (b'{"prompt":[1,["one"],"two"]}', 2),
        (b'{"prompt":["a,b","c]"]}', 2),
        (b'{"prompt":[]}', 1),
        (b'{"prompt":null}', 1),
        (b'{"prompt":{"prompt_string":"a"}}', 1),
    ],
)
def test_a_request_costs_the_sequences_it_makes(body: bytes, sequences: int) -> None:
    assert peek(body, path=COMPLETIONS).sequences == sequences


def test_several_prompts_cost_only_where_there_are_prompts() -> None:
    assert peek(b'{"prompt":["a","b"],"n":2}', path="/v1/chat/completions").sequences == 2
    assert peek(b'{"prompt":["a","b"]}', path="/api/generate").sequences == 1


def test_there_is_a_most_of_sequences() -> None:
    assert peek(b'{"n":4096}').sequences == 4096
    assert refused(b'{"n":4097}').param == "n"
    assert refused(b'{"n":64,"prompt":[' + b'"",' * 64 + b'""]}', path=COMPLETIONS).param == "n"
    assert refused(b'{"prompt":[' + b'"",' * 4096 + b'""]}', path=COMPLETIONS).param == "n"
    assert refused(b'{"n":99999999999999999999}').code is Code.INVALID_REQUEST
    assert peek(b'{"prompt":[' + b"1," * 5000 + b"1]}", path=COMPLETIONS).sequences == 1


# ----------------------------------------------------------------------------- what decoders differ on


@pytest.mark.parametrize("name", sorted(LOOKED_AT))
@pytest.mark.parametrize("values", [("1", "1"), ("1", "2"), ("12", "1"), ('"a"', '["a",1]'), ("{}", "null")])
@pytest.mark.parametrize("between", ["", '"other":[{"a":1}],'])
def test_a_field_that_counts_may_stand_but_once(name: str, values: tuple[str, str], between: str) -> None:
    first, second = values
    escaped = f"\\u{ord(name[0]):04x}{name[1:]}"
    for one, other in ((name, name), (name, escaped), (escaped, name), (escaped, escaped)):
        body = f'{{"x":0,"{one}":{first},{between}"{other}" : {second}}}'
        error = refused(body.encode())
        assert error.code is Code.INVALID_REQUEST
        assert error.param == name
        assert "once" in error.message


@pytest.mark.parametrize(
    ("variant", "name"),
    [
        ("Model", "model"),
        ("MODEL", "model"),
        ("\\u004dodel", "model"),
        ("Stream", "stream"),
        ("ſtream", "stream"),
        ("\\u017ftream", "stream"),
        ("bacKground", "background"),
        ("bac\\u212aground", "background"),
        ("beſt_of", "best_of"),
        ("N", "n"),
        ("PrompT", "prompt"),
    ],
)
def test_a_field_that_counts_in_another_case_is_refused(variant: str, name: str) -> None:
    for body in (f'{{"{variant}":"x"}}', f'{{"{name}":null,"{variant}":"x"}}', f'{{"a":1,"{variant}":null}}'):
        error = refused(body.encode())
        assert error.code is Code.INVALID_REQUEST
        assert error.param is not None
        assert repr(name) in error.message


@pytest.mark.parametrize(
    "name", ["models", "mode", " model", "model ", "mödel", "n ", "ñ", "stream_opts", "best-of"]
)
def test_other_names_are_nobodys_business(name: str) -> None:
    assert peek(f'{{"{name}":1,"model":"m","{name}":2}}'.encode()) == Peek("m", None, 1)
    assert peek(f'{{"{name.upper()}":1,"model":"m"}}'.encode()) == Peek("m", None, 1)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("model", ["1", "true", "[]", "{}", '["m"]']),
        ("stream", ["0", "1", '"true"', '""', "[]", "{}"]),
        ("n", ['"1"', "1.0", "1.5", "1e2", "true", "[]", "{}", "1" * 5000]),
        ("best_of", ['"1"', "1.5", "false", "[1]"]),
        ("background", ["0", "1", '"true"', "[]"]),
    ],
)
def test_a_wrong_type_is_refused(name: str, wrong: list[str]) -> None:
    for value in wrong:
        error = refused(f'{{"{name}":{value}}}'.encode(), path="/v1/responses")
        assert (error.code, error.param) == (Code.INVALID_REQUEST, name)


def test_an_answer_that_would_be_made_for_nobody_is_refused() -> None:
    error = refused(b'{"background":true}', path="/v1/responses")
    assert (error.code, error.param) == (Code.INVALID_REQUEST, "background")


def test_only_responses_has_a_background() -> None:
    assert peek(b'{"background":true,"model":"m"}', path="/v1/chat/completions") == Peek("m", None, 1)


def test_half_an_emoji_is_no_fault() -> None:
    body = rb'{"model":"m","stream":true,"messages":[{"content":"half \ud83d, whole \ud83d\ude00"}]}'
    assert peek(body) == Peek("m", True, 1)
    assert refused(rb'{"model":"m","x":"\ud83d","model":"n"}').param == "model"


# ---------------------------------------------------------------------------------- what isn't JSON


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b" ",
        b"nul",
        b"{",
        b'{"model"',
        b'{"model":',
        b'{"model":"m"',
        b'{"model":"m",}',
        b'{"model":"m"}}',
        b'{"model":"m"} {}',
        b'{"model":"m"}\x00',
        b"{model:1}",
        b"{'model':'m'}",
        b'{"a":NaN}',
        b'{"a":Infinity}',
        b'{"a":-Infinity}',
        b'{"a":01}',
        b'{"a":1.}',
        b'{"a":"\\q"}',
        b'{"a":"\n"}',
        b'{"a" 1}',
        b'{"a":[1,]}',
        b"{1:2}",
        b'\xef\xbb\xbf{"model":"m"}',
        '{"model":"m"}'.encode("utf-16"),
        '{"model":"m"}'.encode("utf-16-le"),
        b'{"\xff":1}',
        b'{"\xed\xa0\x80":1}',
        b'{"a":' + b"[" * 100_000,
        b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
        b'{"a":' * 100_000,
        b'{"a":1}//comment',
    ],
    ids=lambda body: repr(body[:24]),
)
def test_what_is_no_json_is_refused(body: bytes) -> None:
    assert refused(body).code is Code.INVALID_JSON


def test_an_empty_body_is_called_so() -> None:
    assert refused(b" \r\n").message == "The request body is empty."


@pytest.mark.parametrize("body", [b"null", b"true", b"1", b'"model"', b"[]", b'[{"model":"m"}]', b" [1] "])
def test_what_is_no_object_is_refused(body: bytes) -> None:
    error = refused(body)
    assert error.code is Code.INVALID_REQUEST
    assert "object" in error.message


@pytest.mark.parametrize("body", [b'{"model":"\xff"}', b'{"model":"\xed\xa0\x80"}', b'{"model":"a\xc3"}'])
def test_a_model_that_is_no_utf8_is_refused(body: bytes) -> None:
    assert refused(body).status == 400


# ------------------------------------------------------------------------------------------- bounds


def test_there_is_a_most_of_fields() -> None:
    fields = [f'"f{i}":{i}' for i in range(1024)]
    assert peek(("{" + ",".join(fields) + "}").encode()) == Peek(None, None, 1)
    assert refused(("{" + ",".join([*fields, '"x":1']) + "}").encode()).code is Code.INVALID_REQUEST
    assert refused(b"{" + b'"a":1,' * 1024 + b'"a":1}').code is Code.INVALID_REQUEST


MB = 1_000_000
TOO_MANY = ("many fields", "many prompts", "many lists of tokens")
LARGE = {
    "one long text": b'{"messages":[{"role":"user","content":"' + b"x" * 20 * MB + b'"}],"model":"m"}',
    "many messages": b'{"messages":[' + b'{"role":"user","content":"a\\"b"},' * 600_000 + b'{}],"model":"m"}',
    "a long name": b'{"' + b"x" * 5 * MB + b'":1,"model":"m"}',
    "a long escaped name": b'{"' + b"\\n" * 2 * MB + b'":1,"model":"m"}',
    "many fields": b"{" + b'"x":1,' * 3 * MB + b'"model":"m"}',
    "many prompts": b'{"model":"m","prompt":[' + b'"",' * 6 * MB + b'""]}',
    "many tokens": b'{"model":"m","prompt":[' + b"12," * 6 * MB + b"1]}",
    "many lists of tokens": b'{"model":"m","prompt":[' + b"[1]," * 5 * MB + b"[]]}",
    "a repeated name": b'{"a":"' + b"x" * 20 * MB + b'","a":1,"model":"m"}',
}


@pytest.mark.parametrize("kind", LARGE)
def test_a_large_body_costs_little_time_and_next_to_no_memory(kind: str) -> None:
    body = LARGE[kind]
    tracemalloc.start()
    start = time.perf_counter()
    if kind in TOO_MANY:
        assert refused(body, path=COMPLETIONS).code is Code.INVALID_REQUEST
    else:
        assert peek(body, path=COMPLETIONS) == Peek("m", None, 1)
    took = time.perf_counter() - start
    _, most = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert took < 1
    assert most < (25 * MB if "name" in kind else MB)


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        ({"max_tokens": 100}, 100),
        ({"max_tokens": "100000"}, 100_000),
        ({"max_tokens": 1e5}, 100_000),
        ({"max_completion_tokens": 7, "max_tokens": 5}, 7),
        ({"n_predict": -1}, None),
        ({"max_tokens": None}, None),
        ({"max_tokens": 0}, None),
        ({"max_tokens": 10**40}, MAX_TOKENS),
        ({"max_tokens": int("9" * 400)}, None),
        ({"max_tokens": "many"}, None),
        ({"max_tokens": True}, None),
        ({"max_tokens": [5]}, None),
        ({"options": {"num_predict": 9}}, 9),
        ({"options": {"Num_Predict": 9}}, 9),
        ({"options": "none"}, None),
    ],
)
def test_how_long_the_answer_may_be_is_read_as_leniently_as_engines_do(
    said: Any, expected: int | None
) -> None:
    assert peek(json.dumps({"model": "m", **said}).encode()).max_tokens == expected


@pytest.mark.parametrize("name", ["Messages", "OPTIONS", "Max_Tokens", "Input"])
def test_what_is_counted_is_written_in_one_way(name: str) -> None:
    with pytest.raises(GatewayError) as caught:
        peek(json.dumps({"model": "m", name: []}).encode())
    assert caught.value.param == name
