"""Starts the engine, the gateway and the traffic, watches them, and stops them.

Nothing of a request passes here, so it may wait as it likes: no Trio.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

from gateway.demo.checks import MODEL, OWN_ENGINE, Failure, Plan
from gateway.demo.children import Child, Signals

PROMPT = "Write a story about a lighthouse keeper and her cat, in ten chapters."  # long enough to be left
ENGINE_SECONDS = 120.0  # to load the model: 1 s from memory, much more from a slow disk
GATEWAY_SECONDS = 30.0  # to start
ENGINE_STOP_SECONDS = 5.0  # from SIGTERM to SIGKILL
DRAIN_MARGIN_SECONDS = 10.0  # what the gateway may take beyond its drain before it is killed


class StoppedError(Exception):
    """Somebody pressed Ctrl-C."""


class Demo:
    """Starts the engine and the gateway, watches them, stops them."""

    def __init__(self, plan: Plan, model: Path, traffic_minutes: float = 0.0) -> None:
        self.plan = plan
        self.model = model
        self.traffic_minutes = traffic_minutes
        self.signals = Signals()
        self.engine: Child | None = None
        self.gateway: Child | None = None
        self.traffic: Child | None = None
        self.serves = False
        """Whether the gateway was ready."""

    def run(self) -> int:
        """Until Ctrl-C or a failure; the exit status."""
        try:
            self.start_engine()
            self.start_gateway()
            print(hints(self.plan), flush=True)
            self.start_traffic()
            while True:
                self.watch(1.0)
        except StoppedError:
            status = self.stop()
            if self.engine and self.engine.log and self.engine.log.parent == Path(tempfile.gettempdir()):
                self.engine.log.unlink()
            return status
        except Failure as failure:
            failure.report()
            self.stop()
            return failure.status

    def start_engine(self) -> None:
        """Start the engine and wait until its model is loaded."""
        where = self.plan.engine
        command = [sys.executable, "-u", "-m", "gateway.demo.engine", str(self.model)]
        command += ["--host", where.host, "--port", str(where.port), "--alias", MODEL]
        command += ["--parallel", str(self.plan.slots), "--parent", str(os.getpid())]
        self.engine = Child("engine", command, engine_log(), death=signal.SIGKILL)
        with progress(f"Loading {MODEL} into the engine (port {where.port})") as tell:
            self.wait_for(f"http://{where.reachable}/health", ENGINE_SECONDS, self.engine, tell)

    def start_gateway(self) -> None:
        """Start the gateway and wait until it is ready."""
        command = [sys.executable, "-m", "gateway", "serve", "--config", str(self.plan.config)]
        self.gateway = Child("gateway", command)
        with progress(
            f"Starting the gateway (ports {self.plan.api.port} and {self.plan.admin.port})"
        ) as tell:
            self.wait_for(f"http://{self.plan.admin.reachable}/readyz", GATEWAY_SECONDS, self.gateway, tell)
        self.serves = True

    def start_traffic(self) -> None:
        """Send clients, if that is wanted; they end by themselves."""
        if not self.traffic_minutes:
            return
        command = [sys.executable, "-m", "gateway.demo.traffic", self.plan.api_url, "--model", MODEL]
        command += ["--minutes", str(self.traffic_minutes), "--slots", str(self.plan.slots)]
        self.traffic = Child("traffic", command)
        minutes = f"{self.traffic_minutes:g} minute{'' if self.traffic_minutes == 1 else 's'}"
        print(f"Clients come and go for {minutes}: http://{self.plan.admin.reachable}/", flush=True)

    def wait_for(self, url: str, seconds: float, child: Child, tell: Callable[[], None]) -> None:
        """Wait until a child answers 200."""
        give_up = time.monotonic() + seconds
        while not answers(url):
            if time.monotonic() > give_up:
                raise Failure(
                    f"the {child.name} doesn't answer {url} after {seconds:.0f} s.", *child.last_words()
                )
            self.watch(0.05)
            tell()

    def watch(self, seconds: float) -> None:
        """Wait a moment; raise when there is a reason to stop."""
        self.signals.wait(seconds)
        if self.signals.stops:
            raise StoppedError
        if self.engine and self.engine.poll() is not None:
            raise engine_died(self.engine)
        if self.gateway and self.gateway.poll() is not None:
            raise gateway_ended(self.gateway)
        if self.traffic and self.traffic.poll() is not None:
            self.traffic = None
            print("The clients are done; the engine and the gateway go on.", flush=True)

    def stop(self) -> int:
        """The gateway first, then the engine it may still need. 0, unless the gateway ended badly."""
        status = 0
        if self.traffic:
            self.traffic.signal(signal.SIGTERM)
        if self.gateway and not self.serves:
            self.end(self.gateway, DRAIN_MARGIN_SECONDS)  # It may not have got to minding signals.
        elif self.gateway and self.gateway.poll() is None:
            seconds = f"{self.plan.drain_seconds:g} s"
            print(f"\nStopping the gateway: streams have {seconds} to end. Ctrl-C again: now.", flush=True)
            self.end(self.gateway, self.plan.drain_seconds + DRAIN_MARGIN_SECONDS)
            if self.gateway.poll() and self.signals.stops < 2:  # nobody hurried it
                print(f"The gateway did not end cleanly: {self.gateway.how_it_ended()}.", file=sys.stderr)
                status = 1
        if self.engine and self.engine.poll() is None:
            self.end(self.engine, ENGINE_STOP_SECONDS)
            print("The engine has stopped.", flush=True)
        return status

    def end(self, child: Child, patience: float) -> None:
        """SIGTERM; once more for the next Ctrl-C; SIGKILL for the one after that, or when patience ends."""
        stops, asked = self.signals.stops, 1
        child.signal(signal.SIGTERM)
        give_up = time.monotonic() + patience
        while child.poll() is None:
            self.signals.wait(min(0.5, give_up - time.monotonic()))
            if time.monotonic() > give_up or self.signals.stops - stops > 1:
                child.signal(signal.SIGKILL)
            elif self.signals.stops - stops == asked:
                asked += 1
                child.signal(signal.SIGTERM)


def engine_died(engine: Child) -> Failure:
    """Say why, as far as can be seen."""
    if engine.poll() == -signal.SIGILL:
        return Failure(
            "the engine used an instruction this processor doesn't have (SIGILL).",
            "Its build wants a newer one (on x86-64: AVX2).",
            OWN_ENGINE,
        )
    lines = engine.last_words()
    if engine.poll() == -signal.SIGKILL:
        lines = ["Somebody killed it; if nobody did, memory ran out (it needs about 600 MB).", *lines]
    return Failure(f"the engine has died: {engine.how_it_ended()}.", *lines)


def gateway_ended(gateway: Child) -> Failure:
    """It has said why on this terminal, unless it was killed."""
    why = " (above: why)" if (gateway.poll() or 0) > 0 else ""
    return Failure(
        f"the gateway has ended: {gateway.how_it_ended()}{why}.", status=2 if gateway.poll() == 2 else 1
    )


def engine_log() -> Path:
    """Beside the environment, or, where nothing can be written, among the temporary files."""
    path = Path(sys.prefix) / "engine.log"
    try:
        path.open("wb").close()
    except OSError:
        descriptor, name = tempfile.mkstemp(prefix="gateway-engine-", suffix=".log")
        os.close(descriptor)
        return Path(name)
    return path


def answers(url: str) -> bool:
    """Whether somebody answers 200 there."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # never by way of http_proxy
    try:
        with opener.open(url, timeout=2) as response:
            return bool(response.status == 200)
    except (OSError, urllib.error.URLError):
        return False


@contextlib.contextmanager
def progress(what: str) -> Iterator[Callable[[], None]]:
    """One line that grows: what is being done, and how long it took."""
    start = time.monotonic()
    terminal = sys.stdout.isatty()

    def tell() -> None:
        if terminal:
            print(f"\r==> {what} … {time.monotonic() - start:.1f} s", end="", flush=True)

    if not terminal:
        print(f"==> {what} …", flush=True)
    tell()
    done = False
    try:
        yield tell
        done = True
    finally:
        if terminal:
            tell()
            print(flush=True)
        elif done:
            print(f"    ready after {time.monotonic() - start:.1f} s", flush=True)


def hints(plan: Plan) -> str:
    """What to try next."""
    insecure = "-k " if plan.tls else ""
    python = os.path.relpath(sys.executable)
    return f"""
The gateway answers on {plan.api_url}, its engine runs {MODEL}. Each finished request
will be one line of JSON here. In another terminal:

  A streamed answer. Press Ctrl-C in the middle: the line here says "client_gone", the engine has stopped.

curl {insecure}-N {plan.api_url}/v1/chat/completions -H 'Content-Type: application/json' -d '{{
  "model": "{MODEL}", "stream": true, "max_tokens": 2000,
  "messages": [
    {{"role": "system", "content": "You are a helpful assistant. Answer in English."}},
    {{"role": "user", "content": "{PROMPT}"}}]}}'

  Whether the engine works at this moment, asked past the gateway:

curl -s http://{plan.engine.reachable}/slots | grep -o '"is_processing":[a-z]*'

  The same request with the openai client:

{python} - <<'EOF'
import openai
client = openai.OpenAI(base_url="{plan.api_url}/v1", api_key="none")
stream = client.chat.completions.create(
    model="{MODEL}", stream=True, max_tokens=2000,
    messages=[
        {{"role": "system", "content": "You are a helpful assistant. Answer in English."}},
        {{"role": "user", "content": "{PROMPT}"}}])
for chunk in stream:
    print(chunk.choices[0].delta.content or "" if chunk.choices else "", end="", flush=True)
EOF

  Dashboard           http://{plan.admin.reachable}/
  Metrics             http://{plan.admin.reachable}/metrics
  Running requests    http://{plan.admin.reachable}/admin/requests

Ctrl-C here stops the gateway and the engine.
"""
