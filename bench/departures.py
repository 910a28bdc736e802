"""Each way of leaving, in each phase: from the client's last word to the engine seeing its own socket closed.

Clients leave one after another, each by one way (FIN, RST, half-close, HTTP/2's RST_STREAM and GOAWAY), alone
or behind bytes that the gateway has not asked for (a stray CRLF, a pipelined request), in prefill or between
tokens, streaming or not. Both sides read the same monotonic clock.
"""

from __future__ import annotations

import json
import socket
import struct
import time
from itertools import product
from typing import NamedTuple

import h2.config
import h2.connection

from bench.figures import percentiles
from bench.report import Outcome, spread
from bench.targets import HOST, Engine, Gateway

PREFILL_MS = 3000
TPS = 20
LIMIT_MS = 10.0

now = time.monotonic


class Way(NamedTuple):
    """How a client leaves: over which protocol, by what, behind which bytes, when, streaming or not."""

    protocol: str
    by: str
    behind: str
    prefill: bool
    stream: bool

    def __str__(self) -> str:
        return f"{self.by}{f' behind {self.behind}' if self.behind else ''}"


WAYS = [
    *(
        Way("http1", *rest)
        for rest in product(
            ("FIN", "RST", "half-close"), ("", "CRLF", "request"), (True, False), (True, False)
        )
    ),
    *(
        Way("http2", by, "", prefill, stream)
        for by, prefill, stream in product(("RST_STREAM", "GOAWAY", "FIN"), (True, False), (True, False))
    ),
]


def departures(rounds: int) -> Outcome:
    """Report the worst and the usual time of each way of leaving."""
    outcome = Outcome("departures", f"{len(WAYS)} ways of leaving, {rounds} times each")
    times: dict[str, list[float]] = {}
    with Engine() as engine, Gateway(engine, slots=64) as gateway:
        left: dict[str, tuple[Way, float]] = {}
        for number in range(rounds):
            for way in WAYS:
                name = f"{number}-{WAYS.index(way)}"
                leave = _http1 if way.protocol == "http1" else _http2
                left[name] = (way, leave(gateway.port, way, name))
        ended = {each["user"]: each for each in engine.settled()["ended"]}
        for name, (way, at) in left.items():
            end = ended.get(name)
            if end is not None and end["outcome"] == "aborted":
                times.setdefault(str(way), []).append((end["ended"] - at) * 1000)
        ledger, _ = gateway.idle()
    torn_down = sum(map(len, times.values()))
    outcome.require("torn down / left", f"{torn_down}/{len(left)}", torn_down == len(left), "all")
    for described, spans in times.items():
        got = percentiles(spans)
        worst = got["p99"]
        outcome.require(
            f"{described}, p50 / p99 / max ms",
            spread(got, "p50", "p99", "max"),
            worst is not None and worst <= LIMIT_MS,
            f"p99 <= {LIMIT_MS:g}",
        )
    outcome.require(
        "ledger afterwards", "balanced" if ledger["balanced"] else "not", ledger["balanced"], "balanced"
    )
    return outcome


def _body(way: Way, name: str) -> bytes:
    sim = {"prefill_ms": PREFILL_MS if way.prefill else 0, "tps": TPS}
    request = {"model": "bench", "user": name, "stream": way.stream, "max_tokens": 100, "sim": sim}
    return json.dumps({**request, "messages": [{"role": "user", "content": "hi"}]}).encode()


def _http1(port: int, way: Way, name: str) -> float:
    body = _body(way, name)
    request = b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n%b" % (
        len(body),
        body,
    )
    behind = {"": b"", "CRLF": b"\r\n", "request": b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n"}[way.behind]
    with socket.create_connection((HOST, port)) as client:
        client.sendall(request + behind)
        _reach(client, way)
        if way.by == "RST":
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        at = now()
        if way.by == "half-close":
            client.shutdown(socket.SHUT_WR)
            time.sleep(0.05)  # It stays, as such clients do.
        return at


def _http2(port: int, way: Way, name: str) -> float:
    connection = h2.connection.H2Connection(h2.config.H2Configuration(client_side=True))
    connection.initiate_connection()
    head = [(":method", "POST"), (":path", "/v1/chat/completions"), (":scheme", "http"), (":authority", "x")]
    connection.send_headers(1, head)
    connection.send_data(1, _body(way, name), end_stream=True)
    with socket.create_connection((HOST, port)) as client:
        client.sendall(connection.data_to_send())
        _reach(client, way)
        if way.by == "RST_STREAM":
            connection.reset_stream(1, 8)
        elif way.by == "GOAWAY":
            connection.close_connection()
        at = now()
        if way.by != "FIN":
            client.sendall(connection.data_to_send())
            time.sleep(0.05)
        return at


def _reach(client: socket.socket, way: Way) -> None:
    """Go on until the request is where the client is to leave it."""
    if way.prefill or not way.stream:
        time.sleep(0.15)
        return
    client.settimeout(5)
    got = b""
    while got.count(b'" tk') < 3:
        got += client.recv(65536)
