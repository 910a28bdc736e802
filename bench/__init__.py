"""The bench: what the gateway costs and how fast it lets go, measured from outside.

Processes on loopback: `engine.py` (a simulated engine), `load.py` (the clients) and the gateway between them,
on a core of its own; in its place, for comparison, the engine itself and the proxies of `baselines.py`.
Engine and clients stamp every event with CLOCK_MONOTONIC, which all processes of one machine share, so
"client closed" and "engine saw its socket closed" can be subtracted.

Reading order: `scenarios.py` (what there is), `rates.py`, `leaving.py`, `holding.py` and `article.py` (what
is run and what must hold), `compare.py` (the same load on each target in turns), `measure.py` and `watch.py`
(one load, and what is read off meanwhile), `figures.py` (both ends' records joined), `targets.py` and
`baselines.py` (what is started), then `engine.py` with `generation.py`, and `load.py` with `plan.py` and
`stream.py`; `client.py` and `http2.py` hold the client's side of the wire, `processes.py` what /proc tells
about CPU and memory, `departures.py` each way of leaving, `real.py` and `llama.py` the same on a real engine,
`report.py` the table and the JSON, `charts.py` the pictures.
The bench is not part of the gateway: neither imports the other.
"""
