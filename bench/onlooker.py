"""Who looks at the gateway: a collector of traces, and a reader of the dashboard's events.

    python -m bench.onlooker COLLECTOR_PORT

Reads the control plane's port as a line from its input, reads until that is closed, and then writes how many
batches and events it was sent (JSON). It runs when nobody else wants its core (`SCHED_IDLE`, sched(7)): what
it costs on the machine isn't what is measured.
"""

from __future__ import annotations

import http.client
import json
import os
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from bench.targets import HOST


class Collector(BaseHTTPRequestHandler):
    """Takes spans, and forgets them."""

    protocol_version = "HTTP/1.1"
    batches = 0

    def do_POST(self) -> None:
        """Take a batch."""
        self.rfile.read(int(self.headers["Content-Length"]))
        Collector.batches += 1
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Say nothing."""


def main() -> None:
    """Look until the input is closed."""
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
    server = ThreadingHTTPServer((HOST, int(sys.argv[1])), Collector)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    events = 0

    def read(port: int) -> None:
        nonlocal events
        connection = http.client.HTTPConnection(HOST, port)
        connection.request("GET", "/admin/events", headers={"Accept": "text/event-stream"})
        answer = connection.getresponse()
        while line := answer.readline():
            events += line.startswith(b"data:")

    threading.Thread(target=read, args=[int(sys.stdin.readline())], daemon=True).start()
    sys.stdin.read()
    print(json.dumps({"batches": Collector.batches, "events": events}))


if __name__ == "__main__":
    main()
