"""A first version: a client for each request, and the answer handed on as it comes.

    BENCH_ENGINE=http://127.0.0.1:PORT python -m uvicorn bench.proxies.naive:app

Nothing in it asks whether its own client is still there; that a stream ends with it is Starlette's doing.
"""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator

import httpx
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse

ENGINE = os.environ.get("BENCH_ENGINE", "")


async def forward(path: str, request: Request) -> Response:
    body = await request.body()
    url, headers = f"{ENGINE}/v1/{path}", {"content-type": "application/json"}
    if json.loads(body).get("stream"):

        async def relayed() -> AsyncIterator[bytes]:
            async with (
                httpx.AsyncClient(timeout=None) as client,
                client.stream("POST", url, content=body, headers=headers) as answer,
            ):
                async for chunk in answer.aiter_raw():
                    yield chunk

        return StreamingResponse(relayed(), media_type="text/event-stream")
    async with httpx.AsyncClient(timeout=None) as client:
        answer = await client.post(url, content=body, headers=headers)
    return Response(answer.content, answer.status_code, media_type="application/json")


async def health() -> Response:
    return JSONResponse({})


app = FastAPI()
app.add_api_route("/health", health, methods=["GET"])
app.add_api_route("/v1/{path:path}", forward, methods=["POST"])
