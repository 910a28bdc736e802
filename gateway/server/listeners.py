"""The sockets a plane listens on: TCP, unix, or inherited from whoever started us."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket
import ssl
import stat
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from dataclasses import dataclass

import trio

from gateway.server.outgoing import ClientStream

BACKLOG = 4096
"""Connections the kernel completes before we accept them. Hypercorn's 100 overflows when a
few hundred clients come at once, and each that overflows waits a second for its retry."""

ACCEPTS_A_TURN = 64
"""Connections accepted before others get their turn."""

ACCEPT_AGAIN_SECONDS = 0.1
"""After accepting has failed."""

TLS_CIPHERS = "ECDHE+AESGCM:ECDHE+CHACHA20"
"""All ciphers of TLS 1.2 that HTTP/2 allows (RFC 9113, 9.2.2)."""


class BindError(Exception):
    """An address can't be listened on; the message says why and what to do."""


@dataclass(frozen=True, slots=True)
class Listener:
    """A listening socket, whether somebody else gave it to us, and how to reach it."""

    socket: socket.socket
    inherited: bool
    name: str

    @property
    def is_unix(self) -> bool:
        """Whether it is a unix socket."""
        return self.socket.family == socket.AF_UNIX

    @property
    def stays_here(self) -> bool:
        """Whether only this machine reaches it."""
        return self.is_unix or ipaddress.ip_address(self.socket.getsockname()[0]).is_loopback

    async def accept(
        self,
        connected: Callable[[trio.abc.Stream], Awaitable[None]],
        connections: trio.Nursery,
        *,
        tls: Callable[[], ssl.SSLContext | None],
        stall_seconds: float,
        fault: Callable[[OSError], None],
    ) -> None:
        """Accept until cancelled, and start ``connected`` in ``connections`` for each client.

        All that wait are accepted in one turn: one a turn, as Trio's own loop does it, makes a
        crowd wait for as many turns of everybody's. Whatever keeps it from accepting (no
        descriptor is left, or the kernel passes on the error of a connection that waited,
        accept(2)), ``fault`` is told, and it tries again.
        """
        while True:
            await trio.lowlevel.wait_readable(self.socket)
            for _ in range(ACCEPTS_A_TURN):
                try:
                    accepted, _address = self.socket.accept()
                except BlockingIOError:
                    break
                except OSError as error:
                    fault(error)
                    await trio.sleep(ACCEPT_AGAIN_SECONDS)
                    break
                plain = ClientStream(trio.socket.from_stdlib_socket(accepted), stall_seconds=stall_seconds)
                context = tls()
                stream: trio.abc.Stream = plain
                if context is not None:
                    stream = trio.SSLStream(plain, context, server_side=True, https_compatible=True)
                connections.start_soon(connected, stream)


def bind(address: str, *, scheme: str = "http") -> Listener:
    """Listen on ``host:port``, ``[v6]:port``, ``unix:/path`` or ``fd://N``.

    Raises BindError.
    """
    try:
        if address.startswith("unix:"):
            return Listener(_bind_unix(address.removeprefix("unix:")), False, address)
        if address.startswith("fd://"):
            return _inherit(int(address.removeprefix("fd://")), scheme)
        return _bind_tcp(address, scheme)
    except OSError as error:
        raise BindError(f"Can't listen on {address}: {_explain(error)}") from error


def adopt(address: str, taken: socket.socket, *, scheme: str = "http") -> Listener:
    """Listen for ``address`` on a socket that another process listens on."""
    return _listening(taken, address.startswith("fd://"), scheme)


def tls_context(certificate: str, key: str) -> ssl.SSLContext:
    """Make the server's TLS context: TLS 1.2 or newer, HTTP/2 before HTTP/1.1 (ALPN).

    Raises OSError or ssl.SSLError when the files can't be used.
    """
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_ciphers(TLS_CIPHERS)
    context.options |= ssl.OP_NO_COMPRESSION
    context.set_alpn_protocols(["h2", "http/1.1"])
    context.load_cert_chain(certificate, key)
    return context


def _bind_tcp(address: str, scheme: str) -> Listener:
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with ExitStack() as undo:
        listening = undo.enter_context(socket.socket(family, socket.SOCK_STREAM))
        listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listening.bind((host, int(port)))
        listener = _listening(listening, False, scheme)
        undo.pop_all()
    return listener


def _bind_unix(path: str) -> socket.socket:
    _remove_stale(path)
    with ExitStack() as undo:
        listening = undo.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        listening.bind(path)
        listening.listen(BACKLOG)
        listening.setblocking(False)
        undo.pop_all()
    return listening


def _remove_stale(path: str) -> None:
    """Remove the socket file of a process that is no more; leave anything else alone."""
    try:
        if not stat.S_ISSOCK(os.stat(path).st_mode):
            raise OSError(errno.EADDRINUSE, "there is a file of that name that is no socket")
    except FileNotFoundError:
        return
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(path)
        except ConnectionRefusedError:
            os.unlink(path)
            return
    raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))


def _inherit(descriptor: int, scheme: str) -> Listener:
    inherited = socket.socket(fileno=os.dup(descriptor))
    if inherited.type != socket.SOCK_STREAM:
        inherited.close()
        raise OSError(errno.EINVAL, "the descriptor is not a stream socket")
    return _listening(inherited, True, scheme)


def _listening(sock: socket.socket, inherited: bool, scheme: str) -> Listener:
    sock.listen(BACKLOG)
    sock.setblocking(False)
    if sock.family == socket.AF_UNIX:
        return Listener(sock, inherited, f"unix:{sock.getsockname()}")
    host, port = sock.getsockname()[:2]
    return Listener(sock, inherited, f"{scheme}://{f'[{host}]' if ':' in host else host}:{port}")


def _explain(error: OSError) -> str:
    reason = error.strerror or str(error)
    if error.errno == errno.EADDRINUSE:
        return (
            f"{reason}. Stop the process that has it (`ss -lxtnp` shows which), have it hand over"
            " (server.handover), or choose another address (server.listen, server.admin)."
        )
    if error.errno == errno.EACCES:
        return (
            f"{reason}. Ports below 1024 need the CAP_NET_BIND_SERVICE capability; folders need write access."
        )
    if error.errno == errno.EADDRNOTAVAIL:
        return f"{reason}. This machine has no such address."
    if error.errno == errno.EBADF:
        return f"{reason}. No open socket was passed under that number."
    return f"{reason}."
