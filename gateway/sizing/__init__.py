"""How many tokens and requests a GPU has room for, from a model's own `config.json`: arithmetic alone."""

from gateway.sizing.dtypes import KV_DTYPES, QUANTISED, WEIGHT_DTYPES
from gateway.sizing.fields import SizingError
from gateway.sizing.model import Model, read
from gateway.sizing.parameters import Part
from gateway.sizing.plan import BLOCK, MOST_SLOTS, OVERHEAD, TYPICAL, UTILIZATION, Plan, Setup, plan

__all__ = [
    "BLOCK",
    "KV_DTYPES",
    "MOST_SLOTS",
    "OVERHEAD",
    "QUANTISED",
    "TYPICAL",
    "UTILIZATION",
    "WEIGHT_DTYPES",
    "Model",
    "Part",
    "Plan",
    "Setup",
    "SizingError",
    "plan",
    "read",
]
