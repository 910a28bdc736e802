"""Hypercorn on Trio, on sockets of our own and with connections of our own.

Hypercorn's protocols (h11, h2) are kept; what is replaced is what stands around them:
how sockets are bound, how one connection's fault is contained, how a response that
breaks off is ended. Each cure names the behaviour of Hypercorn it is for.
"""

from gateway.server.listeners import BindError, Listener, adopt, bind, tls_context
from gateway.server.plane import Plane
from gateway.server.seam import UnknownHypercornError, check_hypercorn, why_ordinary

__all__ = [
    "BindError",
    "Listener",
    "Plane",
    "UnknownHypercornError",
    "adopt",
    "bind",
    "check_hypercorn",
    "tls_context",
    "why_ordinary",
]
