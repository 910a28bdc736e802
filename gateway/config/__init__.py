"""`config.toml`: its schema, the strict reading of it, and how it is shown."""

from gateway.config.changes import Change, changes
from gateway.config.faults import ConfigError, Fault
from gateway.config.load import load, parse
from gateway.config.rules import ADMIN_TOKEN_HINT
from gateway.config.schema import Config, Engine, Route, Target, Tenant
from gateway.config.sections import Admission, Health, Log, Retry, Server, Stream, Tls, Traces, Usage
from gateway.config.show import show
from gateway.config.values import MASK, Kind, Priority, Reclaim

__all__ = [
    "ADMIN_TOKEN_HINT",
    "MASK",
    "Admission",
    "Change",
    "Config",
    "ConfigError",
    "Engine",
    "Fault",
    "Health",
    "Kind",
    "Log",
    "Priority",
    "Reclaim",
    "Retry",
    "Route",
    "Server",
    "Stream",
    "Target",
    "Tenant",
    "Tls",
    "Traces",
    "Usage",
    "changes",
    "load",
    "parse",
    "show",
]
