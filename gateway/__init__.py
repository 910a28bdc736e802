"""A streaming gateway in front of self-hosted LLM engines.

GPU time is spent only on answers somebody is still waiting for, and an engine
never gets more work than it can hold. The way in: ``docs/life-of-a-request.md``,
then :mod:`gateway.nursery`; every other module is a word it uses.
"""

__version__ = "0.1.0"
