"""What the kernel tells of a connection."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from gateway.server import peer


@pytest.fixture(params=["tcp", "unix"])
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[socket.socket, socket.socket]]:
    """Our side, and the client's."""
    if request.param == "unix":
        ours, theirs = socket.socketpair()
    else:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            peer.prepare(listener, stall_seconds=30)
            theirs = socket.create_connection(listener.getsockname())
            ours, _ = listener.accept()
    with ours, theirs:
        ours.setblocking(False)
        yield ours, theirs


def fill(ours: socket.socket) -> None:
    try:
        while True:
            ours.send(b"x" * 65_536)
    except BlockingIOError:
        pass


def look(ours: socket.socket) -> peer.Peer:
    state = peer.look(ours)
    assert state is not None
    return state


def test_nothing_is_owed_at_first(pair: tuple[socket.socket, socket.socket]) -> None:
    state = look(pair[0])
    assert (state.unacknowledged, state.vanished) == (0, False)


def test_progress_is_seen_when_the_client_reads(
    pair: tuple[socket.socket, socket.socket],
) -> None:
    ours, theirs = pair
    fill(ours)
    stuck = look(ours)
    assert stuck.unacknowledged > 0
    assert look(ours) == stuck
    for _ in range(3):
        theirs.recv(65_536)
    assert look(ours).acknowledged != stuck.acknowledged


def test_a_closed_socket_can_t_be_asked(pair: tuple[socket.socket, socket.socket]) -> None:
    pair[0].close()
    assert peer.look(pair[0]) is None


def test_accepted_sockets_have_what_was_prepared() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        peer.prepare(listener, stall_seconds=30)
        with socket.create_connection(listener.getsockname()):
            ours, _ = listener.accept()
            with ours:
                tcp = socket.IPPROTO_TCP
                assert ours.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
                assert ours.getsockopt(tcp, socket.TCP_KEEPIDLE) == peer.KEEPALIVE_IDLE_SECONDS
                assert ours.getsockopt(tcp, socket.TCP_KEEPINTVL) == peer.KEEPALIVE_INTERVAL_SECONDS
                assert ours.getsockopt(tcp, socket.TCP_KEEPCNT) == peer.KEEPALIVE_PROBES
                assert ours.getsockopt(tcp, socket.TCP_NODELAY) == 1
                assert ours.getsockopt(tcp, peer.TCP_NOTSENT_LOWAT) == peer.NOTSENT_LOWAT_BYTES
                assert ours.getsockopt(tcp, peer.TCP_USER_TIMEOUT) == 600_000


def test_a_slow_reader_leaves_little_in_the_kernel() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        peer.prepare(listener, stall_seconds=30)
        with socket.create_connection(listener.getsockname()) as theirs:
            theirs.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            ours, _ = listener.accept()
            with ours:
                ours.setblocking(False)
                fill(ours)
                assert look(ours).unacknowledged < 200_000


def test_without_a_stall_clock_there_is_no_backstop_either() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        before = listener.getsockopt(socket.IPPROTO_TCP, peer.TCP_USER_TIMEOUT)
        peer.prepare(listener, stall_seconds=0)
        assert listener.getsockopt(socket.IPPROTO_TCP, peer.TCP_USER_TIMEOUT) == before
