"""The naive proxy: what one writes first, and all that many have.

It passes each request on at once, streams the answer through, and closes the connection to the engine when
its client leaves. What it doesn't do: ask whether the engine has room, or whether it has stopped.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator

import httpx
import trio
from hypercorn.config import Config
from hypercorn.trio import serve
from quart import Response, request
from quart_trio import QuartTrio

app = QuartTrio(__name__)
app.config["RESPONSE_TIMEOUT"] = None
client = httpx.AsyncClient(timeout=None, limits=httpx.Limits(max_connections=None), trust_env=False)


@app.route("/v1/<path:path>", methods=["GET", "POST"])
async def proxy(path: str) -> Response:
    """Pass a request on, and its answer back."""
    ask = client.build_request(
        request.method,
        f"{app.config['ENGINE']}/v1/{path}",
        content=await request.get_data(),
        headers={"content-type": "application/json"},
    )
    answer = await client.send(ask, stream=True)

    async def body() -> AsyncIterator[bytes]:
        try:
            async for data in answer.aiter_raw():
                yield data
        finally:
            await answer.aclose()  # the client is gone, or the answer whole

    return Response(body(), answer.status_code, {"content-type": answer.headers["content-type"]})


if __name__ == "__main__":
    port, app.config["ENGINE"] = sys.argv[1:]
    config = Config()
    config.bind = [f"127.0.0.1:{port}"]
    trio.run(serve, app, config)
