"""`python -m tests.fuzz [--seconds N] [--seed S] [--tls] [--only NUMBERS]`: hostile bytes, for longer.

Exit code 0 when nobody was harmed. Else 1, with the bytes of the batch and the command that plays it again.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import TextIO

import trio
import trustme

from tests.conftest import Tls
from tests.fuzz.harness import Fuzz, fuzz
from tests.fuzz.oracles import Harm

ROUND_SECONDS = 20.0
"""Then a new gateway with the next seed, TLS and plain in turns."""


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m tests.fuzz", description="Hostile bytes against the gateway."
    )
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=None, help="default: a random one, which is printed")
    parser.add_argument("--tls", action="store_true", help="only over TLS, and its handshake")
    parser.add_argument("--plain", action="store_true", help="only without TLS")
    parser.add_argument("--only", metavar="NUMBERS", help="one batch: the cases of these numbers, as 1,2,3")
    options = parser.parse_args()
    warnings.simplefilter("error")
    seed = random.SystemRandom().randrange(1_000_000) if options.seed is None else options.seed
    with tempfile.TemporaryDirectory() as folder:
        tls = make_tls(Path(folder))
        if options.only:
            numbers = [int(number) for number in options.only.split(",")]
            return play(seed, tls if options.tls else None, 0, numbers)
        until, turn = time.monotonic() + options.seconds, 0
        while (left := until - time.monotonic()) > 1:
            over_tls = options.tls or (turn % 3 == 2 and not options.plain)
            if status := play(seed + turn, tls if over_tls else None, min(left, ROUND_SECONDS), None):
                return status
            turn += 1
    return 0


def make_tls(folder: Path) -> Tls:
    authority = trustme.CA()
    issued = authority.issue_cert("127.0.0.1")
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    issued.private_key_pem.write_to_path(str(key))
    for blob in issued.cert_chain_pems:
        blob.write_to_path(str(certificate), append=True)
    return Tls(certificate, key, authority)


def play(seed: int, tls: Tls | None, seconds: float, only: Iterable[int] | None) -> int:
    try:
        if only is not None:
            summary = trio.run(lambda: Fuzz(seed, tls=tls).run(only=only))
        else:
            summary = trio.run(lambda: fuzz(seed, tls=tls, seconds=seconds))
    except Harm as harm:
        tell(f"seed {seed}{', over TLS' if tls else ''}: HARM: {harm}", sys.stderr)
        return 1
    tell(f"seed {seed}{', over TLS' if tls else ''}: {summary}", sys.stdout)
    return 0


def tell(line: str, file: TextIO) -> None:
    file.write(line + "\n")
    file.flush()


if __name__ == "__main__":
    sys.exit(main())
