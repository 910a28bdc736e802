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

_PROGRESS = re.compile(rb'"prompt_progress"\s*:')
"""As a key: within a value the quotes would be escaped, and as a value no colon would follow."""

_DATA = re.compile(rb"(?:^|[\r\n])data")


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
        if b"\n" not in data and b"\r" not in data and len(self._held) < _MOST_HELD_BYTES:
            self._held += data
            return b""
        window, passing, at = self._held + data, [], 0
        while not self.over and (found := _EVENT.match(window, at)):
            at = found.end()
            event = found.group()
            if _PROGRESS.search(event) is None:
                passing.append(event)
                # A comment may come at any time.
                self.over = not self._throughout and _DATA.search(event) is not None
        self._held = window[at:]
        if self.over or len(self._held) > _MOST_HELD_BYTES:
            self.over = True
            passing.append(self.rest())
        return b"".join(passing)

    def rest(self) -> bytes:
        """Return what is held back of an unfinished event, once no more of it comes."""
        held, self._held = self._held, b""
        return held
