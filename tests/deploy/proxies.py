"""The proxies of deploy/ as committed, but for addresses and paths: unprivileged, on loopback."""

from __future__ import annotations

import os
import shutil
import ssl
import subprocess
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import trio

from tests.conftest import Tls
from tests.support.process import ROOT, free_ports

DEPLOY = ROOT / "deploy"
NAMES = ["nginx", "haproxy"]
SBIN = "/usr/sbin:/usr/local/sbin"  # not on an ordinary user's PATH
START_SECONDS = 10


@dataclass
class Proxy:
    """A running one."""

    url: str
    trusted: ssl.SSLContext
    output: Path


def program(name: str) -> str:
    """Its path; the test is skipped where it isn't installed."""
    found = shutil.which(name, path=f"{os.environ.get('PATH', '')}:{SBIN}")
    if found is None:
        pytest.skip(f"{name} isn't installed")
    return found


def substituted(text: str, replacements: Mapping[str, str]) -> str:
    """Each of them once: what a test runs is the file but for these."""
    for old, new in replacements.items():
        assert text.count(old) == 1, f"{old!r} is there {text.count(old)} times"
        text = text.replace(old, new)
    return text


def nginx(folder: Path, tls: Tls, port: int, gateway: str, admin: str) -> list[str]:
    config = folder / "nginx.conf"
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    temporary = "".join(f" {kind}_temp_path {folder}/{kind};" for kind in kinds)
    certificate = "ssl_certificate     /etc/nginx/tls/fullchain"
    key = "ssl_certificate_key /etc/nginx/tls/privkey"
    first = "\n        "  # The second is in an example, behind a #.
    changes = {
        "pid /run/nginx.pid;": f"pid {folder}/pid;",
        "error_log /var/log/nginx/error.log warn;": "error_log stderr warn;",
        "/var/log/nginx/access.log requests;": f"{folder}/access.log requests;{temporary}",
        "server 127.0.0.1:8080;": f"server {gateway};",
        "listen 443 ssl": f"listen 127.0.0.1:{port} ssl",
        f"{first}{certificate}.pem;": f"{first}ssl_certificate {tls.certificate};",
        f"{first}{key}.pem;": f"{first}ssl_certificate_key {tls.key};",
    }
    config.write_text(substituted((DEPLOY / "nginx.conf").read_text(), changes))
    return [program("nginx"), "-p", str(folder), "-e", "stderr", "-c", str(config), "-g", "daemon off;"]


def haproxy(folder: Path, tls: Tls, port: int, gateway: str, admin: str) -> list[str]:
    config, pem = folder / "haproxy.cfg", folder / "both.pem"
    pem.write_bytes(tls.certificate.read_bytes() + tls.key.read_bytes())
    changes = {
        "    bind :443 ssl crt /etc/haproxy/tls/gateway.pem": f"    bind 127.0.0.1:{port} ssl crt {pem}",
        "    maxconn 8000": "    maxconn 600",  # an ordinary user's descriptors
        "check port 9090 ": f"check port {admin.rpartition(':')[2]} ",
        "\n    server gateway1 127.0.0.1:8080": f"\n    server gateway1 {gateway}",
    }
    config.write_text(substituted((DEPLOY / "haproxy.cfg").read_text(), changes))
    return [program("haproxy"), "-db", "-f", str(config)]


@asynccontextmanager
async def running_proxy(
    name: str, folder: Path, tls: Tls, *, gateway: str, admin: str
) -> AsyncIterator[Proxy]:
    """Run it before the gateway at these URLs, until the block is left."""
    (port,) = free_ports(1)
    address, admin_address = (url.removeprefix("http://") for url in (gateway, admin))
    command = {"nginx": nginx, "haproxy": haproxy}[name](folder, tls, port, address, admin_address)
    output = folder / f"{name}.log"
    with output.open("wb") as log:
        async with trio.open_nursery() as nursery:
            run = partial(trio.run_process, command, stdout=log, stderr=subprocess.STDOUT, check=False)
            process: trio.Process = await nursery.start(run)
            try:
                if not await _answers(port, process):
                    raise AssertionError(f"{name} does not listen: {await trio.Path(output).read_text()}")
                yield Proxy(f"https://127.0.0.1:{port}", tls.trusted, output)
            finally:
                process.terminate()
                with trio.CancelScope(shield=True), trio.move_on_after(5):
                    await process.wait()
                nursery.cancel_scope.cancel()


async def _answers(port: int, process: trio.Process) -> bool:
    with trio.move_on_after(START_SECONDS):
        while process.returncode is None:
            try:
                await trio.aclose_forcefully(await trio.open_tcp_stream("127.0.0.1", port))
                return True
            except OSError:
                await trio.sleep(0.02)
    return False
