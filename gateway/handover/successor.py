"""The way out for the process that runs: it offers its sockets, and tells what it still uses."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

import msgspec
import structlog
import trio

from gateway.gateway import Gateway
from gateway.handover.line import WORD_SECONDS, Keeps, Line, Sockets
from gateway.server import bind

log = structlog.get_logger("gateway.handover")

_LOOK_SECONDS = 0.02
"""How often the old process looks what it still holds."""

_SETTLE_SECONDS = 0.05
"""Connections accepted until accepting has stopped are known after so long."""

_LAST_WORD_SECONDS = 0.5


class Door:
    """Where a successor asks. Opened under another name, and shown when we serve: until then it is the
    predecessor's. Raises BindError.
    """

    def __init__(self, path: str) -> None:
        self._path = path
        self.open()

    def open(self) -> None:
        """Listen, under the hidden name."""
        self._hidden = f"{self._path}.{secrets.token_hex(3)}"
        mask = os.umask(0o177)  # It gives out our sockets: nobody else may ask.
        try:
            self.listening = trio.socket.from_stdlib_socket(bind(f"unix:{self._hidden}").socket)
        finally:
            os.umask(mask)

    def show(self) -> None:
        """Be found from now on. What listens there already isn't found any more, by its name."""
        try:
            os.replace(self._hidden, self._path)
        except OSError as error:
            log.error("the next process won't find this one", path=self._path, reason=error.strerror)

    def close(self) -> None:
        """Don't listen any more."""
        self.listening.close()
        with suppress(OSError):
            Path(self._hidden).unlink(missing_ok=True)


class Handover:
    """Hands over to whoever comes. ``leave`` is called when he serves: nothing more is to be accepted.

    ``connected`` says how many clients are connected. :meth:`serve` has to be running.
    """

    def __init__(
        self,
        gateway: Gateway,
        door: Door,
        sockets: Sockets,
        *,
        leave: Callable[[], None],
        connected: Callable[[], int],
    ) -> None:
        self._gateway = gateway
        self._door = door
        self._sockets = sockets
        self._leave = leave
        self._connected = connected

    async def serve(self) -> None:
        """Wait for a successor, and tell it what we hold; should it die, wait for another one."""
        while True:
            end, line, addresses = await self._successor()
            self._door.close()
            with end:
                await self._hand_over(line, addresses)
            log.warning("the process that has taken over is gone: waiting for another one")
            self._door.open()
            self._door.show()

    async def _successor(self) -> tuple[trio.socket.SocketType, Line, Sequence[str]]:
        """Offer the sockets to whoever comes; return the first who serves. Until then nothing has changed."""
        found: list[tuple[trio.socket.SocketType, Line, Sequence[str]]] = []
        one = trio.Event()

        async def offer(end: trio.socket.SocketType) -> None:
            with ExitStack() as undo:
                undo.callback(end.close)
                line = Line(end)
                addresses = await self._offered(line)
                if addresses is not None and not found:
                    undo.pop_all()
                    found.append((end, line, addresses))
                    one.set()

        async def accept() -> None:
            while True:
                end, _ = await self._door.listening.accept()
                nursery.start_soon(offer, end)

        async with trio.open_nursery() as nursery:
            nursery.start_soon(accept)
            await one.wait()
            nursery.cancel_scope.cancel()
        return found[0]

    async def _offered(self, line: Line) -> Sequence[str] | None:
        try:
            if not line.trusted:
                return None
            with trio.move_on_after(WORD_SECONDS):
                if (word := await line.hear()) is None or word.get("takes") != 1:
                    return None
                # There may be none left: it was another one's wish, who is gone.
                await line.say(
                    {"sockets": [name for name, _ in self._sockets]}, [s for _, s in self._sockets]
                )
                # It keeps free from its beginning what we may use.
                await line.say({"keeps": self._keeps()})
            while (word := await line.hear()) is not None:
                if isinstance(addresses := word.get("serves"), list) and not line.hung_up:
                    return addresses
        except (OSError, msgspec.DecodeError):
            pass
        return None

    async def _hand_over(self, line: Line, addresses: Sequence[str]) -> None:
        self._leave()
        await trio.sleep(_SETTLE_SECONDS)
        for each in [each for each in self._sockets if each[0] not in addresses]:
            self._sockets.remove(each)
            each[1].close()
        self._limit()
        with suppress(OSError):
            await line.say({"left": True})
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._tell, line)
            await _gone(line)
            nursery.cancel_scope.cancel()

    async def _tell(self, line: Line) -> None:
        told: Keeps = {}
        with suppress(OSError):
            try:
                while True:
                    self._limit()
                    if (keeps := self._keeps()) != told:
                        told = keeps
                        await line.say({"keeps": keeps})
                    await trio.sleep(_LOOK_SECONDS)
            finally:
                with trio.move_on_after(_LAST_WORD_SECONDS, shield=True):
                    self._limit()
                    await line.say({"keeps": self._keeps()})

    def _keeps(self) -> Keeps:
        """What may be used of each engine by us, and by the process before us."""
        keeps: Keeps = {}
        for engine in self._gateway.known_engines:
            url, ledger = engine.settings.url, engine.ledger
            slots, tokens = self._gateway.elsewhere.get(url, (0, 0))
            before = keeps.get(url, (0, 0))
            keeps[url] = (before[0] + ledger.slots + slots, before[1] + ledger.kv_tokens + tokens)
        return keeps

    def _limit(self) -> None:
        """Have no more of each engine than what we hold, and what those who wait need.

        As long as somebody is connected he may ask for one more, as large as any of late.
        """
        anybody = bool(self._connected() or len(self._gateway.requests))
        needs: dict[str, tuple[int, int]] = {}
        for ticket in self._gateway.admission.tickets():
            for engine in ticket.engines:
                slots, tokens = needs.get(engine.name, (0, 0))
                needs[engine.name] = max(slots, ticket.cost), max(tokens, sum(ticket.tokens))
        for engine in self._gateway.known_engines:
            ledger = engine.ledger
            slots, tokens = needs.get(engine.name, (0, 0))
            if anybody:
                average = ledger.kv_tokens // max(1, ledger.slots)
                slots, tokens = (
                    max(slots, ledger.largest.slots, 1),
                    max(tokens, ledger.largest.tokens, average),
                )
            tokens = min(ledger.kv_tokens, max(ledger.reserved, tokens, 1))
            slots = min(ledger.slots, max(ledger.held, slots))
            ledger.resize(slots, tokens if ledger.kv_tokens else 0)
            engine.shared = True


async def _gone(line: Line) -> None:
    """Wait until the other end is closed."""
    with suppress(OSError, msgspec.DecodeError):
        while await line.hear() is not None:
            pass
