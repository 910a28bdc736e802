"""The control plane of a running gateway: who comes in, and what others can make a browser do there."""

from __future__ import annotations

import socket

import pytest
import trio

from gateway.config import ConfigError, parse, show
from tests.support.gateway import Gateway, running_gateway
from tests.support.http1 import Answer, connect, request_bytes
from tests.support.http1 import Http1 as Client
from tests.support.routes import CHAT
from tests.support.scripted import ScriptedEngine
from tests.support.scripts import Stream, honest

TOKEN = "correct-horse-battery"
BEARER = {"Authorization": f"Bearer {TOKEN}"}
EVERYTHING = [
    ("GET", "/metrics"),
    ("GET", "/admin/ledger"),
    ("GET", "/admin/requests"),
    ("GET", "/admin/queue"),
    ("GET", "/admin/engines"),
    ("POST", "/admin/reload"),
    ("POST", "/admin/engines/engine/drain"),
    ("POST", "/admin/engines/engine/resume"),
    ("DELETE", "/admin/requests/x"),
]


async def ask(gateway: Gateway, method: str, path: str, **headers: str) -> Answer:
    client = Client(await connect(gateway.service.admin))
    try:
        await client.send(request_bytes(path, method=method, headers=headers))
        return await client.answer()
    finally:
        await client.close()


async def test_another_name_is_refused_everywhere() -> None:
    async with running_gateway(ScriptedEngine(honest)) as gateway:
        for method, path in EVERYTHING:
            assert (await ask(gateway, method, path, Host="rebound.example:9090")).status == 403, path
            assert (await ask(gateway, method, path)).status in (200, 404), path
        assert (await ask(gateway, "GET", "/readyz", Host="10.1.2.3:9090")).status == 200


async def test_a_token_is_demanded_everywhere() -> None:
    async with running_gateway(ScriptedEngine(honest), server={"admin_token": TOKEN}, check=False) as gateway:
        for method, path in EVERYTHING:
            refused = await ask(gateway, method, path)
            assert (refused.status, refused.head["www-authenticate"]) == (401, 'Bearer realm="gateway"'), path
            assert (await ask(gateway, method, path, **BEARER)).status in (200, 404), path
        assert (await ask(gateway, "GET", "/healthz")).status == 200


async def test_a_page_of_another_origin_changes_nothing() -> None:
    engine = ScriptedEngine(Stream(pause_after=1, until=trio.Event()))
    async with running_gateway(engine) as gateway, trio.open_nursery() as nursery:
        client = Client(await connect(gateway.url))
        await client.post(CHAT.path, CHAT.payload(stream=True))
        await client.head()
        (live,) = await gateway.requests()
        for method, path in (*EVERYTHING[5:8], ("DELETE", f"/admin/requests/{live['id']}")):
            assert (await ask(gateway, method, path, Origin="https://evil.example")).status == 403
        assert [one["id"] for one in await gateway.requests()] == [live["id"]]
        own = {"Origin": f"http://{gateway.service.admin.removeprefix('http://')}"}
        own["Host"] = own["Origin"].removeprefix("http://")
        assert (await ask(gateway, "DELETE", f"/admin/requests/{live['id']}", **own)).status == 200
        await gateway.record(outcome="cancelled")
        await client.close()
        nursery.cancel_scope.cancel()


async def test_nothing_is_shared_with_other_origins() -> None:
    async with running_gateway(ScriptedEngine(honest)) as gateway:
        for method, path in EVERYTHING:
            head = (await ask(gateway, method, path, Origin="https://evil.example")).head
            assert not [name for name, _ in head.fields if name.startswith("access-control-")], path
            assert (head["x-frame-options"], head["cache-control"]) == ("DENY", "no-store")


async def test_a_new_token_counts_from_the_reload_on() -> None:
    async with running_gateway(ScriptedEngine(honest)) as gateway:
        gateway.sections["server"]["admin_token"] = TOKEN
        assert (await gateway.reload()).status == 200
        assert (await ask(gateway, "GET", "/admin/ledger")).status == 401
        del gateway.sections["server"]["admin_token"]
        assert (await ask(gateway, "POST", "/admin/reload", **BEARER)).status == 200
        assert (await ask(gateway, "GET", "/admin/ledger")).status == 200


WITH_ADMIN = """
[server]
{}
[[engine]]
name = "e"
kind = "vllm"
url = "http://h:1"
slots = 1
models = ["*"]
"""


@pytest.mark.parametrize("admin", ["0.0.0.0:0", "[::]:0", "192.0.2.7:9090", "gateway.example:9090"])
def test_where_others_reach_it_a_token_is_a_must(admin: str) -> None:
    text = WITH_ADMIN.format(f'admin = "{admin}"')
    with pytest.raises(ConfigError, match=r"server\.admin_token: missing, as others reach"):
        parse(text)
    assert parse(text.replace("[[engine]]", f'admin_token = "{TOKEN}"\n[[engine]]')).server.admin == admin


@pytest.mark.parametrize(("host", "private"), [("127.0.0.1", True), ("0.0.0.0", False)])
async def test_of_an_inherited_socket_it_is_known_when_it_is_there(host: str, private: bool) -> None:
    inherited = socket.create_server((host, 0))
    listen = {"listen": ["127.0.0.1:0"], "admin": f"fd://{inherited.detach()}"}
    if private:
        async with running_gateway(ScriptedEngine(honest), server=listen):
            return
    with pytest.raises(BaseExceptionGroup) as caught:
        async with running_gateway(ScriptedEngine(honest), server=listen):
            pass
    assert caught.group_contains(ConfigError, match="server.admin_token")


def test_a_token_never_shows() -> None:
    short = "0815"
    with pytest.raises(ConfigError) as caught:
        parse(WITH_ADMIN.format(f'admin_token = "{short}"'))
    assert str(caught.value) == (
        "config.toml: server.admin_token: expected at least 16 visible ASCII characters, no spaces"
    )
    config = parse(WITH_ADMIN.format(f'admin_token = "{TOKEN}"'))
    assert TOKEN not in repr(config) + show(config)
