"""The dashboard: one page on the control plane, and the events that keep it up to date."""

from gateway.dashboard.board import Board
from gateway.dashboard.pages import add_pages

__all__ = ["Board", "add_pages"]
