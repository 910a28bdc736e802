"""``gateway demo``: a real engine and the gateway in front of it, started, watched and stopped together.

The addresses are those of the configuration, so a port is changed there. Ctrl-C (or SIGTERM) stops both: the
gateway first, which lets running streams end, then the engine; a second Ctrl-C doesn't wait.
"""

from __future__ import annotations

import argparse
import tempfile
from contextlib import ExitStack
from pathlib import Path

TRAFFIC_MINUTES = 10.0

_CONFIG = """\
[[engine]]
name = "demo"
kind = "llamacpp"
url = "http://127.0.0.1:8081"
slots = 2
models = ["smollm2-135m-instruct"]
"""
"""What is served where there is no configuration."""


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the command ``demo`` to the command line's parser."""
    about = "run a real engine with a small model (needs the extra `demo`), and the gateway in front of it"
    command = commands.add_parser("demo", help=about, description=about)
    command.add_argument(
        "--config",
        default="config.toml",
        metavar="FILE",
        help="configuration file (default: %(default)s, or a small one of its own where there is none)",
    )
    command.add_argument(
        "--traffic",
        nargs="?",
        type=_minutes,
        const=TRAFFIC_MINUTES,
        default=0.0,
        metavar="MINUTES",
        help=f"and send clients, some of whom leave, for so long (default: {TRAFFIC_MINUTES:g})",
    )
    command.set_defaults(parser=command)


def _minutes(text: str) -> float:
    try:
        minutes = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError("expected minutes, a number") from None
    if not 0 < minutes <= 24 * 60:
        raise argparse.ArgumentTypeError("expected minutes, at most a day of them")
    return minutes


def run(options: argparse.Namespace) -> int:
    """Check, start, watch, stop.

    Returns the exit code: 0 when stopped by Ctrl-C or SIGTERM, 2 when the configuration is at fault, 1
    for the rest.
    """
    # Here, so that a gateway that serves doesn't load what it never needs.
    from gateway.demo.checks import Failure, check_ports, check_processor, find_model, read_plan  # noqa: PLC0415
    from gateway.demo.stage import Demo  # noqa: PLC0415

    with ExitStack() as afterwards:
        try:
            check_processor()
            config = Path(options.config)
            if options.config == "config.toml" and not config.exists():
                folder = afterwards.enter_context(tempfile.TemporaryDirectory(prefix="gateway-demo-"))
                config = Path(folder, "config.toml")
                config.write_text(_CONFIG)
            plan = read_plan(config)
            model = find_model()
            check_ports(plan)
            return Demo(plan, model, options.traffic).run()
        except Failure as failure:
            failure.report()
            return failure.status
