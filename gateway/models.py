"""Which models there are, answered from all engines together.

Named models come from the configuration: its routes and engines. An engine that takes any (``models =
["*"]``) is asked for its own list; the answer is remembered for a few seconds, and an
engine that doesn't answer in time is left out of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

import msgspec
import trio

from gateway.asking import MODELS_SECONDS, ask_models
from gateway.dialect import MODELS_PATH, TAGS_PATH
from gateway.engine import Engine
from gateway.errors import Code, GatewayError
from gateway.gateway import Gateway
from gateway.request import Request
from gateway.response import Response, whole
from gateway.tenants import Tenant

_REMEMBER_SECONDS = 10.0


class Models:
    """The list of models, as ``GET /v1/models``, ``/v1/models/{id}`` and ``/api/tags`` give it."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        self._created = int(datetime.now(UTC).timestamp())
        self._learnt: dict[str, tuple[float, tuple[str, ...]]] = {}

    async def answer(self, request: Request, tenant: Tenant | None = None) -> Response:
        """Answer one of the paths with what ``tenant`` may use.

        Raises GatewayError ``not_found`` or ``model_not_found``.
        """
        if request.method != "GET":
            raise GatewayError(Code.NOT_FOUND, f"{request.path[:200]} can only be read, with GET.")
        owners = {
            name: engine
            for name, engine in (await self._owners()).items()
            if tenant is None or tenant.may_use(name)
        }
        if request.path == TAGS_PATH:
            body: Any = {"models": [_tag(name) for name in owners]}
        elif request.path == MODELS_PATH:
            body = {"object": "list", "data": [self._model(name, engine) for name, engine in owners.items()]}
        else:
            name = request.path.removeprefix(MODELS_PATH + "/")
            if name not in owners:
                raise GatewayError(
                    Code.MODEL_NOT_FOUND,
                    f"There is no model {name[:200]!r}; GET {MODELS_PATH} lists what there is.",
                    param="model",
                )
            body = self._model(name, owners[name])
        return whole(request, 200, [], msgspec.json.encode(body))

    async def _owners(self) -> dict[str, str]:
        """Return each model's name with its first engine's."""
        engines = self._gateway.engines
        open_ended = [engine for engine in engines if engine.serves_any]
        async with trio.open_nursery() as nursery:
            for engine in open_ended:
                nursery.start_soon(self._learn, engine)
        owners = self._gateway.routing.owners()
        for engine in engines:
            for name in self._names(engine):
                owners.setdefault(name, engine.name)
        return owners

    def _names(self, engine: Engine) -> Iterable[str]:
        if not engine.serves_any:
            return engine.models
        return self._learnt.get(engine.name, (0.0, ()))[1]

    async def _learn(self, engine: Engine) -> None:
        asked_at, _ = self._learnt.get(engine.name, (-_REMEMBER_SECONDS, ()))
        now = trio.current_time()
        if now - asked_at < _REMEMBER_SECONDS:
            return
        names: tuple[str, ...] = ()
        with trio.move_on_after(MODELS_SECONDS):
            names = (await ask_models(engine)).names
        self._learnt[engine.name] = (now, names)

    def _model(self, name: str, engine: str) -> dict[str, object]:
        return {"id": name, "object": "model", "created": self._created, "owned_by": engine}


def _tag(name: str) -> dict[str, object]:
    return {
        "name": name,
        "model": name,
        "modified_at": "1970-01-01T00:00:00Z",
        "size": 0,
        "digest": "",
        "details": {"format": "", "family": "", "parameter_size": "", "quantization_level": ""},
    }
