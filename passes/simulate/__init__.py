"""Execute a schedule's action lists on a model of time."""

from .durations import Durations, LinkTimes
from .run import simulate, simulate_durations
from .wavefront import Totals, simulate_totals

__all__ = ["Durations", "LinkTimes", "Totals", "simulate", "simulate_durations", "simulate_totals"]
