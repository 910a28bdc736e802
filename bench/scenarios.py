"""The scenarios by name: what is run, how often, and what it shows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from bench import article, holding, leaving, rates
from bench.aside import aside
from bench.departures import departures
from bench.observed import observed
from bench.queueing import queueing
from bench.real import real
from bench.report import Outcome


@dataclass(frozen=True)
class Scenario:
    """A command of the bench; `run` takes the number of rounds."""

    run: Callable[[int], Outcome]
    rounds: int
    what: str


SCENARIOS = {
    "leavers": Scenario(
        partial(leaving.leavers, 100), 10, "100 streams that leave half-way: torn down how fast?"
    ),
    "leavers-500": Scenario(partial(leaving.leavers, 500), 10, "the same with 500"),
    "leavers-at-once": Scenario(leaving.at_once, 3, "500 streams that all leave at one instant"),
    "departures": Scenario(departures, 10, "each way of leaving, in each phase"),
    "http2": Scenario(leaving.http2, 3, "100 streams on one HTTP/2 connection, a fifth reset half-way"),
    "observed": Scenario(observed, 3, "500 leavers with the dashboard open, traces and JSON logs on"),
    "crowd": Scenario(leaving.crowd, 1, "100 clients on 16 slots, a fifth leaves half-way"),
    "aside": Scenario(aside, 3, "other routes while 200 streams run"),
    "steady": Scenario(rates.steady, 3, "CPU per event, 100 streams at 50 tokens/s"),
    "steady-400": Scenario(rates.steady_400, 3, "CPU per event, 400 streams at 50 tokens/s"),
    "bulk": Scenario(rates.bulk, 3, "CPU per event, 64 streams as fast as they go"),
    "requests": Scenario(rates.requests, 3, "CPU per request, 2,000 that aren't streamed"),
    "queueing": Scenario(queueing, 3, "CPU of a request's way through the queue, with 10 to 100,000 waiting"),
    "growth": Scenario(rates.growth, 3, "CPU per event at 50, 500 and 2,000 streams"),
    "overload": Scenario(rates.overload, 1, "two and four times the events that one core carries"),
    "slow-readers": Scenario(holding.slow_readers, 1, "memory, 200 readers at 2 KB/s"),
    "open-streams": Scenario(holding.open_streams, 1, "memory, 1,000 streams that hardly move"),
    "article-a": Scenario(article.leaving, 1, "500 clients that leave, beside other proxies"),
    "article-b": Scenario(article.slots, 1, "100 clients on 16 slots, beside other proxies"),
    "real": Scenario(real, 1, "client's close to idle slot on llama.cpp"),
}
