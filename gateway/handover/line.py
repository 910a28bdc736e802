"""The unix socket between the two processes: lines of JSON, and descriptors (``SCM_RIGHTS``, unix(7))."""

from __future__ import annotations

import os
import select
import socket
import struct
from collections.abc import Iterable
from typing import Any

import msgspec
import trio

WORD_SECONDS = 10.0
"""How long either may take to say the next word, before the new one serves."""

_MOST_SOCKETS = 250
"""Linux passes at most 253 descriptors at once (SCM_MAX_FD)."""

_MOST_BYTES = 1 << 20

Sockets = list[tuple[str, socket.socket]]
"""Listening sockets, with the addresses that the configuration gives them."""

Keeps = dict[str, tuple[int, int]]
"""What of each engine, by its URL, may be used: slots, and tokens of its cache."""


class HandoverError(Exception):
    """The process that runs doesn't hand over; the message says why."""


class Line:
    """One end: lines of JSON, and sockets with the first of them."""

    def __init__(self, end: trio.socket.SocketType) -> None:
        self._end = end
        self._read = b""

    async def say(self, word: dict[str, Any], sockets: Iterable[socket.socket] = ()) -> None:
        """Say a word. Raises OSError."""
        data, files = msgspec.json.encode(word) + b"\n", [each.fileno() for each in sockets]
        if files:
            rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack(f"{len(files)}i", *files))]
            data = data[await self._end.sendmsg([data], rights) :]
        while data:
            data = data[await self._end.send(data) :]

    async def hear(self, files: list[int] | None = None) -> dict[str, Any] | None:
        """Return the next word, None at the end; descriptors that come are added to ``files``."""
        while b"\n" not in self._read:
            data, rights, _, _ = await self._end.recvmsg(65536, socket.CMSG_SPACE(4 * _MOST_SOCKETS))
            for level, kind, payload in rights:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                    taken = list(struct.unpack(f"{len(payload) // 4}i", payload[: len(payload) // 4 * 4]))
                    _keep(taken, files)
            self._read += data
            if not data or len(self._read) > _MOST_BYTES:
                return None
        line, _, self._read = self._read.partition(b"\n")
        word = msgspec.json.decode(line)
        return word if isinstance(word, dict) else None

    @property
    def hung_up(self) -> bool:
        """Whether the other end is closed, whatever is still to be read."""
        poll = select.poll()
        poll.register(self._end.fileno(), select.POLLRDHUP)
        return bool(poll.poll(0))

    @property
    def owner(self) -> int:
        """The user of the other end (``SO_PEERCRED``, unix(7))."""
        size = struct.calcsize("3i")
        _, user, _ = struct.unpack("3i", self._end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
        return int(user)

    @property
    def trusted(self) -> bool:
        """Whether the other end is our own user's, or root's."""
        return self.owner in (os.geteuid(), 0)


def _keep(taken: list[int], files: list[int] | None) -> None:
    if files is not None:
        files += taken
        return
    for each in taken:
        os.close(each)
