"""Usage that the gateway asks engines for, and that clients who didn't ask don't see."""

from __future__ import annotations

import itertools
import json
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.profiles import PROFILES, AskUsage, Rewrite
from gateway.profiles.unasked import WithoutUsage, ask_usage
from tests.support.usage import CHAT, DONE, chat, cut, event, openai

PLAIN = settings(deadline=None, derandomize=True, max_examples=300)


def asked(options: Any, how: AskUsage, path: str = CHAT) -> Any:
    fields = {} if options is None else {"stream_options": json.dumps(options).encode()}
    rewrite = ask_usage(Rewrite({"rid": b'"x"'}), path, fields, how)
    assert rewrite.fields["rid"] == b'"x"'
    assert rewrite.without_usage == ("stream_options" in rewrite.fields)
    return json.loads(rewrite.fields.get("stream_options", b"null"))


@pytest.mark.parametrize(
    ("options", "how", "expected"),
    [
        (None, "end", {"include_usage": True}),
        (None, "each", {"include_usage": True, "continuous_usage_stats": True}),
        ({}, "end", {"include_usage": True}),
        ({"include_usage": False}, "end", {"include_usage": True}),
        # Without include_usage it means nothing; with it, it would.
        (
            {"continuous_usage_stats": True, "x": [1]},
            "end",
            {"continuous_usage_stats": False, "x": [1], "include_usage": True},
        ),
        # Who asked gets exactly what the engine sends.
        ({"include_usage": True}, "each", None),
        # The engine is to say what is wrong with these.
        ([], "each", None),
        ("x", "each", None),
        (None, "no", None),
    ],
)
def test_the_clients_own_options_stay(options: Any, how: AskUsage, expected: Any) -> None:
    assert asked(options, how) == expected


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses", "/v1/embeddings"])
def test_other_routes_tell_it_by_themselves(path: str) -> None:
    assert asked(None, "each", path) is None


def test_engines_whose_other_chunks_would_change_are_not_asked() -> None:
    told = {kind: profile.tells_usage for kind, profile in PROFILES.items()}
    assert told == {"vllm": "each", "sglang": "end", "llamacpp": "no", "ollama": "no", "openai": "no"}


# Keeping it from clients.

PIECES = [
    ": ping\n\n",
    chat("").decode(),
    chat("usage").decode(),
    chat('"usage":{"choices":[]},').decode(),
    chat("ü\n\n").decode(),
    event({"choices": [{"text": " a", "logprobs": {"tokens": []}}]}).decode(),
    'data: {"choices":[{"delta":{"content":"b"}}],"usage":null}\n\n',
]
"""What passes as it is."""


def with_usage(piece: str, number: int) -> str:
    """The chunk as vLLM makes it with ``continuous_usage_stats``: one field more."""
    if not piece.startswith("data: {") or '"usage":null' in piece:
        return piece
    usage = json.dumps(openai(9, number, prompt_tokens_details={"cached_tokens": None}))
    return re.sub(r"\}\n\n$", lambda _: f',"usage":{usage}}}\n\n', piece)


def sifted(data: bytes, places: list[int]) -> bytes:
    sieve = WithoutUsage()
    return b"".join(sieve.feed(piece) for piece in cut(data, places)) + sieve.rest()


USAGE = event({"id": "1", "choices": [], "usage": openai(9, 2)}).decode()
ENDS = [USAGE, USAGE.replace(" []", "[]"), ""]


@PLAIN
@given(
    st.lists(st.sampled_from(PIECES), max_size=6),
    st.sampled_from(ENDS),
    st.booleans(),
    st.lists(st.integers(0, 1200), max_size=12),
    st.sampled_from(["\n", "\r\n"]),
    st.integers(0, 1200),
)
def test_the_client_gets_the_stream_it_would_have_got(
    pieces: list[str], usage: str, each: bool, places: list[int], end: str, stop: int
) -> None:
    """Byte for byte, however it is cut; and of one that breaks off whole events and a beginning."""
    done = DONE.decode()
    without = "".join([*pieces, done]).replace("\n", end).encode()
    told = [with_usage(piece, n) if each else piece for n, piece in enumerate(pieces)]
    data = "".join([*told, usage, done]).replace("\n", end).encode()
    assert sifted(data, places) == without
    sieve = WithoutUsage()
    passed = b"".join(sieve.feed(piece) for piece in cut(data[:stop], places))
    assert without.startswith(passed)


@pytest.mark.parametrize("size", [1, 1000, 60_000])
def test_a_long_event_is_not_kept(size: int) -> None:
    """It isn't what is meant, whatever is in it; what comes behind it is looked at again."""
    long = b'data: {"choices":[],"x":"' + b"x" * 200_000 + b'","usage":{"prompt_tokens":1}}\n\n'
    data = long + USAGE.encode() + DONE
    sieve, passed, came, most = WithoutUsage(), b"", 0, 0
    for piece in cut(data, [*range(0, 200_000, max(size, 1000)), *range(200_000, len(data), size)]):
        passed += sieve.feed(piece)
        came += len(piece)
        if came < len(long):
            most = max(most, came - len(passed))
    assert passed == long + DONE
    assert most <= 64 * 1024


def test_bare_carriage_returns_end_events_too() -> None:
    data = b"".join([chat("a"), USAGE.encode(), DONE]).replace(b"\n", b"\r")
    for pieces in ([data], [bytes([each]) for each in data]):
        sieve = WithoutUsage()
        assert b"".join(map(sieve.feed, pieces)) == (chat("a") + DONE).replace(b"\n", b"\r")


def test_every_cut_in_two() -> None:
    data = b"".join([chat("a"), USAGE.encode(), DONE]).replace(b"\n", b"\r\n")
    expected = (chat("a") + DONE).replace(b"\n", b"\r\n")
    for one, other in itertools.product(range(0, len(data), 3), range(0, len(data), 7)):
        assert sifted(data, [one, other]) == expected
