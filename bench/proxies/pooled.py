"""The usual repair of the naive one: a shared pool, a look at the client for each chunk, a close at the end.

BENCH_ENGINE=http://127.0.0.1:PORT python -m uvicorn bench.proxies.pooled:app
"""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

ENGINE = os.environ.get("BENCH_ENGINE", "")
LIMITS = httpx.Limits(max_connections=None, max_keepalive_connections=256)


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    async with httpx.AsyncClient(base_url=ENGINE, timeout=None, limits=LIMITS) as client:
        app.state.client = client
        yield


async def relayed(request: Request, answer: httpx.Response) -> AsyncIterator[bytes]:
    try:
        async for chunk in answer.aiter_raw():
            if await request.is_disconnected():
                return
            yield chunk
    finally:
        await answer.aclose()


async def forward(path: str, request: Request) -> Response:
    client: httpx.AsyncClient = request.app.state.client
    body = await request.body()
    onward = client.build_request(
        "POST", f"/v1/{path}", content=body, headers={"content-type": "application/json"}
    )
    streamed = bool(json.loads(body).get("stream"))
    answer = await client.send(onward, stream=streamed)
    if streamed:
        return StreamingResponse(relayed(request, answer), answer.status_code, media_type="text/event-stream")
    return Response(answer.content, answer.status_code, media_type="application/json")


async def health() -> Response:
    return JSONResponse({})


app = FastAPI(lifespan=lifespan)
app.add_api_route("/health", health, methods=["GET"])
app.add_api_route("/v1/{path:path}", forward, methods=["POST"])
