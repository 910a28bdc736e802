"""llama.cpp's own HTTP server on a tiny model, as the bench needs it.

    python -m bench.llama MODEL.gguf --port PORT --slots N

One thread and small batches: the bench's cores are shared, and llama.cpp's thread barriers stall on busy
ones. The server's log goes to stderr; its line `slot release: ... stop processing` tells when a slot is free.
"""

from __future__ import annotations

import argparse
import signal
import threading
from typing import Any

TOKENS_PER_SLOT = 2048


def parameters(model: str, port: int, slots: int) -> Any:
    import xllamacpp  # noqa: PLC0415 (an optional package, and slow to import)

    params = xllamacpp.CommonParams()
    params.model.path = model
    params.hostnames = ["127.0.0.1"] if isinstance(params.hostnames, (list, tuple)) else "127.0.0.1"
    params.port = port
    params.n_parallel, params.n_ctx = slots, slots * TOKENS_PER_SLOT
    params.n_batch = params.n_ubatch = 64
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = 1
    return params


def main() -> None:
    parser = argparse.ArgumentParser(description="llama.cpp's server on a tiny model.")
    parser.add_argument("model")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--slots", type=int, default=4)
    options = parser.parse_args()
    import xllamacpp  # noqa: PLC0415

    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    server = xllamacpp.Server(parameters(options.model, options.port, options.slots))
    stop.wait()
    del server


if __name__ == "__main__":
    main()
