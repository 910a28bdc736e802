"""One request of the storm, on a connection of its own: leaving closes it at once."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlsplit

import h11
import trio


class Broken(Exception):
    """The answer broke off, or there was nobody to ask."""


class Answer:
    """An answer as it comes."""

    def __init__(self, stream: trio.SocketStream, connection: h11.Connection) -> None:
        self._stream = stream
        self._h11 = connection
        self._rest = b""

    async def status(self) -> int:
        """Read the head."""
        head = await self._event()
        if not isinstance(head, h11.Response):
            raise Broken("no head")
        return head.status_code

    async def events(self) -> list[bytes]:
        """Wait for whole events: what stands behind their ``data: ``. Empty at the body's clean end."""
        while True:
            event = await self._event()
            if not isinstance(event, h11.Data):
                return []
            *events, self._rest = (self._rest + event.data).split(b"\n\n")
            if events:
                return [event.removeprefix(b"data: ") for event in events]

    async def _event(self) -> object:
        try:
            while (event := self._h11.next_event()) is h11.NEED_DATA:
                self._h11.receive_data(await self._stream.receive_some(65536))
            return event
        except (OSError, trio.BrokenResourceError, h11.RemoteProtocolError) as error:
            raise Broken(repr(error)) from error


@contextlib.asynccontextmanager
async def asking(url: str, payload: dict[str, Any]) -> AsyncIterator[Answer]:
    """POST the payload. The connection is closed at the end of the block, whole answer or not."""
    parts = urlsplit(url)
    body = json.dumps(payload).encode()
    connection = h11.Connection(h11.CLIENT)
    headers = [
        ("Host", parts.netloc),
        ("Content-Type", "application/json"),
        ("Content-Length", str(len(body))),
    ]
    request = h11.Request(method="POST", target=parts.path, headers=headers)
    sent = [connection.send(event) or b"" for event in (request, h11.Data(data=body), h11.EndOfMessage())]
    try:
        stream = await trio.open_tcp_stream(parts.hostname or "", parts.port or 80)
    except OSError as error:
        raise Broken(repr(error)) from error
    try:
        with contextlib.suppress(trio.BrokenResourceError):  # the answer may be there all the same
            await stream.send_all(b"".join(sent))
        yield Answer(stream, connection)
    finally:
        await trio.aclose_forcefully(stream)
