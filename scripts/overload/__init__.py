"""An engine that dies of overload, a naive proxy, and a storm of clients that leave.

`scripts/demo-overload` shows them on a terminal; tests run the engine in their own loop.
"""
