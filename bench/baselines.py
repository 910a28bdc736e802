"""Other proxies in the gateway's place, for comparison: each a process on its core, started like it.

What isn't installed is left out, with a note of what is missing.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
from collections.abc import Callable, Sequence

from bench.targets import HOST, Served, Started

PACKAGES = ("fastapi", "uvicorn", "httpx")
NGINX = """\
daemon off;
worker_processes 1;
pid {folder}/pid;
error_log stderr warn;
worker_rlimit_nofile 20000;
events {{ worker_connections 8192; }}
http {{
  access_log off;
  client_body_temp_path {folder}/body; proxy_temp_path {folder}/proxy;
  fastcgi_temp_path {folder}/fastcgi; uwsgi_temp_path {folder}/uwsgi; scgi_temp_path {folder}/scgi;
  client_max_body_size 64m; client_body_buffer_size 1m;
  keepalive_requests 1000000;
  upstream engine {{ server {host}:{engine}; keepalive 256; keepalive_requests 1000000; }}
  server {{
    listen {host}:{port} backlog=4096;
    location / {{
      proxy_pass http://engine;
      proxy_http_version 1.1; proxy_set_header Connection "";
      proxy_buffering off; proxy_cache off;
      proxy_read_timeout 600s; proxy_send_timeout 600s;
    }}
  }}
}}
"""


class Python(Served):
    """One of `bench/proxies`, under uvicorn with its defaults, but for the access log."""

    def __init__(self, name: str, engine: Started) -> None:
        super().__init__(name, engine)
        command = [sys.executable, "-m", "uvicorn", f"bench.proxies.{name}:app", "--no-access-log"]
        command += ["--host", HOST, "--port", str(self.port), "--log-level", "warning"]
        self.start(command, {"BENCH_ENGINE": f"http://{HOST}:{engine.port}"})


class Nginx(Served):
    """nginx with one worker, as the guides to streaming through it say: unbuffered, connections kept."""

    def __init__(self, engine: Started) -> None:
        super().__init__("nginx", engine)
        config = os.path.join(self.folder.name, "nginx.conf")
        with open(config, "w", encoding="utf-8") as file:
            file.write(NGINX.format(folder=self.folder.name, host=HOST, engine=engine.port, port=self.port))
        self.start([nginx() or "nginx", "-c", config, "-p", self.folder.name, "-e", "stderr"])


def nginx() -> str | None:
    """The binary's path; on Debian it is where an ordinary user's PATH doesn't lead."""
    return shutil.which("nginx", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/usr/local/sbin")


MAKE: dict[str, Callable[[Started], Served]] = {
    "naive": lambda engine: Python("naive", engine),
    "pooled": lambda engine: Python("pooled", engine),
    "nginx": Nginx,
}


def only(*names: str) -> None:
    """Leave out all but these, whatever a scenario asks for."""
    for name in list(MAKE):
        if name not in names:
            del MAKE[name]


def missing(name: str) -> str | None:
    """Why a baseline can't be had here; None: it can."""
    if name == "nginx":
        return None if nginx() else "nginx (not installed)"
    lacking = [package for package in PACKAGES if importlib.util.find_spec(package) is None]
    return f"{name} (not installed: {', '.join(lacking)})" if lacking else None


def choose(names: Sequence[str]) -> tuple[list[str], list[str]]:
    """(the baselines that can be started, the notes about the others)."""
    reasons = {name: missing(name) for name in names if name in MAKE}
    return [name for name, why in reasons.items() if not why], [why for why in reasons.values() if why]
