"""A restart without a gap: a new process takes over from the one that runs, over a unix socket.

The one that runs hands out its listening sockets, so that no connection is refused, and goes on with what
it has. Who is connected to it is served by it, and told with each answer that the connection ends there. From
the beginning it says how much of each engine it may still use: what it holds, what the first of those who
wait needs, and one slot as long as somebody is connected. That number only falls, and the new one uses what
is left: together they never have more than an engine's slots.

The messages are lines of JSON. The new one says ``{"takes": 1}`` and, when it serves, ``{"serves":
[addresses]}``; the old one answers with ``{"sockets": […]}`` and the sockets, then ``{"left": true}``, and
``{"keeps": {url: [slots, tokens]}}`` whenever that has changed. It closes when it has ended. It keeps the
sockets until then, so that connections wait in them should the new one die: the next one is given them again.
"""

from gateway.handover.line import HandoverError, Sockets
from gateway.handover.predecessor import Predecessor, take_over
from gateway.handover.successor import Door, Handover

__all__ = ["Door", "Handover", "HandoverError", "Predecessor", "Sockets", "take_over"]
