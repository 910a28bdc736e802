"""`config.toml`: its schema, the strict reading of it, and how it is shown."""

from gateway.config.faults import ConfigError, Fault
from gateway.config.load import load, parse
from gateway.config.schema import (
    MASK,
    Admission,
    Config,
    Engine,
    Kind,
    Priority,
    Reclaim,
    Server,
    Stream,
    Tenant,
    Tls,
    Usage,
)
from gateway.config.show import show

__all__ = [
    "MASK",
    "Admission",
    "Config",
    "ConfigError",
    "Engine",
    "Fault",
    "Kind",
    "Priority",
    "Reclaim",
    "Server",
    "Stream",
    "Tenant",
    "Tls",
    "Usage",
    "load",
    "parse",
    "show",
]
