"""A restart without a gap: a new process takes over from the one that runs, over a unix socket.

The one that runs hands out its listening sockets (``SCM_RIGHTS``, unix(7)), so that no connection is refused,
and goes on with what it has. Who is connected to it is served by it, and told with each answer that the
connection ends there. From the beginning it says how much of each engine it may still use: what it holds, or
one slot as long as somebody is connected. That number only falls, and the new one uses what is left: together
they never have more than an engine's slots.

The messages are lines of JSON. The new one says ``{"takes": 1}`` and, when it serves, ``{"serves": true}``;
the old one answers with ``{"sockets": […]}`` and the sockets, then ``{"left": true}``, and ``{"keeps":
{engine: [slots, tokens]}}`` whenever that has changed. It closes when it has ended.
"""

from __future__ import annotations

import os
import socket
import struct
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from typing import Any

import msgspec
import structlog
import trio

from gateway.gateway import Gateway
from gateway.server import bind

log = structlog.get_logger("gateway.handover")

_LOOK_SECONDS = 0.02
"""How often the old process looks what it still holds."""

_WORD_SECONDS = 10.0
"""How long either may take to say the next word."""

_LAST_WORD_SECONDS = 0.5

_MOST_SOCKETS = 250
"""Linux passes at most 253 descriptors at once (SCM_MAX_FD)."""

_MOST_BYTES = 1 << 20

Sockets = list[tuple[str, socket.socket]]
"""Listening sockets, with the addresses that the configuration gives them."""


class HandoverError(Exception):
    """The process that runs doesn't hand over; the message says why."""


class _Line:
    """One end: lines of JSON, and sockets with the first of them."""

    def __init__(self, end: trio.socket.SocketType) -> None:
        self._end = end
        self._read = b""
        self._closed = False

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


def _keep(taken: list[int], files: list[int] | None) -> None:
    if files is not None:
        files += taken
        return
    for each in taken:
        os.close(each)


class Predecessor:
    """The process that runs, seen from the one that takes over.

    ``sockets`` are those it listens on, and ``keeps`` what it may use of each engine, as far as is known.
    """

    def __init__(
        self, end: trio.socket.SocketType, line: _Line, sockets: Sockets, keeps: dict[str, list[int]]
    ) -> None:
        self._end = end
        self._line = line
        self.sockets = sockets
        self.keeps = keeps

    def close(self) -> None:
        """Take nothing over."""
        self._end.close()
        for _, each in self.sockets:
            each.close()

    async def leaves(self) -> None:
        """Say that we serve, and wait until it has stopped accepting. Raises HandoverError."""
        with trio.move_on_after(_WORD_SECONDS), suppress(OSError):
            await self._line.say({"serves": True})
            while (word := await self._line.hear()) is not None:
                if "left" in word:
                    return
        raise HandoverError("The process that runs doesn't leave.")

    async def follow(self, gateway: Gateway) -> None:
        """Keep free what it still uses, until it has ended."""
        with self._end:
            while (word := await self._hear()) is not None:
                if "keeps" in word:
                    self.keeps = word["keeps"]
                    self.leave_free(gateway)
        held = {name for name, (slots, _) in self.keeps.items() if slots}
        seconds = max(
            (each.settings.reclaim_seconds for each in gateway.engines if each.name in held), default=0.0
        )
        if held:
            # It has ended in the middle of something: its engines may go on for a while.
            log.warning("the process before has ended early", engines=sorted(held), seconds=seconds)
            await trio.sleep(seconds)
        self.keeps = {}
        self.leave_free(gateway)
        log.info("the process before has ended")

    def leave_free(self, gateway: Gateway) -> None:
        """Use of each engine what it doesn't."""
        for engine in gateway.engines:
            engine.used_elsewhere(*self.keeps.get(engine.name, (0, 0)))
        gateway.admission.wake()

    async def _hear(self) -> dict[str, Any] | None:
        try:
            return await self._line.hear()
        except (OSError, msgspec.DecodeError):
            return None


async def take_over(path: str) -> Predecessor | None:
    """Ask the process that listens at ``path`` for its sockets; None if there is none.

    Raises HandoverError.
    """
    end = trio.socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    with ExitStack() as undo:
        undo.callback(end.close)
        try:
            await end.connect(path)
        except (FileNotFoundError, ConnectionRefusedError):
            return None
        except OSError as error:
            raise HandoverError(f"Can't ask the process that runs, at {path}: {error.strerror}.") from error
        line, files = _Line(end), list[int]()
        with trio.move_on_after(_WORD_SECONDS), suppress(OSError, msgspec.DecodeError):
            await line.say({"takes": 1})
            word = await line.hear(files)
            received = [socket.socket(fileno=each) for each in files]
            for each in received:
                undo.callback(each.close)
            keeps = await line.hear()
            if word is not None and keeps is not None and len(word["sockets"]) == len(received):
                undo.pop_all()
                sockets = list(zip(word["sockets"], received, strict=True))
                return Predecessor(end, line, sockets, keeps["keeps"])
    raise HandoverError(f"The process that runs, at {path}, doesn't hand over its sockets.")


class Handover:
    """The way out for the process that runs. ``leave`` is called when another one serves.

    ``connected`` says how many clients are connected. :meth:`serve` has to be running.
    """

    def __init__(
        self,
        gateway: Gateway,
        path: str,
        sockets: Sockets,
        *,
        leave: Callable[[], None],
        connected: Callable[[], int],
    ) -> None:
        self._gateway = gateway
        self._path = path
        self._sockets = sockets
        self._leave = leave
        self._connected = connected

    async def serve(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Wait for a successor until there is one, then tell it what we hold, until cancelled.

        Raises BindError if ``path`` can't be listened on.
        """
        mask = os.umask(0o177)  # It gives out our sockets: nobody else may ask.
        try:
            bound = bind(f"unix:{self._path}").socket
        finally:
            os.umask(mask)
        with trio.socket.from_stdlib_socket(bound) as listening:
            task_status.started()
            while True:
                end, _ = await listening.accept()
                with end:
                    line = _Line(end)
                    if await self._handed_over(end, line):
                        listening.close()
                        with suppress(OSError):
                            await line.say({"left": True})
                            await self._tell(line)
                        return

    async def _handed_over(self, end: trio.socket.SocketType, line: _Line) -> bool:
        """Hand over the sockets; say whether the other one serves now. Until then nothing has changed."""
        try:
            if _owner(end) not in (os.geteuid(), 0):
                return False
            with trio.move_on_after(_WORD_SECONDS):
                if (word := await line.hear()) is None or word.get("takes") != 1:
                    return False
                names, sockets = zip(*self._sockets, strict=True)
                await line.say({"sockets": names}, sockets)
                # It keeps free from its beginning what we may use.
                await line.say({"keeps": self._limit(at_most=True)})
            while (word := await line.hear()) is not None:
                if "serves" in word:
                    self._limit()
                    self._leave()
                    return True
        except (OSError, msgspec.DecodeError):
            pass
        return False

    async def _tell(self, line: _Line) -> None:
        told: dict[str, list[int]] = {}
        try:
            while True:
                if (keeps := self._limit()) != told:
                    told = keeps
                    await line.say({"keeps": keeps})
                await trio.sleep(_LOOK_SECONDS)
        finally:
            with trio.move_on_after(_LAST_WORD_SECONDS, shield=True):
                await line.say({"keeps": self._limit()})

    def _limit(self, *, at_most: bool = False) -> dict[str, list[int]]:
        """Have no more of each engine than what we hold, and return what that is: slots, and tokens.

        As long as somebody is connected he may ask for one more. ``at_most``: only say what it could be.
        """
        least = 1 if self._connected() or len(self._gateway.requests) else 0
        keeps = {}
        for engine in self._gateway.known_engines:
            ledger = engine.ledger
            if not at_most:
                one = ledger.kv_tokens // max(1, ledger.slots)  # What a slot has on average.
                tokens = min(ledger.kv_tokens, max(ledger.reserved, least * one, 1))
                ledger.resize(min(ledger.slots, max(ledger.held, least)), tokens if ledger.kv_tokens else 0)
            keeps[engine.name] = [ledger.slots, ledger.kv_tokens]
        return keeps


def _owner(end: trio.socket.SocketType) -> int:
    """Return the user of the other end (``SO_PEERCRED``, unix(7))."""
    size = struct.calcsize("3i")
    _, user, _ = struct.unpack("3i", end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    return int(user)
