"""What looking costs where it matters most: an abort storm with the dashboard open, traces and JSON logs on.

The same storm on two gateways in turns, one of them as it comes and one with everything on. The collector
and the reader of the dashboard's events are threads of the bench's own.
"""

from __future__ import annotations

import http.client
import statistics
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from bench.figures import Result, costs, percentiles
from bench.leaving import STORM, TEARDOWN, join_teardowns
from bench.measure import run_load, warm
from bench.report import Outcome, at_most, spread
from bench.reporting import report_books, report_others
from bench.targets import HOST, Engine, Gateway, get

MOST_TIMES = 1.5
"""The p99 of the teardowns may be so many times what it is without."""


class _Collector(BaseHTTPRequestHandler):
    """Takes spans, and forgets them."""

    protocol_version = "HTTP/1.1"
    batches = 0

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        type(self).batches += 1
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Say nothing."""


def observed(rounds: int) -> Outcome:
    """500 leavers over two seconds, with everything on that looks at them, and without."""
    plan = replace(STORM, name="observed")
    outcome = Outcome("observed", f"{plan.streams} leavers over 2 s, with everything on; {rounds} rounds")
    got: dict[str, list[Result]] = {"with": [], "without": []}
    with _collecting() as port, Engine() as engine:
        on = f'\n[traces]\nendpoint = "http://{HOST}:{port}"\n\n[log]\nformat = "json"\n'
        with Gateway(engine, slots=500) as without, Gateway(engine, slots=500, more=on) as everything:
            gateways = {"with": everything, "without": without}
            for gateway in gateways.values():
                warm(gateway, engine)
            with _looking(everything) as frames:
                for number in range(rounds):
                    for name, gateway in gateways.items():
                        engine.reset()
                        result = run_load(gateway, replace(plan, name=f"observed-{name}-{number}"))
                        result["ledger"], result["gauges"] = gateway.idle()
                        join_teardowns(result, engine.settled())
                        del result["finished"]
                        got[name].append(result)
            seen = len(frames)
            dropped = get(everything.admin or 0, "/metrics")[1].count("gateway_spans_dropped_total 0.0")
    outcome.figures = dict(got)
    late = {
        name: percentiles([value for result in results for value in result["teardown_ms"]])
        for name, results in got.items()
    }
    for name, figures in late.items():
        outcome.add(f"{TEARDOWN}, {name}", spread(figures, "p50", "p99", "max"))
    p99 = {
        name: statistics.median(percentiles(result["teardown_ms"])["p99"] or 0.0 for result in results)
        for name, results in got.items()
    }
    times = p99["with"] / p99["without"]
    outcome.require(
        "p99, median of the rounds: with / without",
        f"{p99['with']:.2f} / {p99['without']:.2f}: {times:.2f}",
        at_most(times, MOST_TIMES),
        f"<= {MOST_TIMES:g} times",
    )
    spent = {name: statistics.median(costs(results, "events")) for name, results in got.items()}
    outcome.add("CPU per event, with / without", f"{spent['with']:.1f} / {spent['without']:.1f} us")
    outcome.require(
        "batches of spans; none dropped; events of the dashboard",
        f"{_Collector.batches}; {'yes' if dropped else 'NO'}; {seen}",
        bool(dropped and _Collector.batches and seen),
        "some; yes; some",
    )
    report_books(outcome, got["with"] + got["without"])
    report_others(outcome, got["with"] + got["without"])
    return outcome


@contextmanager
def _collecting() -> Iterator[int]:
    server = ThreadingHTTPServer((HOST, 0), _Collector)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()


@contextmanager
def _looking(gateway: Gateway) -> Iterator[list[int]]:
    """Have the dashboard's events read; yields the sizes of what came, as they come."""
    connection = http.client.HTTPConnection(HOST, gateway.admin, timeout=60)
    connection.request("GET", "/admin/events", headers={"Accept": "text/event-stream"})
    answer = connection.getresponse()
    frames: list[int] = []

    def read() -> None:
        while line := answer.readline():
            if line.startswith(b"data:"):
                frames.append(len(line))

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    try:
        yield frames
    finally:
        if connection.sock is not None:
            connection.sock.shutdown(2)
        thread.join(5)
        connection.close()
