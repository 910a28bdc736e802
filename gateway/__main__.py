"""``python -m gateway`` and the ``gateway`` command.

As good as nothing is imported here: whoever presses Ctrl-C while the rest is being loaded gets no traceback.
"""

import sys

_STOPPED_WELL = ("serve", "demo")
_INTERRUPTED = 130
"""What shells say of it: 128 and the signal's number."""


def main() -> int:
    """Run the command and return its exit code; see :mod:`gateway.cli`."""
    try:
        from gateway.cli import main as command  # noqa: PLC0415

        return command()
    except KeyboardInterrupt:
        # What runs until Ctrl-C has just been told to end, if a little early.
        return 0 if sys.argv[1:2] and sys.argv[1] in _STOPPED_WELL else _INTERRUPTED


if __name__ == "__main__":
    sys.exit(main())
