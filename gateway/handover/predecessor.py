"""The process that runs, seen from the one that takes over."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from typing import Any

import msgspec
import structlog
import trio

from gateway.gateway import Gateway
from gateway.handover.line import WORD_SECONDS, HandoverError, Keeps, Line, Sockets

log = structlog.get_logger("gateway.handover")


class Predecessor:
    """``sockets`` are those it listens on, and ``keeps`` what it may use of each engine, as far as is known.

    ``ended`` is set when it is known that it uses nothing any more.
    """

    def __init__(self, end: trio.socket.SocketType, line: Line, sockets: Sockets, keeps: Keeps) -> None:
        self._end = end
        self._line = line
        self.sockets = sockets
        self.keeps = keeps
        self.ended = trio.Event()

    def close(self) -> None:
        """Take nothing over."""
        self._end.close()
        for _, each in self.sockets:
            each.close()

    async def serves(self, addresses: Sequence[str]) -> None:
        """Say that we serve, at these addresses, and wait until it has stopped accepting.

        If it has gone meanwhile, or doesn't answer, that is no reason not to serve: what it was known to
        keep stays free until more is known.
        """
        for address, each in self.sockets:
            if address not in addresses:
                log.warning("this address isn't listened on any more", address=address)
                each.close()
        with trio.move_on_after(WORD_SECONDS), suppress(OSError):
            await self._line.say({"serves": list(addresses)})
            while (word := await self._hear()) is not None and "left" not in word:
                pass

    async def follow(self, gateway: Gateway) -> None:
        """Keep free what it still uses, until it has ended."""
        with self._end:
            while (word := await self._hear()) is not None:
                if "keeps" in word:
                    self.keeps = _read(word["keeps"])
                    self.leave_free(gateway)
        held = [each for each in gateway.engines if self.keeps.get(each.settings.url, (0, 0))[0]]
        if held:
            # It has ended in the middle of something: its engines may go on for a while.
            seconds = max(each.settings.reclaim_seconds for each in held)
            names = [each.name for each in held]
            log.warning("the process before has ended early", engines=names, seconds=seconds)
            await trio.sleep(seconds)
        self.keeps = {}
        self.leave_free(gateway)
        self.ended.set()
        log.info("the process before has ended")

    def leave_free(self, gateway: Gateway) -> None:
        """Use of each engine what it doesn't."""
        gateway.elsewhere = self.keeps
        for engine in gateway.engines:
            engine.used_elsewhere(*self.keeps.get(engine.settings.url, (0, 0)))
        gateway.admission.wake()

    async def _hear(self) -> dict[str, Any] | None:
        try:
            return await self._line.hear()
        except (OSError, msgspec.DecodeError):
            return None


def _read(keeps: dict[str, list[int]]) -> Keeps:
    return {url: (slots, tokens) for url, (slots, tokens) in keeps.items()}


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
        line, files = Line(end), list[int]()
        if not line.trusted:
            raise HandoverError(f"The process that listens at {path} is another user's ({line.owner}).")
        with trio.move_on_after(WORD_SECONDS), suppress(OSError, msgspec.DecodeError):
            await line.say({"takes": 1})
            word = await line.hear(files)
            received = [socket.socket(fileno=each) for each in files]
            for each in received:
                undo.callback(each.close)
            keeps = await line.hear()
            if word is not None and keeps is not None and len(word["sockets"]) == len(received):
                undo.pop_all()
                sockets = list(zip(word["sockets"], received, strict=True))
                return Predecessor(
                    end, line, sockets, {url: (s, t) for url, (s, t) in keeps["keeps"].items()}
                )
    raise HandoverError(f"The process that runs, at {path}, doesn't hand over its sockets.")
