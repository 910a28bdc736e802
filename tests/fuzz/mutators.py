"""Ways to spoil a stream of bytes, given as units (lines, chunks, frames)."""

from __future__ import annotations

import random
import re
from collections.abc import Callable

from tests.fuzz import frames
from tests.fuzz.seeds import Units

MOST_BYTES = 300_000
MOST_SEGMENTS = 400

Mutator = Callable[[Units, Units, random.Random], None]
"""Changes the first list in place; the second is another stream, to take pieces from."""

NUMBERS = [
    b"0",
    b"-1",
    b"+5",
    b"1",
    b"00000000005",
    b"0x10",
    b"1e3",
    b"65535",
    b"65536",
    b"2147483648",
    b"4294967296",
    b"18446744073709551616",
    b"9" * 40,
    b"ffffffffffffffff",
    b"f" * 5000,
    b" 5 ",
    b"5, 5",
    b"\xb2",
]

WORDS = [
    b"\r\n",
    b"\r",
    b"\n",
    b"\r\n\r\n",
    b"\n\n",
    b"\r\r",
    b"\n\r",
    b"\r\n ",
    b"\x00",
    b" ",
    b"\t",
    b"\x0b",
    b":",
    b": ",
    b";",
    b",",
    b'"',
    b"{",
    b"\xff",
    b"\xc3\x28",
    b"\xe2\x80\xa8",
    b"HTTP/1.1",
    b"HTTP/1.1 200 OK\r\n",
    b"HTTP/1.0",
    b"HTTP/2.0",
    b"GET /v1/models HTTP/1.1\r\nHost: x\r\n\r\n",
    b"Host: other\r\n",
    b"Content-Length: 5\r\n",
    b"Content-Length : 5\r\n",
    b"Content-Length: 5, 6\r\n",
    b"Transfer-Encoding: chunked\r\n",
    b"Transfer-Encoding: gzip, chunked\r\n",
    b"Transfer-Encoding:\x0bchunked\r\n",
    b"Transfer-Encoding: identity\r\n",
    b"Content-Encoding: gzip\r\n",
    b"Content-Type: text/event-stream\r\n",
    b"Connection: close\r\n",
    b"Connection: keep-alive, Content-Length\r\n",
    b"Expect: 100-continue\r\n",
    b"Upgrade: h2c\r\nHTTP2-Settings: AAMAA\r\n",
    b"Upgrade: websocket\r\n",
    b"X-Request-Id: \x7f\r\n",
    b"0\r\n\r\n",
    b"0\r\n",
    b"data: [DONE]\n\n",
    b'"done":true',
    b"event: error\n",
    b": comment\n\n",
    b'{"a":' * 3000,
    b"[" * 20_000,
    b"A" * 70_000,
    frames.PREFACE,
    frames.settings(),
]

BYTES = b'\x00\x01\t\n\r "%,:;?{}\x7f\x80\xff'

_DIGITS = re.compile(rb"[0-9a-f]*[0-9][0-9a-f]*")


def _spot(units: Units, dice: random.Random) -> int | None:
    """A unit with something in it."""
    filled = [index for index, unit in enumerate(units) if unit]
    return dice.choice(filled) if filled else None


def flip(units: Units, _other: Units, dice: random.Random) -> None:
    """Turn over some bits."""
    for _ in range(dice.choice([1, 1, 1, 2, 8])):
        if (index := _spot(units, dice)) is not None:
            unit = bytearray(units[index])
            unit[dice.randrange(len(unit))] ^= 1 << dice.randrange(8)
            units[index] = bytes(unit)


def poke(units: Units, _other: Units, dice: random.Random) -> None:
    """Put one of the bytes with a meaning somewhere."""
    if (index := _spot(units, dice)) is not None:
        unit = bytearray(units[index])
        unit[dice.randrange(len(unit))] = dice.choice(BYTES)
        units[index] = bytes(unit)


def cut(units: Units, _other: Units, dice: random.Random) -> None:
    """Leave out a part of a unit."""
    if (index := _spot(units, dice)) is not None:
        unit = units[index]
        start = dice.randrange(len(unit))
        units[index] = unit[:start] + unit[start + dice.choice([1, 1, 2, 5, len(unit)]) :]


def stop_early(units: Units, _other: Units, dice: random.Random) -> None:
    """End in the middle of something."""
    if (index := _spot(units, dice)) is not None:
        units[index:] = [units[index][: dice.randrange(len(units[index]))]]


def repeat(units: Units, _other: Units, dice: random.Random) -> None:
    """Say a part of a unit again and again."""
    if (index := _spot(units, dice)) is not None:
        unit = units[index]
        start = dice.randrange(len(unit))
        end = min(len(unit), start + dice.choice([1, 2, 8, 64]))
        units[index] = unit[:end] + unit[start:end] * dice.choice([1, 1, 3, 20, 2000]) + unit[end:]


def insert(units: Units, _other: Units, dice: random.Random) -> None:
    """Put a delimiter or a header where none was."""
    if (index := _spot(units, dice)) is not None:
        unit = units[index]
        at = dice.choice([0, len(unit), dice.randint(0, len(unit))])
        units[index] = unit[:at] + dice.choice(WORDS) + unit[at:]


def renumber(units: Units, _other: Units, dice: random.Random) -> None:
    """Change a number: a length, a chunk's size, a status."""
    places = [(index, found) for index, unit in enumerate(units) for found in _DIGITS.finditer(unit[:400])]
    if places:
        index, found = dice.choice(places)
        unit = units[index]
        units[index] = unit[: found.start()] + dice.choice(NUMBERS) + unit[found.end() :]


def drop(units: Units, _other: Units, dice: random.Random) -> None:
    """Leave out a unit."""
    if units:
        del units[dice.randrange(len(units))]


def double(units: Units, _other: Units, dice: random.Random) -> None:
    """Send a unit twice, or very often."""
    if units:
        index = dice.randrange(len(units))
        units[index:index] = [units[index]] * dice.choice([1, 1, 1, 2, 50])


def reorder(units: Units, _other: Units, dice: random.Random) -> None:
    """Swap two units, or shuffle them all."""
    if len(units) < 2:
        return
    if dice.random() < 0.2:
        dice.shuffle(units)
    else:
        one, two = dice.sample(range(len(units)), 2)
        units[one], units[two] = units[two], units[one]


def splice(units: Units, other: Units, dice: random.Random) -> None:
    """Begin as this and go on as another."""
    units[dice.randint(0, len(units)) :] = other[dice.randint(0, len(other)) :]


def graft(units: Units, other: Units, dice: random.Random) -> None:
    """Put a unit of another stream in."""
    if other:
        units.insert(dice.randint(0, len(units)), dice.choice(other))


def new_frame(units: Units, _other: Units, dice: random.Random) -> None:
    """Put in a frame that has no place there."""
    units.insert(dice.randint(min(1, len(units)), len(units)), frames.hostile(dice))


def reframe(units: Units, _other: Units, dice: random.Random) -> None:
    """Change a frame's head: its length, type, flags or stream."""
    if (index := _spot(units, dice)) is None or len(units[index]) < 9:
        return
    head, payload = bytearray(units[index][:9]), units[index][9:]
    what = dice.randrange(4)
    if what == 0:
        head[:3] = dice.choice([0, 1, 4, 5, 16384, 16385, 2**24 - 1]).to_bytes(3, "big")
    elif what == 1:
        head[3] = dice.randrange(12)
    elif what == 2:
        head[4] = dice.choice([0, 0xFF, head[4] ^ (1 << dice.randrange(8))])
    else:
        head[5:] = dice.choice([0, 1, 2, 3, 5, 0x7FFFFFFF, 0xFFFFFFFF]).to_bytes(4, "big")
    units[index] = bytes(head) + payload


ANYWHERE: list[Mutator] = [
    *(flip, poke, cut, stop_early, repeat, insert, insert, renumber, renumber),
    *(drop, double, reorder, splice, graft),
]
IN_FRAMES: list[Mutator] = [
    new_frame,
    new_frame,
    new_frame,
    reframe,
    reframe,
    drop,
    double,
    reorder,
    *ANYWHERE,
]


def spoil(units: Units, other: Units, mutators: list[Mutator], dice: random.Random) -> Units:
    """A spoilt copy; one in twenty stays as it is."""
    units = list(units)
    for _ in range(dice.choice([0, *[1] * 8, *[2] * 6, *[3] * 3, 5, 8])):
        dice.choice(mutators)(units, other, dice)
    size, kept = 0, []
    for unit in units:
        kept.append(unit[: MOST_BYTES - size])
        size += len(kept[-1])
    return kept


def segments(units: Units, dice: random.Random) -> list[bytes]:
    """Cut the stream into what is written at once: all of it, a unit at a time, anywhere, byte by byte."""
    data = b"".join(units)
    way = dice.randrange(5)
    if way == 0 or not data:
        return [data]
    if way == 1 and len(units) <= MOST_SEGMENTS:
        return [unit for unit in units if unit]
    if way == 2 and len(data) <= MOST_SEGMENTS:
        return [data[at : at + 1] for at in range(len(data))]
    places = sorted(dice.randrange(len(data)) for _ in range(dice.choice([1, 2, 5, 30])))
    return [data[a:b] for a, b in zip([0, *places], [*places, len(data)], strict=True) if a < b]
