"""The client in ASGI's terms: what it is sent, and by which way."""

from __future__ import annotations

import trio

from tests.test_client import Stream, Visit, piece


async def test_response_in_asgi_s_terms() -> None:
    visit = Visit()
    headers = [(b"DATE", b"today"), (b"X", b"1"), (b"X", b"2")]
    await visit.client.begin(201, headers)
    await visit.client.send(b"hello")
    await visit.client.finish()
    assert visit.sent == [
        {"type": "http.response.start", "status": 201, "headers": headers},
        {"type": "http.response.body", "body": b"hello", "more_body": True},
        {"type": "http.response.body", "body": b"", "more_body": False},
    ]


async def test_date_is_added_where_there_is_none() -> None:
    visit = Visit()
    given = [(b"X", b"1")]
    await visit.client.begin(200, given)
    names = [name for name, _ in visit.sent[0]["headers"]]
    assert names == [b"X", b"Date"]
    assert given == [(b"X", b"1")]
    assert visit.sent[0]["headers"][1][1].endswith(b" GMT")


async def test_our_own_server_is_told_to_go_on_and_to_cut_off() -> None:
    stream = Stream()
    visit = Visit(stream=stream)
    visit.comes(piece(b"", more=False))
    assert stream.wanted == 0
    await visit.body()
    assert stream.wanted == 1
    visit.client.abort()
    assert stream.aborted == 1
    Visit().client.abort()


class ShortWay:
    """A lane that takes four bytes at once."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, bytes]] = []

    def send_now(self, data: bytes) -> bytes | None:
        self.sent.append(("now", data[:4]))
        return data[4:]

    async def send(self, data: bytes) -> None:
        self.sent.append(("send", data))

    async def send_rest(self, framed: bytes) -> None:
        self.sent.append(("rest", framed))


async def test_what_was_sent_has_settled_when_the_server_says_so() -> None:
    stream, settled = Stream(), trio.Event()
    stream.settled = settled.wait
    visit = Visit(stream=stream)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(visit.client.settled)
        await trio.testing.wait_all_tasks_blocked()
        assert nursery.child_tasks
        settled.set()
    await Visit().client.settled()  # any other server: nothing is known


async def test_body_takes_the_short_way_where_there_is_one() -> None:
    stream, lane = Stream(), ShortWay()
    visit = Visit(stream=stream)
    stream.lane, stream.send_now = lane, lane.send_now
    await visit.client.send(b"hello")
    assert (visit.client.outlet() or bytes)(b"hello") == b"o"
    await visit.client.send_rest(b"o")
    assert lane.sent == [("send", b"hello"), ("now", b"hell"), ("rest", b"o")]
    assert visit.sent == []
    await visit.client.finish()
    assert [message["more_body"] for message in visit.sent] == [False]


async def test_other_servers_have_no_short_way() -> None:
    visit = Visit()
    assert visit.client.outlet() is None
    await visit.client.send(b"hello")
    assert visit.sent == [{"type": "http.response.body", "body": b"hello", "more_body": True}]
