"""What is decided before a request may wait: is there such a path, what is asked, who could answer."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import trio

from gateway.config import Admission, Config, Kind
from gateway.config import Engine as Settings
from gateway.engine import Engine
from gateway.errors import Code, GatewayError
from gateway.gateway import Gateway
from gateway.headers import Caller
from gateway.request import Request
from gateway.words import Outcome, RawHeaders
from tests.tickets import ticket_for

CHAT = "/v1/chat/completions"


class NoWay:
    """A transport to nowhere."""

    def open(self, call: object) -> None:
        raise AssertionError("nothing here calls an engine")

    def connect_within(self, seconds: float) -> None: ...

    async def aclose(self) -> None:
        """Nothing is idle here."""


def engine(name: str, models: Sequence[str], kind: Kind = "vllm", slots: int = 2) -> Settings:
    return Settings(name=name, kind=kind, url="http://e", slots=slots, models=tuple(models))


def make(*engines: Settings, ended: list[Request] | None = None, queue: int = 8) -> Gateway:
    settings = Config(engine=engines, admission=Admission(queue=queue, queue_seconds=5))
    made = [Engine(each, NoWay(), host=b"e", prefix=b"") for each in engines]  # type: ignore[arg-type]
    log: list[Request] = [] if ended is None else ended
    return Gateway(settings, made, ended=log.append)


def asking(path: str = CHAT, *, method: str = "POST", headers: RawHeaders | None = None) -> Request:
    return Request(method=method, path=path, query=b"", headers=headers or [], caller=Caller("", "http"))


BOTH = (engine("a", ["m", "shared"]), engine("b", ["shared"], "ollama"))


# -------------------------------------------------------------------------------------------- routes


async def test_a_route_is_found_from_the_head_alone() -> None:
    gateway = make(*BOTH)
    for path in (CHAT, "/v1/messages", "/api/chat", "/tokenize"):
        request = asking(path)
        gateway.begin(request)
        assert gateway.route(request).path == path
        assert request.route == path


@pytest.mark.parametrize(
    ("path", "method"),
    [
        (CHAT + "/", "POST"),
        (CHAT + "/", "GET"),
        ("/V1/chat/completions", "POST"),
        ("/v1//chat/completions", "POST"),
        ("/v1/models", "POST"),
        ("/api/pull", "POST"),
        ("/api/delete", "DELETE"),
        ("/metrics", "GET"),
        ("", "POST"),
    ],
)
async def test_anything_else_is_not_found(path: str, method: str) -> None:
    request = asking(path, method=method)
    with pytest.raises(GatewayError) as caught:
        make(*BOTH).route(request)
    assert caught.value.code is Code.NOT_FOUND
    assert request.route == "other"


@pytest.mark.parametrize(("path", "kind"), [("/api/chat", "vllm"), ("/tokenize", "ollama")])
async def test_a_path_that_no_engine_of_ours_has_is_not_found(path: str, kind: Kind) -> None:
    with pytest.raises(GatewayError) as caught:
        make(engine("a", ["*"], kind)).route(asking(path))
    assert caught.value.code is Code.NOT_FOUND


@pytest.mark.parametrize("method", ["GET", "post", "OPTIONS", "PUT"])
async def test_a_route_takes_posts_only(method: str) -> None:
    request = asking(method=method)
    with pytest.raises(GatewayError) as caught:
        make(*BOTH).route(request)
    assert caught.value.code is Code.NOT_FOUND
    assert "POST" in caught.value.message


async def test_a_refusal_tells_the_paths_there_are_with_these_engines() -> None:
    with pytest.raises(GatewayError) as caught:
        make(engine("a", ["m"])).route(asking("/v1/nothing"))
    assert CHAT in caught.value.message
    assert "/api/chat" not in caught.value.message


@pytest.mark.parametrize(
    ("method", "header"),
    [
        ("POST", (b"content-TYPE", b"multipart/form-data; boundary=x")),
        ("POST", (b"Content-Type", b"Multipart/Mixed")),
        ("POST", (b"Content-Type", b" multipart/form-data")),
        ("GET", (b"Upgrade", b"WebSocket ")),
        ("CONNECT", (b"Host", b"e")),
    ],
)
async def test_what_is_not_supported_is_seen_in_the_head(method: str, header: tuple[bytes, bytes]) -> None:
    with pytest.raises(GatewayError) as caught:
        make(*BOTH).look_at_head(asking(method=method, headers=[header]))
    assert caught.value.code is Code.NOT_SUPPORTED


async def test_any_other_head_may_pass() -> None:
    for field in ((b"Content-Type", b""), (b"Content-Type", b"text/plain"), (b"Upgrade", b"h2c")):
        make(*BOTH).look_at_head(asking(headers=[field]))
    make(*BOTH).look_at_head(asking())


# -------------------------------------------------------------------------------------------- plans


async def test_a_plan_names_the_engines_that_serve_the_model_on_that_route() -> None:
    gateway = make(*BOTH, engine("c", ["*"]))
    for path, model, names in (
        (CHAT, "m", "ac"),
        (CHAT, "shared", "abc"),
        (CHAT, "unheard of", "c"),
        ("/api/chat", "shared", "b"),
        ("/tokenize", "shared", "ac"),
    ):
        request = asking(path)
        plan = gateway.plan(request, gateway.route(request), b'{"model":"%s"}' % model.encode())
        assert "".join(each.name for each in plan.stages[0].engines) == names
        assert plan.route.path == path
        assert plan.cost == 1
        assert request.model == model


async def test_a_plan_costs_what_the_body_asks_for() -> None:
    gateway = make(*BOTH)
    request = asking("/v1/completions")
    plan = gateway.plan(request, gateway.route(request), b'{"model":"m","prompt":["a","b"],"n":3}')
    assert plan.cost == 6


@pytest.mark.parametrize(
    ("path", "body", "stream"),
    [
        (CHAT, b'{"model":"shared"}', False),
        (CHAT, b'{"model":"shared","stream":null}', False),
        (CHAT, b'{"model":"shared","stream":true}', True),
        ("/api/chat", b'{"model":"shared"}', True),
        ("/api/chat", b'{"model":"shared","stream":false}', False),
        ("/api/embed", b'{"model":"shared"}', False),
    ],
)
async def test_whether_it_streams_is_what_the_body_says_or_the_routes_custom(
    path: str, body: bytes, stream: bool
) -> None:
    gateway = make(*BOTH)
    request = asking(path)
    gateway.plan(request, gateway.route(request), body)
    assert request.stream is stream


async def test_only_configured_models_become_labels() -> None:
    gateway = make(*BOTH, engine("c", ["*"]))
    for body, label in (
        (b'{"model":"m"}', "m"),
        (b'{"model":"made up"}', "other"),
        (b'{"model":"*"}', "other"),
        (b"{}", "other"),
    ):
        request = asking()
        gateway.plan(request, gateway.route(request), body)
        assert request.model_label == label


async def test_a_body_without_model_goes_where_any_model_is_served() -> None:
    request = asking()
    gateway = make(*BOTH, engine("c", ["*"]))
    plan = gateway.plan(request, gateway.route(request), b"{}")
    assert [each.name for each in plan.stages[0].engines] == ["c"]
    assert request.model is None


@pytest.mark.parametrize(
    ("path", "body", "code", "param"),
    [
        (CHAT, b"{}", Code.INVALID_REQUEST, "model"),
        (CHAT, b'{"model":null}', Code.INVALID_REQUEST, "model"),
        (CHAT, b'{"model":""}', Code.MODEL_NOT_FOUND, "model"),
        (CHAT, b'{"model":"M"}', Code.MODEL_NOT_FOUND, "model"),
        (CHAT, b'{"model":"*"}', Code.MODEL_NOT_FOUND, "model"),
        ("/api/chat", b'{"model":"m"}', Code.MODEL_NOT_FOUND, "model"),
        (CHAT, b'{"model":"m","model":"shared"}', Code.INVALID_REQUEST, "model"),
        (CHAT, b'{"model":', Code.INVALID_JSON, None),
        (CHAT, b"", Code.INVALID_JSON, None),
    ],
)
async def test_a_body_that_nobody_could_answer_is_refused(
    path: str, body: bytes, code: Code, param: str | None
) -> None:
    gateway = make(*BOTH)
    request = asking(path)
    with pytest.raises(GatewayError) as caught:
        gateway.plan(request, gateway.route(request), body)
    assert (caught.value.code, caught.value.param) == (code, param)


async def test_a_model_s_name_is_kept_for_the_record_only_if_it_is_no_longer_than_one() -> None:
    gateway = make(*BOTH)
    request = asking()
    with pytest.raises(GatewayError) as caught:
        gateway.plan(request, gateway.route(request), b'{"model":"' + b"x" * 10_000 + b'"}')
    assert (caught.value.code, caught.value.param) == (Code.INVALID_REQUEST, "model")
    assert len(caught.value.message) < 400
    assert request.model is None


# --------------------------------------------------------------------------------- beginning and end


async def test_a_request_is_live_from_its_beginning_to_its_end_and_recorded_once() -> None:
    ended: list[Request] = []
    gateway = make(*BOTH, ended=ended)
    request = asking()
    gateway.begin(request)
    assert gateway.requests.get(request.id) is request
    request.answered()
    gateway.end(request)
    assert len(gateway.requests) == 0
    assert ended == [request]
    assert request.outcome is Outcome.COMPLETED
    with pytest.raises(KeyError):
        gateway.end(request)
    assert ended == [request]


async def test_an_end_without_a_word_is_the_drains_or_the_engines() -> None:
    gateway = make(*BOTH)
    for outcome in (Outcome.ENGINE_FAILED, Outcome.DRAINED):
        request = asking()
        gateway.begin(request)
        gateway.end(request)
        assert request.outcome is outcome
        gateway.drain()


# --------------------------------------------------------------------------------------------- drain


async def test_a_drain_refuses_who_waits_and_who_comes_and_lets_the_rest_end() -> None:
    gateway = make(*BOTH)
    waiting, streaming = asking(), asking()
    gateway.begin(waiting)
    gateway.begin(streaming)
    streaming.dispatched("a")
    gateway.drain()
    assert gateway.draining
    assert streaming.stopped_by is None
    assert waiting.stopped_by is not None
    assert waiting.stopped_by.code is Code.DRAINING
    with pytest.raises(GatewayError) as caught:
        gateway.look_at_head(asking())
    assert caught.value.code is Code.DRAINING
    ticket = ticket_for(gateway.admission, gateway.engines, 1)
    with pytest.raises(GatewayError) as caught:
        async with gateway.admission.slot(ticket, waiting=lambda: None):
            raise AssertionError("admitted while draining")
    assert caught.value.code is Code.DRAINING


async def test_when_the_drain_is_over_every_answer_ends() -> None:
    gateway = make(*BOTH)
    requests = [asking(), asking()]
    for request in requests:
        gateway.begin(request)
        request.dispatched("a")
        request.reading = trio.CancelScope()
    gateway.drain()
    gateway.end_streams()
    for request in requests:
        assert request.stopped_by is not None
        assert request.stopped_by.code is Code.DRAINING
        assert request.reading is not None
        assert request.reading.cancel_called
