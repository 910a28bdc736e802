"""All request bodies in flight together stay within one bound."""

from __future__ import annotations

from collections import OrderedDict

import trio

SMALL_BYTES = 256 * 1024
"""A body up to this size finds room where larger ones have to wait: uploads of images, slow
ones perhaps, must not hold up everybody's questions."""


class BodyBudget:
    """Bytes for all bodies together. A body that doesn't fit waits, first come first served.

    Large bodies may hold three quarters of it. A body larger than that is let in when it
    is the only large one.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.held = 0
        """Bytes held by all bodies."""
        self._small = _Share(limit)
        self._large = _Share(limit * 3 // 4)

    def resize(self, limit: int) -> None:
        """Have another bound from now on; what is held beyond it is let go in its own time."""
        self.limit = self._small.limit = limit
        self._large.limit = limit * 3 // 4
        self._call()

    async def take(self, size: int, *, whole: int) -> None:
        """Wait until ``size`` more bytes of a body of ``whole`` bytes fit, and hold them."""
        if self.take_now(size, whole=whole):
            return
        share = self._share(whole)
        me, turn = object(), trio.Event()
        share.waiting[me] = (size, turn)
        try:
            await turn.wait()
        except trio.Cancelled:
            if share.waiting.pop(me, None) is None:
                self.give_back(size, whole=whole)
            else:
                self._call()
            raise

    def take_now(self, size: int, *, whole: int) -> bool:
        """Hold ``size`` more bytes of a body of ``whole`` bytes if they fit; say whether they did."""
        share = self._share(whole)
        if share.waiting or not self._fits(share, size):
            return False
        self._hold(share, size)
        return True

    def give_back(self, size: int, *, whole: int) -> None:
        """Let go of ``size`` bytes of a body of ``whole`` bytes."""
        self._hold(self._share(whole), -size)
        self._call()

    def _share(self, whole: int) -> _Share:
        return self._small if whole <= SMALL_BYTES else self._large

    def _hold(self, share: _Share, size: int) -> None:
        share.held += size
        self.held += size

    def _fits(self, share: _Share, size: int) -> bool:
        share_fits = share.held == 0 or share.held + size <= share.limit
        return share_fits and (self.held == 0 or self.held + size <= self.limit)

    def _call(self) -> None:
        for share in (self._small, self._large):
            while share.waiting:
                me, (size, turn) = next(iter(share.waiting.items()))
                if not self._fits(share, size):
                    break
                del share.waiting[me]
                self._hold(share, size)
                turn.set()


class _Share:
    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.held = 0
        self.waiting: OrderedDict[object, tuple[int, trio.Event]] = OrderedDict()
