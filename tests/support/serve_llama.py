"""Runs llama.cpp's own HTTP server (the xllamacpp wheel) on one model file: the real engine of the tests.

One thread on purpose: two threads on contended cores wait for each other (measured: a thousand times slower).
"""

from __future__ import annotations

import argparse
import signal

import xllamacpp


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("model")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--slots", type=int, required=True)
    parser.add_argument("--context", type=int, required=True, help="tokens, of all slots together")
    options = parser.parse_args()
    params = xllamacpp.CommonParams()
    params.model.path = options.model
    params.model_alias = {"tiny"} if isinstance(params.model_alias, set | frozenset) else "tiny"
    params.hostnames = ["127.0.0.1"] if isinstance(params.hostnames, list | tuple) else "127.0.0.1"
    params.port = options.port
    params.n_parallel = options.slots
    params.n_ctx = options.context
    params.n_batch = params.n_ubatch = 64  # a departure is seen between two batches
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    params.endpoint_metrics = params.endpoint_slots = True
    server = xllamacpp.Server(params)
    print("listening", server.listening_address, flush=True)  # noqa: T201 - what the parent waits for
    signal.sigwait({signal.SIGTERM, signal.SIGINT})
    del server


if __name__ == "__main__":
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    main()
