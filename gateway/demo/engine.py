"""llama.cpp's own HTTP server, from the xllamacpp wheel, on one GGUF file.

    python -m gateway.demo.engine MODEL.gguf [--port 8081] [--alias NAME] [--parallel 2] …

It says "listening on ADDRESS" when it answers (with --port 0 the way to learn the port), and ends with status
0 on SIGTERM or SIGINT. --parent PID: it is killed when that process, its parent, is gone.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import signal
import sys
import threading
from pathlib import Path

CONTEXT_EACH = 4096  # tokens, for each of the parallel sequences
BATCH = 64  # tokens of a prompt between two looks at whether its client has left; 2048 take seconds on a CPU
MOST_THREADS = 8  # more don't make a small model faster


def spare_threads() -> int:
    """All processors but one: on contended ones the threads of a token wait for each other at every layer."""
    processors = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(MOST_THREADS, processors - 1))


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when its parent goes, however that happens. Linux only."""
    if not sys.platform.startswith("linux"):
        return
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # 1 is PR_SET_PDEATHSIG
    if os.getppid() != parent:  # it went before we asked
        sys.exit(1)


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=8081)
    parser.add_argument("--alias", help="the model's name in the API")
    parser.add_argument("--parallel", type=int, default=2, help="sequences at a time (the gateway's slots)")
    parser.add_argument("--context", type=int, default=CONTEXT_EACH, help="tokens, for each of them")
    parser.add_argument("--batch", type=int, default=BATCH)
    parser.add_argument("--threads", type=int, default=spare_threads())
    parser.add_argument("--parent", type=int, help="end when this process, which started us, has ended")
    return parser.parse_args()


def main() -> None:
    """Serve until told to stop."""
    options = arguments()
    if options.parent:
        die_with_parent(options.parent)
    if not options.model.is_file():
        sys.exit(f"{options.model}: no such file")

    import xllamacpp  # noqa: PLC0415 - so that --help works without it

    params = xllamacpp.CommonParams()
    params.model.path = str(options.model)
    params.hostnames = [options.host] if isinstance(params.hostnames, list | tuple) else options.host
    params.port = options.port
    params.n_parallel = options.parallel
    params.n_ctx = options.context * options.parallel
    params.n_batch = params.n_ubatch = options.batch
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = options.threads
    params.endpoint_metrics = params.endpoint_slots = params.endpoint_props = True
    if options.alias:
        params.model_alias = (
            {options.alias} if isinstance(params.model_alias, set | frozenset) else options.alias
        )

    try:
        server = xllamacpp.Server(params)  # returns when the model is loaded
    except RuntimeError as error:
        sys.exit(f"llama.cpp can't serve {options.model}: {error}")
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    print("listening on", server.listening_address, flush=True)
    stop.wait()
    del server


if __name__ == "__main__":
    main()
