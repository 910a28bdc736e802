"""h2's connection with the scopes of its faults put right, and its frames counted."""

from __future__ import annotations

import h2.errors
import h2.events
import h2.exceptions
import pytest

from gateway.server.frames import Frames
from tests.wire import frames as f

MODELS = f.head(b"/v1/models", b"GET")


def greeted() -> Frames:
    frames = Frames(most_streams=10, most_head_bytes=65_536)
    frames.initiate_connection()
    frames.receive_data(f.PREFACE + f.settings())
    frames.data_to_send()
    frames.cost = 0
    return frames


def resets(events: list[h2.events.Event]) -> list[tuple[int | None, int, bool]]:
    return [
        (event.stream_id, int(event.error_code or 0), event.remote_reset)
        for event in events
        if isinstance(event, h2.events.StreamReset)
    ]


def test_a_malformed_request_resets_its_stream_and_leaves_the_connection_as_it_was() -> None:
    frames = greeted()
    events = frames.receive_data(f.headers(1, [*MODELS, (b"A", b"b")]) + f.headers(3, MODELS))
    assert resets(events) == [(1, h2.errors.ErrorCodes.PROTOCOL_ERROR, False)]
    assert [event.stream_id for event in events if isinstance(event, h2.events.RequestReceived)] == [3]
    assert f.reset(1, f.PROTOCOL_ERROR) in frames.data_to_send()
    assert frames.is_closed(1)
    assert not frames.is_closed(3)


def test_a_request_known_already_whose_body_is_too_long_is_reset_too() -> None:
    frames = greeted()
    frames.receive_data(f.headers(1, f.head(more=[(b"content-length", b"3")]), end=False))
    assert resets(frames.receive_data(f.data(1, b"hello"))) == [(1, 1, False)]


def test_the_bytes_of_such_a_body_are_given_back() -> None:
    frames = greeted()
    frames.increment_flow_control_window(1_000_000)
    window = frames.inbound_flow_control_window
    for number in range(1, 401, 2):
        frames.receive_data(f.headers(number, f.head(more=[(b"content-length", b"3")]), end=False))
        frames.receive_data(f.data(number, b"x" * 16_000))
    assert frames.inbound_flow_control_window > window - 600_000


@pytest.mark.parametrize(
    "broken",
    [
        f.frame(f.HEADERS, 5, 1, b"\x80"),
        f.headers(1, MODELS, end=False) + f.frame(f.HEADERS, 5, 1, b"\x80"),
        f.headers(2, MODELS),
        f.data(5, b"x"),
        f.headers(1, f.head(), end=False) + f.data(1, b"x" * 16_000) * 5,
    ],
    ids=["hpack", "hpack in trailers", "even stream", "idle stream", "beyond the window"],
)
def test_a_fault_of_the_connection_stays_one(broken: bytes) -> None:
    with pytest.raises(h2.exceptions.ProtocolError):
        greeted().receive_data(broken)


def test_one_stream_too_many_is_an_event_like_any_other() -> None:
    frames = greeted()
    events = frames.receive_data(
        b"".join(f.headers(number, f.head(), end=False) for number in range(1, 41, 2))
    )
    assert sum(isinstance(event, h2.events.RequestReceived) for event in events) == 20


@pytest.mark.parametrize("cut", [3, 9, 1000])
def test_a_frame_that_is_announced_too_long_is_not_waited_for(cut: int) -> None:
    frame = (16_385).to_bytes(3, "big") + b"\x00\x00\x00\x00\x00\x01" + b"x" * 16_385
    with pytest.raises(h2.exceptions.FrameTooLargeError):
        greeted().receive_data(frame[:cut])


def test_priorities_are_neither_events_nor_faults() -> None:
    assert greeted().receive_data(f.frame(f.PRIORITY, 0, 3, b"\x00\x00\x00\x03\x10")) == []


COSTS = {
    "a ping": (1, f.ping()),
    "settings": (1, f.settings((4, 1000))),
    "a priority": (1, f.frame(f.PRIORITY, 0, 3, b"\x00\x00\x00\x01\x10")),
    "a frame nobody knows": (1, f.frame(0xFA)),
    "a window": (0.1, f.window(0, 1)),
    "a request": (0, f.headers(1, MODELS)),
    "a reset request": (1, f.headers(1, MODELS) + f.reset(1)),
    "a body": (0, f.headers(1, f.head(), end=False) + f.data(1, b"x" * 1000)),
    "a body's empty end": (0, f.headers(1, f.head(), end=False) + f.data(1, end=True)),
    "a body's short end": (0, f.headers(1, f.head(), end=False) + f.data(1, b"x", end=True)),
    "an empty piece": (1, f.headers(1, f.head(), end=False) + f.data(1)),
    "a short piece": (0.1, f.headers(1, f.head(), end=False) + f.data(1, b"x")),
}


@pytest.mark.parametrize("what", COSTS)
def test_frames_are_counted_by_what_they_bring(what: str) -> None:
    cost, data = COSTS[what]
    frames = greeted()
    frames.receive_data(data)
    assert frames.cost == pytest.approx(cost)
