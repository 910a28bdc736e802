"""Getting back the slots of requests that were cut short: when the engine has stopped, not before.

A closed connection proves nothing: engines finish a step, sleep before they look, or never
notice. A request that is cut short hands its slot to its engine's reclaimer, in one step, and
ends. The reclaimer asks the engine what it is still doing (:mod:`gateway.evidence` does the
arithmetic) and gives the slot back when the engine is seen to have stopped; one poller serves all
reclaims of an engine. If the engine says that it goes on past ``reclaim_seconds``, the work is a
ghost and keeps its slot; if it can't say, the slot is free.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf

import structlog
import trio

from gateway.aborts import Aborts
from gateway.asking import LoadAnswer, ask_load
from gateway.engine import Engine
from gateway.evidence import Foreign, Lately, Look, Process, Waste, weigh
from gateway.ghosts import Ghosts, Reclaim
from gateway.ledger import Slot
from gateway.profiles import Looks, Work
from gateway.words import ReclaimedBy

log = structlog.get_logger("gateway.reclaim")

ASK_SECONDS = 2.0
"""How long an engine may take to say what it is doing."""

BACKGROUND_SECONDS = 10.0
"""Between two looks while nothing is being reclaimed: for restarts, and load that isn't ours."""

_SUSPECTED_SECONDS = 0.5
"""Between two looks while there seems to be load that isn't ours."""

_ANY = 1 << 30  # Of an engine that is shared, whatever it runs may be another gateway's.


class Reclaimer:
    """Everything that is being reclaimed of one engine. :meth:`run` has to be running.

    ``give_back`` takes a slot that is free again; ``known`` is told of each reclaim that is over.
    """

    def __init__(
        self,
        engine: Engine,
        *,
        give_back: Callable[[Engine, Slot], None],
        known: Callable[[Engine, Reclaim], None] = lambda *_: None,
    ) -> None:
        self.engine = engine
        self.ended = Lately()
        self._give_back = give_back
        self._known = known
        self._aborts = Aborts(engine)
        self._reclaims: list[Reclaim] = []
        self._ghosts = Ghosts(engine, self._free)
        self._stranger = Foreign()
        self._waste = Waste()
        self._process = Process()
        self._leftovers = 0
        """Sequences whose slots are free though the engine has said that it goes on with them."""
        self._due = self._asked = -inf
        self._pause = 0.0
        self._load_path: str | None = None
        self._problem = ""
        self._complained = False
        self._news = trio.lowlevel.ParkingLot()
        self._none = trio.Event()
        self._none.set()

    @property
    def enforcing(self) -> bool:
        """Whether slots are kept until the engine has stopped."""
        return self.engine.settings.reclaim == "enforce" and not self.foreign

    @property
    def foreign(self) -> int:
        """Sequences on the engine that aren't ours, for a while now: then nothing is enforced."""
        return self._stranger.sequences

    @property
    def wasted(self) -> float:
        """Tokens made after their clients had left, where the engine could tell."""
        return self._waste.tokens

    @property
    def ghost_seconds(self) -> float:
        """Seconds that slots were ghosts'."""
        return self._ghosts.seconds

    def take(self, slot: Slot, work: Work, *, decoding: bool) -> Reclaim:
        """Take the slot of ``work``, whose connection to the engine has just been closed.

        ``decoding``: the engine had begun to answer.
        """
        now, looks = trio.current_time(), self.engine.profile.looks
        self._aborts.add(work)
        sequences = max(slot.cost, slot.sequences)
        counted = decoding or slot.counted or (looks is not None and slot.written < looks.long_ago(now))
        reclaim = Reclaim(closed=now, cost=slot.cost, counted=counted, slot=slot, sequences=sequences)
        reclaim.bound = now + self.engine.settings.reclaim_seconds
        if self.enforcing:
            self.engine.ledger.hand_over(slot)
        else:
            self._free(reclaim)
            if self.engine.settings.reclaim == "off" or looks is None:
                self._over(reclaim, ReclaimedBy.NONE)
                return reclaim
        self._reclaims.append(reclaim)
        if self._none.is_set():
            self._none = trio.Event()
        if looks is not None:
            first = now + (looks.decode if decoding else looks.prefill)
            self._pause = looks.busy
            self._due = max(min(self._due, first), self._asked + looks.confirm)
        if reclaim.bound <= now:
            self._let_overdue_go()
        self._news.unpark_all()
        return reclaim

    async def none_left(self) -> None:
        """Wait until nothing is being reclaimed; ghosts don't count."""
        while self._reclaims:
            await self._none.wait()

    async def run(self) -> None:
        """Look, abort and give back until cancelled."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._aborts.run)
            nursery.start_soon(self._mind_bounds)
            looks = self.engine.profile.looks
            if looks is not None and self.engine.settings.reclaim != "off":
                nursery.start_soon(self._poll, looks)

    async def _mind_bounds(self) -> None:
        """Let go what is overdue, also while the engine keeps us waiting for its answer."""
        while True:
            self._let_overdue_go()
            with trio.move_on_at(min((each.bound for each in self._reclaims), default=inf)):
                await self._news.park()

    # Looking.

    async def _poll(self, looks: Looks) -> None:
        while True:
            while self._due > trio.current_time():
                with trio.move_on_at(self._due):
                    await self._news.park()
            await self._look(looks)

    async def _look(self, looks: Looks) -> None:
        ledger = self.engine.ledger
        self._asked = trio.current_time()
        long_ago = looks.long_ago(self._asked)
        own, most, granted = ledger.certain(long_ago), ledger.at_most, ledger.granted
        said = LoadAnswer(problem=f"no answer within {ASK_SECONDS:g} s")
        with trio.move_on_after(ASK_SECONDS):
            said = await ask_load(self.engine, self._load_path)
        self._load_path, self._problem, load = said.path, said.problem, said.load
        self.engine.load = load
        if said.absent:
            self._process.forget()
            self._restarted(trio.current_time())
        if load is None:
            for each in self._reclaims:
                each.said_busy = False
        else:
            self._complained = False
            look = Look(
                load,
                self._asked,
                trio.current_time(),
                own=min(own, ledger.certain(long_ago)),
                # Those that have come meanwhile may be in it, and those that have just gone.
                most=max(most + ledger.granted - granted, ledger.at_most)
                + self.ended.since(self._asked - looks.confirm),
            )
            self._consider(look, looks)
        self._plan(looks, answered=load is not None)

    def _consider(self, look: Look, looks: Looks) -> None:
        if self._process.take(look):
            self._restarted(self._process.seen_before)  # What was closed later may be the new one's.
            return
        ghosts = self._ghosts.sequences
        ours = ghosts + sum(each.sequences for each in self._reclaims)
        if not look.void:
            self._leftovers = min(self._leftovers, max(0, look.others - ours))
            if look.load.busy >= look.most + ours:
                self.engine.ledger.all_counted(look.asked - looks.confirm)
        self._meet_strangers(look, ours + (_ANY if self.engine.shared else self._leftovers))
        for each in weigh(look, self._reclaims, ghosts, looks):
            self._stopped(each)
        self._ghosts.consider(look, looks.confirm)

    def _meet_strangers(self, look: Look, ours: int) -> None:
        before = self._stranger.sequences
        self._stranger.take(look, ours)
        if not self._stranger.suspected:
            self._waste.take(look, self.engine.ledger.granted)
        if self.foreign and not before:
            log.warning(
                "the engine has load that isn't this gateway's: until that is gone, slots are given back"
                " at the close of a connection",
                engine=self.engine.name,
                sequences=self.foreign,
            )
            self._ghosts.end()
            for each in self._reclaims:
                self._free(each)
        elif before and not self.foreign:
            log.info("the engine has no load but this gateway's any more", engine=self.engine.name)

    def _plan(self, looks: Looks, *, answered: bool) -> None:
        """Say when to look next."""
        now = trio.current_time()
        if self._reclaims:
            waits = [
                each.stopped_since + (looks.confirm if each.counted else looks.uncounted)
                for each in self._reclaims
                if each.stopped_since < inf
            ]
            if waits and answered:
                self._due = max(min(waits), now + looks.confirm)
                return
            self._due = now + self._pause
            self._pause = min(self._pause * 1.5, looks.slowest)
        elif self._ghosts:
            self._due = now + (looks.confirm if self._ghosts.seem_gone else looks.ghost)
        elif self._stranger.suspected:
            self._due = now + max(_SUSPECTED_SECONDS, looks.confirm)
        else:
            self._due = now + BACKGROUND_SECONDS

    # What becomes of them.

    def _stopped(self, reclaim: Reclaim) -> None:
        now = trio.current_time()
        # Of one that may never have been counted the first look proved nothing.
        since = min(reclaim.stopped_since, now) if reclaim.counted else now
        reclaim.seconds = since - reclaim.closed
        self._over(reclaim, ReclaimedBy.ENGINE_IDLE)

    def _let_overdue_go(self) -> None:
        now = trio.current_time()
        for each in [each for each in self._reclaims if each.bound <= now]:
            if self._ghosts.may_have(each):
                self._reclaims.remove(each)
                self._ghosts.add(each)
                self._tell(each, ReclaimedBy.NONE)
            else:
                if each.said_busy:
                    self._leftovers += each.sequences
                self._complain(each)
                self._over(each, ReclaimedBy.BOUND)

    def _complain(self, reclaim: Reclaim) -> None:
        """Say once why the engine can't be asked: each request cut short costs a slot its whole bound."""
        if self._problem and reclaim.slot is not None and not self._complained:
            self._complained = True
            log.warning(
                "the engine doesn't say whether it has stopped; requests that are cut short keep their slots"
                " for reclaim_seconds",
                engine=self.engine.name,
                problem=self._problem,
            )

    def _restarted(self, closed_before: float) -> None:
        """The engine's process has gone, and with it what was ``closed_before`` it had."""
        self._waste.forget()
        self._load_path = None
        self._aborts.forget()
        self._ghosts.end()
        self._leftovers = 0
        for each in [each for each in self._reclaims if each.closed < closed_before]:
            self._stopped(each)

    def _free(self, reclaim: Reclaim) -> None:
        slot, reclaim.slot = reclaim.slot, None
        if slot is not None:
            self._give_back(self.engine, slot)

    def _over(self, reclaim: Reclaim, by: ReclaimedBy) -> None:
        if by is ReclaimedBy.BOUND:
            reclaim.seconds = trio.current_time() - reclaim.closed
        if reclaim in self._reclaims:
            self._reclaims.remove(reclaim)
        self._free(reclaim)
        self._tell(reclaim, by)

    def _tell(self, reclaim: Reclaim, by: ReclaimedBy) -> None:
        reclaim.by = by
        if not self._reclaims:
            self._none.set()
        self._known(self.engine, reclaim)
