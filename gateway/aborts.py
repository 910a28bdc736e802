"""Telling an engine by id which requests to abort, beside closing their connections."""

from __future__ import annotations

from math import inf

import trio

from gateway.asking import ask
from gateway.engine import Engine
from gateway.errors import GatewayError
from gateway.profiles import Ask, Work

_SECONDS = 2.0
"""How long an engine may take to take an abort."""

_LOOK_AGAIN_SECONDS = 10.0
"""Between two searches for an abort page that weren't answered."""

_MOST_AT_ONCE = 256
_MOST_WANTED = 4096

_NOT_THERE = frozenset({401, 403, 404, 405, 501})


class Aborts:
    """The aborts of one engine, in the order in which they came. :meth:`run` has to be running."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._wanted: list[Work] = []
        self._something = trio.Event()
        self._pages: list[str] = []
        self._look_at = 0.0
        """When to look for pages again; inf: what it has is known."""

    @property
    def page(self) -> str | None:
        """The engine's page for it, as far as is known."""
        return self._pages[0] if self._pages else None

    def add(self, work: Work) -> None:
        """Have ``work`` aborted."""
        if self._engine.profile.abort_paths:
            self._wanted.append(work)
            del self._wanted[:-_MOST_WANTED]  # The oldest are over by themselves, or never.
            self._something.set()

    def forget(self) -> None:
        """The engine has been started anew, perhaps with other pages: look again."""
        self._pages = []
        self._look_at = 0.0
        self._something.set()

    async def run(self) -> None:
        """Abort until cancelled."""
        if not self._engine.profile.abort_paths:
            return
        while True:
            self._something = trio.Event()
            await self._find_pages()
            wanted, self._wanted = self._wanted[:_MOST_AT_ONCE], self._wanted[_MOST_AT_ONCE:]
            if wanted:
                await self._abort(wanted)
            if not self._wanted:
                await self._something.wait()

    async def _find_pages(self) -> None:
        now = trio.current_time()
        if now < self._look_at:
            return
        profile = self._engine.profile
        if not profile.index_path:
            self._pages, self._look_at = list(profile.abort_paths), inf
            return
        answer = await self._send(Ask(profile.index_path))
        if answer is None:
            self._look_at = now + _LOOK_AGAIN_SECONDS
            return
        status, index = answer
        named = [path for path in profile.abort_paths if b'"%b"' % path.encode("ascii") in index]
        if status == 200 or status in _NOT_THERE:
            self._pages, self._look_at = named if status == 200 else [], inf
        else:
            self._look_at = now + _LOOK_AGAIN_SECONDS

    async def _abort(self, wanted: list[Work]) -> None:
        while self._pages:
            for one in self._engine.profile.aborts(self._pages[0], wanted):
                answer = await self._send(one)
                if answer is not None and answer[0] in _NOT_THERE:
                    # It is named, and switched off.
                    del self._pages[0]
                    break
            else:
                return

    async def _send(self, what: Ask) -> tuple[int, bytes] | None:
        with trio.move_on_after(_SECONDS):
            try:
                return await ask(self._engine, what)
            except GatewayError:
                return None
        return None
