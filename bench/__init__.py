"""The bench: what the gateway costs and how fast it lets go, measured from outside.

Three processes on loopback: `engine.py` (a simulated engine), `load.py` (the clients) and the gateway
between them, on a core of its own. Engine and clients stamp every event with CLOCK_MONOTONIC, which all
processes of one machine share, so "client closed" and "engine saw its socket closed" can be subtracted.

Reading order: `scenarios.py` (what is measured), `measure.py` (one load, and both ends' records joined),
`targets.py` (what is started), then `engine.py` and `load.py`; `client.py` holds the client's side of the
wire, `processes.py` what /proc tells about CPU and memory, `real.py` and `llama.py` the same on a real
engine, `report.py` the table and the JSON.
The bench is not part of the gateway: neither imports the other.
"""
