"""The border to httpx, over real sockets of this process: every byte as it is, every failure by its name."""

from __future__ import annotations

import gc
import re
import socket
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio
import trio.testing

from gateway import config, direct, transport
from gateway.engine import Call, Engine
from gateway.errors import Code, EngineError, GatewayError
from gateway.transport import make_engine
from gateway.words import RawHeaders
from tests.conftest import Tls
from tests.fakes import Body
from tests.support.scripted import Script, ScriptedEngine, deaf_port
from tests.support.scripts import End, Raw, Stale

SOON_SECONDS = 1.0  # A socket that is forgotten stays open until the collector runs.

WHOLE = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi"
LENGTH_9 = b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhi"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
hello = Raw([WHOLE])


@pytest.fixture(autouse=True, params=["direct", "httpx"])
def carrier(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """What carries plain HTTP here: what always does, or what carries TLS otherwise."""

    def stock(*, uds: str | None, reuse: bool, **_: Any) -> httpx.AsyncHTTPTransport:
        most = None if reuse else 0
        limits = httpx.Limits(max_keepalive_connections=most, keepalive_expiry=direct.KEEPALIVE_SECONDS)
        return httpx.AsyncHTTPTransport(uds=uds, limits=limits, trust_env=False, verify=False)

    if request.param == "httpx":
        monkeypatch.setattr(transport, "DirectTransport", stock)
    return str(request.param)


class Far:
    """A scripted engine at the far end, and our way to it."""

    def __init__(self, scripted: ScriptedEngine) -> None:
        self.scripted = scripted
        self.engine = engine(scripted.url)
        self.open = self.engine.open

    async def ask(self, call: Call) -> bytes:
        return await ask(self.engine, call)


@asynccontextmanager
async def far(script: Script, *plan: Script, unix: str | None = None) -> AsyncIterator[Far]:
    """`plan` is for the first calls."""
    scripted = ScriptedEngine(script, unix=unix)
    scripted.plan = list(plan)
    there = Far(scripted)
    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(scripted.serve)
            yield there
            await there.engine.transport.aclose()
            nursery.cancel_scope.cancel()
    gc.collect()  # What was left behind warns here, in the test that left it.


@asynccontextmanager
async def listening(handler: Callable[[Any], Any], tls: ssl.SSLContext | None = None) -> AsyncIterator[int]:
    """A server below HTTP; its port."""
    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:
            serve: Any = trio.serve_tcp
            if tls is not None:
                serve = partial(trio.serve_ssl_over_tcp, ssl_context=tls, https_compatible=True)
            (listener,) = await nursery.start(partial(serve, handler, port=0, host="127.0.0.1"))
            yield getattr(listener, "transport_listener", listener).socket.getsockname()[1]
            nursery.cancel_scope.cancel()
    gc.collect()


def engine(url: str, *, connect_seconds: float = 2, **settings: Any) -> Engine:
    entry = config.Engine(name="e", kind="openai", url=url, slots=1, models=("m",), **settings)
    return make_engine(entry, connect_seconds=connect_seconds)


def call(
    body: bytes = b"{}",
    *,
    target: bytes = b"/v1/x",
    headers: RawHeaders | None = None,
    fresh: bool = False,
    connected: Callable[[], None] = lambda: None,
) -> Call:
    head = [(b"Host", b"h"), *(headers or []), (b"Content-Length", b"%d" % len(body))]
    return Call(target=target, headers=head, body=body, fresh=fresh, connected=connected)


async def ask(engine: Engine, call: Call) -> bytes:
    body = b""
    async with engine.open(call) as answer:
        while data := await answer.receive():
            body += data
    return body


# Bytes.


async def test_request_goes_up_as_it_was_given() -> None:
    target = b"/v1/x?q=%7e|'\"<>{}^`\\&&=%zz"
    headers = [(b"X-Twice", b"a"), (b"x-twice", b"B"), (b"Accept-Encoding", b"identity")]
    async with far(hello) as there:
        assert await there.ask(call(b'{"a" : 1}', target=target, headers=headers)) == b"hi"
        (seen,) = there.scripted.calls
    assert (seen.method, seen.target.encode(), seen.body) == ("POST", target, b'{"a" : 1}')
    given = [("Host", "h"), *((name.decode(), value.decode()) for name, value in headers)]
    assert seen.headers == [*given, ("Content-Length", "9")]
    assert seen.stray == b""


async def test_answer_comes_down_as_it_was_sent() -> None:
    """No redirect is followed, no cookie kept, nothing decoded."""
    head = (
        b"HTTP/1.1 302 Found\r\nSet-Cookie: a\r\nset-cookie: b\r\nLocation: /elsewhere\r\n"
        b"Content-Encoding: gzip\r\nContent-Length: 8\r\n\r\n"
    )
    async with far(Raw([head + b"not gzip"])) as there:
        for _ in range(2):
            async with there.open(call()) as answer:
                assert answer.status == 302
                assert answer.headers[:2] == [(b"Set-Cookie", b"a"), (b"set-cookie", b"b")]
                assert [await answer.receive() for _ in range(3)] == [b"not gzip", b"", b""]
        assert len(there.scripted.calls) == 2
        assert there.scripted.calls[1].header("Cookie") is None


async def test_each_chunk_comes_as_soon_as_it_is_there() -> None:
    go_on = trio.Event()
    early = b"HTTP/1.1 103 Early Hints\r\n\r\n"
    script = Raw([early + CHUNKED + b"3\r\none\r\n0003;x=y\r\ntw", go_on, b"o\r\n0\r\nTrailer: x\r\n\r\n"])
    async with far(script) as there, there.open(call()) as answer:
        got = await answer.receive()
        while len(got) < 5:
            got += await answer.receive()
        assert got == b"onetw"
        go_on.set()
        assert (await answer.receive(), await answer.receive()) == (b"o", b"")


@pytest.mark.parametrize(
    "given", [{"target": b"/v1/x?a b"}, {"target": b"/v1/x?\x01"}, {"headers": [(b"X(A)", b"a")]}]
)
async def test_head_that_http1_cannot_say_is_the_client_s_fault(given: dict[str, Any]) -> None:
    async with far(hello) as there:
        with pytest.raises(GatewayError) as caught:
            await there.ask(call(**given))
        assert caught.value.code is Code.INVALID_REQUEST
        assert not isinstance(caught.value, EngineError)
        assert there.scripted.calls == []


async def test_body_is_forgotten_once_it_is_sent() -> None:
    script = Raw([CHUNKED + b"1\r\na\r\n", trio.Event()])
    async with far(script) as there, there.open(call(Body(b"x" * 100_000))) as answer:
        assert await answer.receive() == b"a"
        assert Body.alive == 0


# Connections.


async def test_connection_is_used_again_after_a_clean_end_only() -> None:
    connected: list[int] = []
    async with far(hello) as there:
        one = call(connected=lambda: connected.append(len(there.scripted.calls)))
        assert [await there.ask(one), await there.ask(one)] == [b"hi", b"hi"]
        assert (there.scripted.accepted, connected) == (1, [0, 1]), "told before the engine sees the request"
        async with there.open(one):
            pass
        assert await there.ask(one) == b"hi"
        assert there.scripted.accepted == 2


async def test_fresh_call_has_a_connection_of_its_own_that_is_not_kept() -> None:
    async with far(hello) as there:
        await there.ask(call())
        for number in (2, 3):
            assert await there.ask(call(fresh=True)) == b"hi"
            assert there.scripted.accepted == number
            await there.scripted.until(lambda: len(there.scripted.connections) == 1)
        await there.ask(call())
        assert there.scripted.accepted == 3


async def test_idle_connection_is_let_go_before_the_engine_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "KEEPALIVE_SECONDS", 0.0)
    async with far(hello) as there:
        await there.ask(call())
        await there.ask(call())
        assert there.scripted.accepted == 2


@pytest.mark.parametrize("end", [End.FIN, End.RST])
async def test_kept_connection_that_was_dead_is_stale_and_a_new_one_is_not(end: End) -> None:
    async with far(Stale(hello, end)) as there:
        await there.ask(call())
        with pytest.raises(EngineError) as caught:
            await there.ask(call())
        assert (caught.value.code, caught.value.stale) == (Code.ENGINE_FAILED, True)
        there.scripted.script = Raw([end])
        with pytest.raises(EngineError) as caught:
            await there.ask(call(fresh=True))
        assert (caught.value.code, caught.value.stale) == (Code.ENGINE_FAILED, False)
        assert there.scripted.accepted == 2


async def test_failure_on_a_kept_connection_that_was_alive_is_not_stale() -> None:
    async with far(Raw([b"SSH-2.0-OpenSSH_9.2\r\n\r\n"]), hello) as there:
        await there.ask(call())
        with pytest.raises(EngineError) as caught:
            await there.ask(call())
        assert re.search("Expected HTTP/|illegal status line", str(caught.value.detail))
        assert (caught.value.stale, there.scripted.accepted) == (False, 1)


async def test_connection_closed_while_idle_is_found_out_before_it_is_used() -> None:
    async with far(Raw([WHOLE, End.FIN])) as there:
        for number in (1, 2):
            assert await there.ask(call()) == b"hi"
            assert there.scripted.accepted == number
            await there.scripted.until(lambda: not there.scripted.connections)


# Failures by name.


@pytest.mark.parametrize(
    ("steps", "words"),
    [
        ([End.FIN], "failed before it answered: .* disconnected"),
        ([End.RST], "failed before it answered: .*[Rr]eset"),
        ([b"HTTP/1.1 200 OK\r\nContent-Le", End.FIN], "failed before it answered"),
        ([b"SSH-2.0-OpenSSH_9.2\r\n\r\n"], "failed before it answered: (Expected HTTP/|illegal status line)"),
        ([b"HTTP/1.1 200 OK\r\nBad Field: 1\r\n\r\n"], "failed before it answered: (Invalid|illegal) header"),
        ([LENGTH_9, End.FIN], "broke off: .* closed .*connection"),
        ([CHUNKED + b"2\r\nhi\r\n", End.FIN], "broke off: .* closed .*connection"),
        (
            [CHUNKED + b"2\r\nhi\r\nzz\r\n"],
            "broke off: (Invalid character in chunk size|illegal chunk header)",
        ),
        ([CHUNKED + b"2\r\nhiho\r\n"], "broke off: (Expected LF after chunk data|malformed chunk footer)"),
    ],
)
async def test_failure_of_an_engine_that_was_reached(steps: list[Any], words: str) -> None:
    async with far(Raw(steps)) as there:
        with pytest.raises(EngineError) as caught:
            await there.ask(call())
        assert re.search(words, str(caught.value.detail))
        assert caught.value.message in (
            "The engine failed before it answered.",
            "The engine's answer broke off.",
        )
        assert (caught.value.code, caught.value.stale) == (Code.ENGINE_FAILED, False)
        with trio.fail_after(SOON_SECONDS):
            await there.scripted.until(lambda: not there.scripted.connections)


async def test_reset_in_the_middle_of_an_answer() -> None:
    go_on = trio.Event()
    async with far(Raw([LENGTH_9, go_on, End.RST])) as there, there.open(call()) as answer:
        assert await answer.receive() == b"hi"
        go_on.set()
        with pytest.raises(EngineError) as caught:
            await answer.receive()
        assert re.search("broke off: .*[Rr]eset", str(caught.value.detail))


async def test_engine_that_cannot_be_reached(tmp_path: Path) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        for url in (f"http://127.0.0.1:{unused.getsockname()[1]}", f"unix:{tmp_path}/no.sock"):
            with pytest.raises(EngineError, match=r"^The engine can't be reached\.$") as caught:
                await ask(engine(url), call())
            assert re.search(r"can't be reached: .+\.", str(caught.value.detail))
            assert (caught.value.code, caught.value.stale) == (Code.NO_ENGINE, False)


async def test_engine_that_does_not_take_the_connection() -> None:
    with deaf_port() as port:
        deaf = engine(f"http://127.0.0.1:{port}", connect_seconds=0.1)
        with pytest.raises(EngineError, match="didn't take the connection") as caught:
            await ask(deaf, call())
        assert (caught.value.code, caught.value.stale) == (Code.NO_ENGINE, False)
        with trio.move_on_after(0.05) as scope:
            await ask(deaf, call())
        assert scope.cancelled_caught
    gc.collect()


async def test_tls_engine_is_trusted_by_its_authority_only(tls: Tls) -> None:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(tls.certificate, tls.key)

    async def answer(stream: trio.SSLStream[trio.SocketStream]) -> None:
        try:
            await stream.receive_some()
        except trio.BrokenResourceError:
            return  # The handshake came to nothing.
        await stream.send_all(WHOLE)
        await stream.receive_some()

    async with listening(answer, context) as port:
        trusting = engine(f"https://127.0.0.1:{port}", ca=str(tls.certificate.parent / "authority.pem"))
        assert await ask(trusting, call()) == b"hi"
        await trusting.transport.aclose()
        with pytest.raises(EngineError) as caught:
            await ask(engine(f"https://127.0.0.1:{port}"), call())
        assert "certificate verify failed" in str(caught.value.detail)
        assert caught.value.code is Code.NO_ENGINE


async def test_unix_socket_and_proxy_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("ALL_PROXY", "http://127.0.0.1:9")
    async with far(hello, unix=str(tmp_path / "e.sock")) as there:
        assert await there.ask(call()) == b"hi"
        assert there.engine.policy.host == b"localhost"


# Cancelled in every phase: the engine learns of it at once.


@pytest.mark.parametrize("reading", [True, False], ids=["in a read", "between two reads"])
@pytest.mark.parametrize(
    ("answer", "reads"),
    [
        pytest.param(b"", 0, id="no head"),
        pytest.param(b"HTTP/1.1 200 O", 0, id="half a head"),
        pytest.param(CHUNKED, 0, id="no body"),
        pytest.param(CHUNKED + b"1\r\na\r\n", 1, id="streaming"),
        pytest.param(CHUNKED + b"1\r\na\r\n" * 3, 1, id="more is there already"),
    ],
)
async def test_cancelling_closes_the_connection_at_once(answer: bytes, reads: int, reading: bool) -> None:
    async def reader(there: Far) -> None:
        async with there.open(call()) as one:
            for _ in range(reads):
                await one.receive()
            while reading and await one.receive():
                pass
            await trio.Event().wait()

    async with far(Raw([answer, trio.Event()])) as there:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(reader, there)
            await there.scripted.call()
            await trio.testing.wait_all_tasks_blocked(0.02)
            nursery.cancel_scope.cancel()
        with trio.fail_after(SOON_SECONDS):
            await there.scripted.calls[0].closed()


@pytest.mark.parametrize(("scheme", "size"), [("http", 20_000_000), ("https", 2)])
async def test_cancelling_before_the_request_is_out_closes_the_connection_at_once(
    scheme: str, size: int
) -> None:
    """In the middle of a large body, or of the TLS handshake."""
    begun, cancelled, closed = trio.Event(), trio.Event(), trio.Event()

    async def reads_late(stream: trio.SocketStream) -> None:
        begun.set()
        await cancelled.wait()
        with suppress(trio.BrokenResourceError):
            while await stream.receive_some():
                pass
        closed.set()

    async with listening(reads_late) as port:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask, engine(f"{scheme}://127.0.0.1:{port}"), call(b"x" * size))
            await begun.wait()
            await trio.testing.wait_all_tasks_blocked(0.02)
            nursery.cancel_scope.cancel()
        cancelled.set()
        with trio.fail_after(SOON_SECONDS):
            await closed.wait()
