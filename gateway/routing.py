"""What a model's name stands for: the engines a request may go to, and under which name.

Without routes that is every engine that serves the model. A route adds what operators change
without their clients noticing: another name, a share for a new model, what to do when the first choice
is gone, and how requests are spread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gateway import config
from gateway.balance import Pick, least_loaded, sticky
from gateway.dialect import Route
from gateway.engine import Engine
from gateway.errors import Code, GatewayError
from gateway.headers import find
from gateway.peek import Peek, peek
from gateway.prefixes import Prefixes, blocks_of
from gateway.request import Request
from gateway.tickets import Stage

MOST_MODEL_CHARACTERS = 256
"""Longer than any engine's names; it is kept for the record when the body is dropped."""


_MOST_FOUND = 1000
"""Names are clients' words: there is no end of them."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What is to be done for a request: its route, the engines it may go to, what its body says.

    ``answered`` is told which engine has begun to answer it, and ``take_turn`` that it was admitted;
    ``first`` is the target whose turn it is.
    """

    route: Route
    stages: Sequence[Stage]
    seen: Peek
    pick: Pick = least_loaded
    answered: Callable[[Engine], None] | None = None
    take_turn: Callable[[], None] = lambda: None
    first: config.Target | None = None

    @property
    def cost(self) -> int:
        """Its cost in slots."""
        return self.seen.sequences


class Routing:
    """All engines and routes."""

    def __init__(
        self, routes: Sequence[config.Route], engines: Sequence[Engine], before: Routing | None = None
    ) -> None:
        self.engines = tuple(engines)
        self._found: dict[tuple[str, str | None, config.Target | None], list[Stage]] = {}
        self.paths = frozenset[str]().union(*(engine.paths for engine in engines))
        known: dict[str, _Name] = before._names if before is not None else {}
        self._names: dict[str, _Name] = {
            route.model: _Name(route, known.get(route.model)) for route in routes
        }

    def owners(self) -> dict[str, str]:
        """Return the names of the routes with the first engine of each."""
        owners = {}
        for name, route in self._names.items():
            targets = route.settings.to or (config.Target(model=name),)
            engines = [engine.name for engine in self.engines if any(map(_serves(engine), targets))]
            if engines:
                owners[name] = engines[0]
        return owners

    def label(self, model: str | None) -> str:
        """Return a model's name for metrics: there are only as many as are configured."""
        known = model in self._names or any(model in engine.models for engine in self.engines)
        return model if model is not None and known else "other"

    def plan(self, request: Request, route: Route, body: bytes) -> Plan:
        """Look into the body and choose who could answer it.

        Raises GatewayError ``invalid_json``, ``invalid_request`` or ``model_not_found``.
        """
        seen = peek(body, path=route.path)
        if seen.model is not None and len(seen.model) > MOST_MODEL_CHARACTERS:
            what = f"The model's name is longer than {MOST_MODEL_CHARACTERS} characters."
            raise GatewayError(Code.INVALID_REQUEST, what, param="model")
        request.model = seen.model
        request.model_label = self.label(seen.model)
        request.stream = route.streams if seen.stream is None else seen.stream
        name = self._names.get(seen.model or "")
        first = name.turn() if name else None
        if stages := self.stages(route.path, seen.model, first):
            if name is None:
                return Plan(route, stages, seen)
            return Plan(route, stages, seen, *name.spread(request, seen), name.take_turn, first)
        if seen.model is None:
            raise GatewayError(Code.INVALID_REQUEST, "The request must name a model.", param="model")
        raise GatewayError(
            Code.MODEL_NOT_FOUND,
            f"No engine serves the model {seen.model[:200]!r} on {route.path}; GET /v1/models lists them.",
            param="model",
        )

    def stages(self, path: str, model: str | None, first: config.Target | None = None) -> list[Stage]:
        """Return where a request for ``model`` may go, in the order in which it is tried.

        ``first`` is the target of its route whose turn it is. What was found is kept, until engines have
        other models.
        """
        key = (path, model, first)
        if (stages := self._found.get(key)) is None:
            if len(self._found) >= _MOST_FOUND:
                self._found.clear()
            stages = self._found[key] = self._stages(path, model, first)
        return stages

    def forget(self) -> None:
        """Engines have other models."""
        self._found.clear()

    def _stages(self, path: str, model: str | None, first: config.Target | None) -> list[Stage]:
        stages = []
        for target in self._targets(model, first):
            engines = tuple(
                engine for engine in self.engines if path in engine.paths and _serves(engine)(target)
            )
            if engines:
                stages.append(Stage(engines, None if target.model == model else target.model))
        return stages

    def _targets(self, model: str | None, first: config.Target | None) -> Sequence[_Target]:
        targets: list[_Target] = []
        ahead, seen = [model], set[str | None]()
        while ahead:  # Of the routes it falls back to each once, however many lead there.
            name = ahead.pop(0)
            if name in seen:
                continue
            seen.add(name)
            route = self._names.get(name or "")
            targets += route.targets(first if name == model else None) if route else [_Target(name)]
            ahead = [*(route.settings.fallbacks if route else ()), *ahead]
        return targets


@dataclass(frozen=True, slots=True)
class _Target:
    model: str | None
    engines: Sequence[str] = ()


def _serves(engine: Engine) -> Callable[[_Target | config.Target], bool]:
    return lambda target: (
        engine.serves(target.model) and (not target.engines or engine.name in target.engines)
    )


class _Name:
    """A route, and where its turn is."""

    def __init__(self, settings: config.Route, before: _Name | None = None) -> None:
        self.settings = settings
        same = before is not None and before.settings.to == settings.to
        self._turns: list[float] = (
            before._turns if before is not None and same else [0.0 for _ in settings.to]
        )
        self._prefixes: Prefixes = before._prefixes if before is not None else Prefixes()

    def turn(self) -> config.Target | None:
        """Return the target whose turn it is (nginx's smooth weighted round robin)."""
        targets = self.settings.to
        return targets[self._next()] if targets else None

    def take_turn(self) -> None:
        """A request has taken that turn."""
        targets = self.settings.to
        if len(targets) > 1:
            first = self._next()
            for index, target in enumerate(targets):
                self._turns[index] += target.weight
            self._turns[first] -= sum(target.weight for target in targets)

    def _next(self) -> int:
        targets, turns = self.settings.to, self._turns
        return max(range(len(targets)), key=lambda index: turns[index] + targets[index].weight)

    def targets(self, first: config.Target | None) -> list[_Target]:
        """Return its targets, ``first`` first; without one in the order of the configuration."""
        targets = self.settings.to
        if not targets:
            return [_Target(self.settings.model)]
        if first in targets:
            targets = (first, *(target for target in targets if target is not first))
        return [_Target(target.model, target.engines) for target in targets]

    def spread(self, request: Request, seen: Peek) -> tuple[Pick, Callable[[Engine], None] | None]:
        """Say how to choose among the engines for a request, and who is to know which one has answered."""
        policy = self.settings.policy
        if policy == "session":
            session = find(request.headers, self.settings.session_header.lower().encode())
            return (sticky(session) if session else least_loaded), None
        if policy == "prefix":
            blocks = blocks_of(seen.fields)
            return self._prefixes.pick(blocks), lambda engine: self._prefixes.learn(blocks, engine.name)
        return least_loaded, None
