"""The ``gateway`` command.

Exit codes: 0 well, 2 the configuration (for ``size``: the model's) or the command line is at fault,
1 everything else.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from contextlib import suppress

import structlog
import trio

import gateway
from gateway import check, config, demo, keys, logs, notify, process, service, size, usagereport
from gateway.config.formats import check_name, stays_here
from gateway.handover import HandoverError
from gateway.server import BindError, UnknownHypercornError, check_hypercorn

log = structlog.get_logger("gateway.cli")

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_CONFIG = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    options, rest = _parser().parse_known_args(arguments)
    if rest:
        options.parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if options.command == "size":
        return size.run(options)
    if options.command == "demo":
        return demo.run(options)
    logs.configure_logging()
    if options.command == "key":
        return keys.run(options.name)
    try:
        return _run(options)
    except BrokenPipeError:
        # Whoever reads our output has seen enough of it.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILED


def _run(options: argparse.Namespace) -> int:
    try:
        if options.command == "usage":
            return usagereport.run(options)
        check_hypercorn()
        settings = config.load(options.config)
        if options.command == "check":
            if options.diff:
                return trio.run(check.diff, settings, options.config)
            return trio.run(check.run, settings)
        logs.apply(settings.log)
    except config.ConfigError as error:
        print(error.of(options.config), file=sys.stderr)
        return EXIT_CONFIG
    except UnknownHypercornError as error:
        print(error, file=sys.stderr)
        return EXIT_FAILED
    process.keep_no_large_blocks()
    return trio.run(_serve, settings, options.config)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="gateway", description="A streaming gateway in front of self-hosted LLM engines."
    )
    parser.add_argument("--version", action="version", version=f"gateway {gateway.__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    for name, about in (
        ("serve", "run the gateway (SIGTERM or Ctrl-C drains, a second one ends it now; SIGHUP reloads)"),
        ("check", "validate the configuration, show it, and ask every engine whether it answers"),
        ("usage", "show the tokens that requests took, from the file that usage.path names"),
    ):
        command = commands.add_parser(name, help=about, description=about)
        files = command.add_mutually_exclusive_group()
        files.add_argument(
            "--config",
            default="config.toml",
            metavar="FILE",
            help="configuration file (default: %(default)s)",
        )
        if name == "check":
            command.add_argument(
                "--diff",
                action="store_true",
                help="show what a reload would change of the gateway that runs with this file's server.admin",
            )
        if name == "usage":
            usagereport.add_arguments(command, files)
        command.set_defaults(parser=command)
    key = commands.add_parser("key", help="API keys of tenants", description="API keys of tenants")
    kinds = key.add_subparsers(dest="what", required=True, metavar="what")
    about = "make a key: prints it once, and the line for the configuration"
    new = kinds.add_parser("new", help=about, description=about)
    new.add_argument("name", metavar="NAME", type=_tenant_name, help="the tenant's name")
    new.set_defaults(parser=new)
    size.add_command(commands)
    demo.add_command(commands)
    return parser


def _tenant_name(text: str) -> str:
    if (reason := check_name(text)) is not None:
        raise argparse.ArgumentTypeError(reason)
    return text


def _reached_from_elsewhere(settings: config.Config) -> list[str]:
    return [address for address in settings.server.listen if stays_here(address) is False]


async def _serve(settings: config.Config, file: str) -> int:
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT, signal.SIGHUP) as signals:
        async with trio.open_nursery() as nursery:
            try:
                running: service.Service = await nursery.start(
                    _until_drained, settings, file, nursery.cancel_scope
                )
            except (BindError, HandoverError, config.ConfigError, BaseExceptionGroup) as error:
                return _explain(error, file)
            process.leave_collector_little()
            log.info("ready", listen=running.listen, admin=running.admin)
            if not settings.tenant and (everybody := _reached_from_elsewhere(settings)):
                log.warning(
                    "no tenants are configured: whoever reaches these addresses may use every model",
                    listen=everybody,
                )
            manager = notify.Notifier(running.summary)
            manager.ready()
            nursery.start_soon(manager.watchdog)
            ending = False
            async for number in signals:
                if number == signal.SIGHUP:
                    nursery.start_soon(_reload, running, manager)
                elif ending:
                    log.warning("second signal: ending now", live_requests=len(running.gateway.requests))
                    nursery.cancel_scope.cancel()
                    return EXIT_FAILED
                else:
                    ending = True
                    running.drain()
                    manager.stopping()
    return EXIT_OK


def _explain(error: BaseException, file: str) -> int:
    """Say why it can't start. What came out of nurseries is in groups. Raises what isn't the operator's."""
    leaf = error
    while isinstance(leaf, BaseExceptionGroup) and len(leaf.exceptions) == 1:
        leaf = leaf.exceptions[0]
    if isinstance(leaf, config.ConfigError):
        print(leaf.of(file), file=sys.stderr)
        return EXIT_CONFIG
    if not isinstance(leaf, BindError | HandoverError):
        raise error
    print(leaf, file=sys.stderr)
    return EXIT_FAILED


async def _reload(running: service.Service, manager: notify.Notifier) -> None:
    with manager.reloading(), suppress(config.ConfigError):  # It is in the log.
        await running.reloader.reload()


async def _until_drained(
    settings: config.Config,
    file: str,
    everything: trio.CancelScope,
    *,
    task_status: trio.TaskStatus[service.Service],
) -> None:
    def load() -> config.Config:
        try:
            return config.load(file)
        except config.ConfigError as error:
            raise error.of(file) from None

    await service.run(settings, load=load, file=file, task_status=task_status)
    process.end()
    everything.cancel()
