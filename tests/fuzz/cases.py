"""One case: what is sent in which pieces, and how the sender ends. Seed and number decide it."""

from __future__ import annotations

import random
import ssl
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from tests.fuzz.mutators import ANYWHERE, IN_FRAMES, segments, spoil
from tests.fuzz.seeds import ENGINE, HTTP1, HTTP2, Maker, Units, answer_body
from tests.support.routes import CHAT, MESSAGES, OLLAMA_CHAT, RESPONSES, Route

Kind = Literal["http1", "http2", "hello", "engine", "content"]
"""Bytes of a client, of a client before its TLS handshake, of an engine; `content` is an engine's odd body in
framing without fault, so that it is known what the client must get."""

Ending = Literal["close", "reset", "half_close", "hold", "keep"]

PLAIN: tuple[Kind, ...] = ("http1", "http1", "http2", "http2", "http2", "engine", "engine", "content")
TLS: tuple[Kind, ...] = ("http1", "http2", "http2", "hello", "engine")

ROUTE_OF: dict[str, Route] = {"named events": MESSAGES, "responses": RESPONSES, "lines": OLLAMA_CHAT}
TO_THE_END = 8.0
"""Who stays so long sees the end of any answer: the gateway's clocks are shorter."""

SHOWN_BYTES = 3000


@dataclass(frozen=True)
class Case:
    """`pauses` are seconds, one behind each segment; `dwell` is how long the client stays afterwards."""

    seed: int
    number: int
    kind: Kind
    name: str
    segments: tuple[bytes, ...]
    pauses: tuple[float, ...]
    ending: Ending
    dwell: float
    reads: bool = True
    route: Route = CHAT
    body: bytes = b""

    @property
    def id(self) -> str:
        return f"{self.seed}:{self.number}"

    def __str__(self) -> str:
        return self.tell(SHOWN_BYTES)

    def tell(self, most: int) -> str:
        """What it is, and as many of its bytes."""
        data = b"".join(self.segments)
        shown = repr(data[:most]) + (f" ... {len(data)} bytes" if len(data) > most else "")
        how = f"in {len(self.segments)} pieces, then {self.ending} after {self.dwell} s"
        return f"case {self.id}: {self.kind}, from {self.name!r}, {how}\n  {shown}"


def make(seed: int, number: int, kinds: tuple[Kind, ...]) -> Case:
    """The case of this number."""
    dice = random.Random(f"{seed}:{number}")
    kind = dice.choice(kinds)
    if kind == "hello":
        return _client(kind, "client hello", spoil(_hello(), [], ANYWHERE, dice), seed, number, dice)
    if kind == "content":
        return _content(seed, number, dice)
    makers: dict[str, Maker] = {"http1": HTTP1, "http2": HTTP2, "engine": ENGINE}[kind]
    name, other = dice.choice(sorted(makers)), dice.choice(sorted(makers))
    mutators = IN_FRAMES if kind == "http2" else ANYWHERE
    units = spoil(makers[name](dice), makers[other](dice), mutators, dice)
    if kind == "engine":
        return _engine(name, units, seed, number, dice)
    return _client(kind, name, units, seed, number, dice)


def _client(kind: Kind, name: str, units: Units, seed: int, number: int, dice: random.Random) -> Case:
    pieces, pauses = _timed(units, dice)
    ending: Ending = dice.choice(["close", "reset", "half_close"])
    dwell = dice.choice([0, 0, 0.002, 0.01, 0.05, 0.2])
    return Case(seed, number, kind, name, pieces, pauses, ending, dwell, reads=dice.random() < 0.85)


def _engine(name: str, units: Units, seed: int, number: int, dice: random.Random) -> Case:
    pieces, pauses = _timed(units, dice)
    ending: Ending = dice.choice(["close", "reset", "hold", "keep", "keep"])
    dwell = dice.choice([0, 0.005, 0.05, 0.3, 0.3, 0.3, 0.3, TO_THE_END])
    route = ROUTE_OF.get(name, CHAT)
    return Case(seed, number, "engine", name, pieces, pauses, ending, dwell, route=route)


def _content(seed: int, number: int, dice: random.Random) -> Case:
    """An answer that is whole as HTTP sees it, with a body that isn't what an engine would say."""
    route = dice.choice([CHAT, MESSAGES, RESPONSES, OLLAMA_CHAT])
    parts = answer_body(route, dice.choice([0, 1, 5, 40])).splitlines(keepends=True)
    other = answer_body(dice.choice([CHAT, MESSAGES, OLLAMA_CHAT]), 3).splitlines(keepends=True)
    body = b"".join(spoil(parts, other, ANYWHERE, dice))
    pieces = [piece for piece in segments([body], dice) if piece]
    head = f"HTTP/1.1 200 OK\r\nContent-Type: {route.media}\r\nTransfer-Encoding: chunked\r\n\r\n".encode()
    chunks = [b"%x\r\n%b\r\n" % (len(piece), piece) for piece in pieces]
    timed, pauses = _timed([head, *chunks, b"0\r\n\r\n"], dice)
    return Case(
        seed, number, "content", str(route), timed, pauses, "keep", TO_THE_END, route=route, body=body
    )


def _timed(units: Units, dice: random.Random) -> tuple[tuple[bytes, ...], tuple[float, ...]]:
    pieces = segments(units, dice)
    slow = dice.choice([0, 0, 0, 0.001, 0.004]) if len(pieces) < 40 else 0
    return tuple(pieces), tuple(slow * dice.random() for _ in pieces)


def _hello() -> Units:
    """A TLS client's first words. (They hold random bytes: the one thing here that no seed decides.)"""
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.set_alpn_protocols(["h2"])
    with suppress(ssl.SSLWantReadError):
        context.wrap_bio(incoming, outgoing, server_hostname="gateway.test").do_handshake()
    data = outgoing.read()
    return [data[at : at + 40] for at in range(0, len(data), 40)]
