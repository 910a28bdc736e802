"""Hostile bytes against the running gateway: from clients, and from engines.

`frames.py` and `seeds.py` hold what is well-formed, `mutators.py` spoils it, `cases.py` makes one case of a
seed and a number, `harness.py` plays batches of cases and looks, after each, whether anybody else was harmed.
The same seed makes the same bytes: `python -m tests.fuzz --help`.
"""
