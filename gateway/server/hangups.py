"""Seeing clients hang up, whatever else their connection is doing.

A FIN that stands behind unread bytes can't be read, and reading stops on purpose where
more input must not be taken in. The kernel knows all the same (``EPOLLRDHUP``): one
epoll for all client sockets, itself awaited like a socket.
"""

from __future__ import annotations

import select
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import trio

_HUNG_UP = select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR


class Hangups:
    """Calls back, once, when a registered socket's peer has closed, half-closed or reset."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._callbacks: dict[int, Callable[[], None]] = {}

    @contextmanager
    def watching(self, descriptor: int, callback: Callable[[], None]) -> Iterator[None]:
        """Watch a socket inside the block. The socket must be open until the block is left."""
        self._epoll.register(descriptor, _HUNG_UP | select.EPOLLONESHOT)
        self._callbacks[descriptor] = callback
        try:
            yield
        finally:
            self.forget(descriptor, callback)

    def forget(self, descriptor: int, callback: Callable[[], None]) -> None:
        """Stop watching. Call it before the descriptor is closed: its number is given out again."""
        if self._callbacks.get(descriptor) == callback:
            del self._callbacks[descriptor]
            self._epoll.unregister(descriptor)

    async def run(self) -> None:
        """Call back until cancelled."""
        try:
            while True:
                await trio.lowlevel.wait_readable(self._epoll.fileno())
                for descriptor, _ in self._epoll.poll(0):
                    callback = self._callbacks.get(descriptor)
                    if callback is not None:
                        callback()
        finally:
            self._epoll.close()
