"""A second network on this machine, whose far end can vanish without a word (Linux, root)."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

import pytest
import trio

T = TypeVar("T")

_CLONE_NEWNET = 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)


class Network:
    """`near` is our address, `far` theirs: of the range for tests of networks (RFC 2544)."""

    def __init__(self, number: int) -> None:
        self.name = f"vanish{os.getpid()}-{number}"
        self.device = f"vn{os.getpid() % 100_000}-{number}"
        block = f"198.{18 + number}.{os.getpid() % 250}"
        self.near, self.far = f"{block}.1", f"{block}.2"

    async def inside(self, make: Callable[[], T]) -> T:
        """Call something in a thread that sees the far end's network: sockets made there belong to it."""

        def work() -> T:
            home = os.open("/proc/thread-self/ns/net", os.O_RDONLY)
            there = os.open(f"/run/netns/{self.name}", os.O_RDONLY)
            try:
                _enter(there)
                return make()
            finally:
                _enter(home)
                os.close(there)
                os.close(home)

        return await trio.to_thread.run_sync(work)

    async def link_goes_down(self) -> None:
        await _ip("-n", self.name, "link", "set", "far", "down")

    async def nobody_is_there(self) -> None:
        """Packets arrive and are nobody's: no answer, no error."""
        await _ip("-n", self.name, "addr", "flush", "dev", "far")


def _enter(namespace: int) -> None:
    if _libc.setns(namespace, _CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")


async def _ip(*arguments: str) -> None:
    done = await trio.run_process(["ip", *arguments], check=False, capture_stderr=True)
    if done.returncode:
        raise OSError(f"ip {' '.join(arguments)}: {done.stderr.decode().strip()}")


@asynccontextmanager
async def network(number: int) -> AsyncIterator[Network]:
    """Skips the test where there can be none."""
    if os.geteuid() or shutil.which("ip") is None:
        pytest.skip("network namespaces need root and iproute2")
    one = Network(number)
    try:
        await _ip("netns", "add", one.name)
        await _ip("link", "add", one.device, "type", "veth", "peer", "name", "far", "netns", one.name)
        await _ip("addr", "add", f"{one.near}/24", "dev", one.device)
        await _ip("link", "set", one.device, "up")
        await _ip("-n", one.name, "addr", "add", f"{one.far}/24", "dev", "far")
        await _ip("-n", one.name, "link", "set", "far", "up")
    except OSError as error:
        await _remove(one)
        pytest.skip(f"no network namespaces here: {error}")
    try:
        yield one
    finally:
        with trio.CancelScope(shield=True):
            await _remove(one)


async def _remove(one: Network) -> None:
    for arguments in (("link", "del", one.device), ("netns", "del", one.name)):
        await trio.run_process(["ip", *arguments], check=False, stderr=subprocess.DEVNULL)
