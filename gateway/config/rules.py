"""The rules that hold between several keys. Each looks only at values that are right by themselves."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from urllib.parse import SplitResult, urlsplit

from gateway.config.faults import key_path, quote
from gateway.config.formats import same_socket, stays_here
from gateway.config.hints import nearest
from gateway.config.values import PER_KIND, RECLAIM_SECONDS
from gateway.config.walk import Walk, item_at

ADMIN_TOKEN_HINT = 'admin_token = "file:/path"; `openssl rand -hex 16` makes one'

Table = dict[str, Any]
"""A table as `Walk` leaves it: a key that is missing had a fault."""


def check(walk: Walk, config: Table) -> None:
    """Tell `walk` what it couldn't see by itself, and fill in the default that depends on another key."""
    _server(walk, config.get("server", {}))
    engines: list[Table] = config.get("engine", [])
    for index, engine in enumerate(engines):
        at = item_at("engine", index, engine)
        _engine(walk, engine, at)
        _no_loop(walk, engine.get("url", ""), config.get("server", {}), at)
    tenants: list[Table] = config.get("tenant", [])
    served = {model for engine in engines for model in engine.get("models", ["*"])}
    routes: list[Table] = config.get("route", [])
    named = [route.get("model") for route in routes]
    for index, route in enumerate(routes):
        _route(walk, route, item_at("route", index, route), served, named, engines)
    _chains(walk, routes)
    served |= {name for name in named if name is not None}
    owners: dict[str, str] = {}
    for index, tenant in enumerate(tenants):
        _tenant(walk, tenant, item_at("tenant", index, tenant), served, owners)
    _names(walk, "engine", engines)
    _one_table_each(walk, engines)
    _names(walk, "tenant", tenants)
    _names(walk, "route", routes, "model")


def _names(walk: Walk, kind: str, tables: list[Table], key: str = "name") -> None:
    first_with: dict[str, int] = {}
    for index, table in enumerate(tables):
        if (name := table.get(key)) is None:
            continue
        if name in first_with:
            at = item_at(kind, index, table)
            walk.fault(f"{at}.{key}", f"{kind}[{first_with[name]}] has this {key} already")
        first_with.setdefault(name, index)


def _one_table_each(walk: Walk, engines: list[Table]) -> None:
    """Two tables for one engine would count its slots twice, and give it what it can't hold."""
    first_at: dict[Any, int] = {}
    for index, engine in enumerate(engines):
        if (url := engine.get("url")) is None:
            continue
        address = _address(url)
        if address in first_at:
            walk.fault(
                f"{item_at('engine', index, engine)}.url",
                f"engine[{first_at[address]}] is at this address already, and each would use its own slots",
                "one table for each engine, with all that it serves in its models",
            )
        first_at.setdefault(address, index)


def _address(url: str) -> Any:
    """Return where an engine is, the same for each way to write it."""
    if url.startswith("unix:"):
        return url
    split = urlsplit(url)
    host = "127.0.0.1" if split.hostname == "localhost" else split.hostname
    return split.scheme, host, _port(split), split.path.rstrip("/")


def _tenant(walk: Walk, tenant: Table, at: str, served: set[str], owners: dict[str, str]) -> None:
    models = tenant.get("models", [])
    _models(walk, models, at)
    for index, model in enumerate(models):
        if model != "*":
            _served(walk, f"{at}.models[{index}]", model, served)
    for index, key in enumerate(tenant.get("keys", [])):
        if key in owners:
            walk.fault(f"{at}.keys[{index}]", f"the same key as {owners[key]}", "a key has one owner")
        owners.setdefault(key, f"{at}.keys[{index}]")


def _route(
    walk: Walk, route: Table, at: str, served: set[str], named: list[str | None], engines: list[Table]
) -> None:
    by_name = {engine.get("name"): engine for engine in engines}
    targets: list[Table] = route.get("to", [])
    for index, target in enumerate(targets or [route]):
        key = f"{at}.to[{index}]" if targets else at
        _served(walk, f"{key}.model", target.get("model"), served)
        for number, name in enumerate(target.get("engines", [])):
            where = f"{key}.engines[{number}]"
            if name not in by_name:
                _unknown(walk, where, f"there is no engine {quote(name)}", name, by_name)
            elif not {target.get("model"), "*", "auto"} & set(by_name[name].get("models", ["*"])):
                walk.fault(where, f"engine {quote(name)} doesn't serve {quote(str(target.get('model')))}")
    fallbacks = route.get("fallbacks", [])
    for index, name in enumerate(fallbacks):
        if name in fallbacks[:index]:
            walk.fault(f"{at}.fallbacks[{index}]", f"the same as fallbacks[{fallbacks.index(name)}]")
        _served(walk, f"{at}.fallbacks[{index}]", name, served | {each for each in named if each})


def _served(walk: Walk, where: str, model: str | None, served: set[str]) -> None:
    if model is not None and not served & {model, "*", "auto"}:
        _unknown(walk, where, f"no engine serves {quote(model)}", model, served)


def _unknown(walk: Walk, where: str, what: str, word: str, known: Iterable[Any]) -> None:
    near = nearest(word, sorted(each for each in known if isinstance(each, str)))
    walk.fault(where, what, f'did you mean "{near}"?' if near else "")


def _chains(walk: Walk, routes: list[Table]) -> None:
    """Fallbacks may be routes with fallbacks of their own, but none may lead back."""
    leads = {route.get("model"): route.get("fallbacks", []) for route in routes}
    for index, route in enumerate(routes):
        seen: set[str] = set()
        ahead = list(route.get("fallbacks", []))
        while ahead:
            name = ahead.pop()
            if name not in seen:
                seen.add(name)
                ahead += leads.get(name, [])
        if route.get("model") in seen:
            walk.fault(f"{item_at('route', index, route)}.fallbacks", "they lead back to this route")


def _server(walk: Walk, server: Table) -> None:
    listen: list[str] = list(server.get("listen", ()))
    for index, address in enumerate(listen):
        for earlier, other in enumerate(listen[:index]):
            if same_socket(address, other):
                walk.fault(f"server.listen[{index}]", f"the same socket as server.listen[{earlier}]")
                break
    admin = server.get("admin")
    for index, address in enumerate(listen):
        if admin is not None and same_socket(admin, address):
            hint = "the control plane needs one of its own"
            walk.fault("server.admin", f"the same socket as server.listen[{index}]", hint)
            break
    if admin is not None and stays_here(admin) is False and server.get("admin_token", "") is None:
        walk.fault("server.admin_token", f"missing, as others reach {admin}", ADMIN_TOKEN_HINT)
    body, bodies = server.get("max_body_bytes"), server.get("bodies_bytes")
    if body is not None and bodies is not None and body > bodies:
        hint = "a body of that size could never be read"
        walk.fault("server.max_body_bytes", f"expected at most bodies_bytes ({bodies}), got {body}", hint)


def _engine(walk: Walk, engine: Table, at: str) -> None:
    _models(walk, engine.get("models", []), at)
    _reclaim_seconds(walk, engine, at)
    _headers(walk, engine, at)
    if engine.get("ca") and not engine.get("url", "https:").startswith("https:"):
        walk.fault(f"{at}.ca", "only an https:// url has certificates to check")


def _no_loop(walk: Walk, url: str, server: Table, at: str) -> None:
    """An engine on this machine may not be the gateway itself; of other machines' names nothing is known."""
    split = urlsplit(url)
    if url.startswith("unix:"):
        address = url
    elif split.hostname in ("localhost", "127.0.0.1", "::1"):
        address = f"[::1]:{_port(split)}" if split.hostname == "::1" else f"127.0.0.1:{_port(split)}"
    else:
        return
    listen = [(f"server.listen[{index}]", each) for index, each in enumerate(server.get("listen", ()))]
    for key, ours in [*listen, ("server.admin", server.get("admin"))]:
        if ours is not None and same_socket(address, ours):
            walk.fault(f"{at}.url", f"the same socket as {key}", "the gateway would ask itself")


def _port(url: SplitResult) -> int:
    return url.port or {"http": 80, "https": 443}[url.scheme]


def _models(walk: Walk, models: list[str], at: str) -> None:
    if len(models) > 1 and (alone := {"*", "auto"} & set(models)):
        means = "every model" if "*" in alone else "the engine's own list"
        walk.fault(f"{at}.models", f'"{min(alone)}" means {means} and stands alone')
        return
    for index, model in enumerate(models):
        if model in models[:index]:
            walk.fault(f"{at}.models[{index}]", f"the same model as models[{models.index(model)}]")


def _reclaim_seconds(walk: Walk, engine: Table, at: str) -> None:
    kind, seconds = engine.get("kind"), engine.get("reclaim_seconds")
    if kind is None or seconds is None:
        return
    default, minimum = RECLAIM_SECONDS[kind]
    if seconds == PER_KIND:
        engine["reclaim_seconds"] = default
    elif seconds < minimum:
        expected = f"expected at least {minimum:g} for kind {quote(kind)}"
        walk.fault(f"{at}.reclaim_seconds", f"{expected}, got {seconds:g}")


def _headers(walk: Walk, engine: Table, at: str) -> None:
    seen: set[str] = set()
    for name in engine.get("headers", {}):
        path = key_path(f"{at}.headers", name)
        if name.lower() in seen:
            walk.fault(path, "given twice: header names don't differ by case")
        if name.lower() == "authorization" and engine.get("api_key"):
            walk.fault(path, "api_key makes this header already")
        seen.add(name.lower())
