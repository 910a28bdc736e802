"""Keeping llama.cpp's ``prompt_progress`` chunks from clients that didn't ask for them.

They come before the first token, one a batch of the prompt. Only there are events looked at:
once one of another sort has come, everything passes as it is. (Of several sequences one may read
its prompt while another is answered: then all events are looked at.)
"""

from __future__ import annotations

import re

_MOST_HELD_BYTES = 64 * 1024
"""Of an event that isn't there whole. A progress chunk has some hundred bytes."""

_EVENT = re.compile(rb".+?(?:\r\n|\n|\r(?!\n))(?:\r\n|\n|\r(?!\n))", re.DOTALL)


class WithoutProgress:
    """Takes an event stream in pieces, and gives it without progress chunks."""

    def __init__(self, *, throughout: bool = False) -> None:
        self._throughout = throughout
        self.over = False
        """Nothing is looked at any more: pieces may go past it."""
        self._held = b""

    def feed(self, data: bytes) -> bytes:
        """Take a piece; return what may pass: whole events, and all of it once the prefill is over."""
        if self.over:
            return data
        window, passing, at = self._held + data, [], 0
        while not self.over and (found := _EVENT.match(window, at)):
            at = found.end()
            event = found.group()
            if b'"prompt_progress"' not in event:
                passing.append(event)
                self.over = not self._throughout
        self._held = window[at:]
        if self.over or len(self._held) > _MOST_HELD_BYTES:
            self.over = True
            passing.append(self.rest())
        return b"".join(passing)

    def rest(self) -> bytes:
        """Return what is held back of an unfinished event, once no more of it comes."""
        held, self._held = self._held, b""
        return held
