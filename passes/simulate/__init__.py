"""Execute a schedule's action lists on a model of time."""

from .durations import Durations, LinkTimes
from .run import simulate, simulate_durations

__all__ = ["Durations", "LinkTimes", "simulate", "simulate_durations"]
