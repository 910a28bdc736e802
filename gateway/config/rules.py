"""The rules that hold between several keys. Each looks only at values that are right by themselves."""

from __future__ import annotations

from typing import Any
from urllib.parse import SplitResult, urlsplit

from gateway.config.faults import key_path, quote
from gateway.config.formats import same_socket
from gateway.config.hints import nearest
from gateway.config.schema import PER_KIND, RECLAIM_SECONDS
from gateway.config.walk import Walk, item_at

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
    owners: dict[str, str] = {}
    for index, tenant in enumerate(tenants):
        _tenant(walk, tenant, item_at("tenant", index, tenant), served, owners)
    _names(walk, "engine", engines)
    _names(walk, "tenant", tenants)


def _names(walk: Walk, kind: str, tables: list[Table]) -> None:
    first_with: dict[str, int] = {}
    for index, table in enumerate(tables):
        if (name := table.get("name")) is None:
            continue
        if name in first_with:
            at = item_at(kind, index, table)
            walk.fault(f"{at}.name", f"{kind}[{first_with[name]}] has this name already")
        first_with.setdefault(name, index)


def _tenant(walk: Walk, tenant: Table, at: str, served: set[str], owners: dict[str, str]) -> None:
    models = tenant.get("models", [])
    _models(walk, models, at)
    for index, model in enumerate(models):
        if model != "*" and "*" not in served and model not in served:
            near = nearest(model, sorted(served))
            hint = f'did you mean "{near}"?' if near else ""
            walk.fault(f"{at}.models[{index}]", f"no engine serves {quote(model)}", hint)
    for index, key in enumerate(tenant.get("keys", [])):
        if key in owners:
            walk.fault(f"{at}.keys[{index}]", f"the same key as {owners[key]}", "a key has one owner")
        owners.setdefault(key, f"{at}.keys[{index}]")


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
    if "*" in models and len(models) > 1:
        walk.fault(f"{at}.models", '"*" means every model and stands alone')
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
