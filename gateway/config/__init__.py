"""`config.toml`: its schema, the strict reading of it, and how it is shown."""

from gateway.config.changes import Change, changes
from gateway.config.faults import ConfigError, Fault
from gateway.config.load import load, parse
from gateway.config.schema import (
    Admission,
    Config,
    Engine,
    Health,
    Retry,
    Route,
    Server,
    Stream,
    Target,
    Tenant,
    Tls,
    Usage,
)
from gateway.config.show import show
from gateway.config.values import MASK, Kind, Priority, Reclaim

__all__ = [
    "MASK",
    "Admission",
    "Change",
    "Config",
    "ConfigError",
    "Engine",
    "Fault",
    "Health",
    "Kind",
    "Priority",
    "Reclaim",
    "Retry",
    "Route",
    "Server",
    "Stream",
    "Target",
    "Tenant",
    "Tls",
    "Usage",
    "changes",
    "load",
    "parse",
    "show",
]
