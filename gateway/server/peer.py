"""What the kernel knows of a client's TCP connection (``struct tcp_info``, Linux 4.1 and newer)."""

from __future__ import annotations

import fcntl
import socket
import struct
import termios
from dataclasses import dataclass

KEEPALIVE_IDLE_SECONDS = 10
KEEPALIVE_INTERVAL_SECONDS = 5
KEEPALIVE_PROBES = 3
"""A peer that is gone without a FIN is found after 10 + 3 x 5 = 25 s of silence."""

VANISHED_SECONDS = 20.0
"""Data unacknowledged, retransmitted, and nothing heard for so long: the peer is gone."""

NOTSENT_LOWAT_BYTES = 16 * 1024
"""What the kernel holds of data that can't be sent yet. The rest waits in the spool, where it
is counted, and where leaving costs nothing."""

BACKSTOP_SECONDS = 600.0

TCP_NOTSENT_LOWAT = 25
TCP_USER_TIMEOUT = 18
_OUTQ = struct.Struct("i")
_TCP_INFO = struct.Struct("=4B 12x 28x 3I I 60x Q")
"""state, ca_state, retransmits, probes, ..., last_data_sent .. last_ack_recv, ..., bytes_acked."""


@dataclass(frozen=True, slots=True)
class Peer:
    """The state of a connection.

    ``acknowledged`` grows with the bytes the peer has taken (on a unix socket it just changes),
    ``unacknowledged`` are those it has not, ``vanished`` says that nobody answers any more.
    """

    acknowledged: int
    unacknowledged: int
    vanished: bool


def look(sock: socket.socket) -> Peer | None:
    """Ask the kernel about a connection; None where it can't tell (closed ones)."""
    try:
        (queued,) = _OUTQ.unpack(fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, bytes(_OUTQ.size)))
        if sock.family == socket.AF_UNIX:
            return Peer(-queued, queued, False)
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size)
    except (OSError, ValueError):
        return None
    if len(info) < _TCP_INFO.size:
        return None
    _, _, retransmits, probes, _, _, _, last_ack_ms, acknowledged = _TCP_INFO.unpack(info)
    unanswered = retransmits > 0 or probes > 0
    return Peer(acknowledged, queued, unanswered and last_ack_ms > VANISHED_SECONDS * 1000)


def prepare(listening: socket.socket, *, stall_seconds: float) -> None:
    """Set the options that accepted sockets inherit.

    ``TCP_USER_TIMEOUT`` stands far above the stall clock, as the backstop for a write that
    nobody looks after any more: to the kernel a reader whose window never has room for the
    whole next segment doesn't answer, however much of it the reader takes.
    """
    if listening.family == socket.AF_UNIX:
        return
    tcp = socket.IPPROTO_TCP
    # A token must not wait for the acknowledgement of the last one.
    listening.setsockopt(tcp, socket.TCP_NODELAY, 1)
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    listening.setsockopt(tcp, socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_SECONDS)
    listening.setsockopt(tcp, socket.TCP_KEEPINTVL, KEEPALIVE_INTERVAL_SECONDS)
    listening.setsockopt(tcp, socket.TCP_KEEPCNT, KEEPALIVE_PROBES)
    listening.setsockopt(tcp, TCP_NOTSENT_LOWAT, NOTSENT_LOWAT_BYTES)
    if stall_seconds:
        backstop = max(BACKSTOP_SECONDS, 20 * stall_seconds)
        listening.setsockopt(tcp, TCP_USER_TIMEOUT, int(backstop * 1000))


def host_and_port(address: object) -> tuple[str, int] | None:
    """Take from a socket's address what an ASGI scope says of it: of a unix socket nothing."""
    return address[:2] if isinstance(address, tuple) else None
