"""Execute a schedule's action lists on a model of time."""

from .calibrate import calibrate
from .durations import Durations, LinkTimes
from .memory import peak_memory_bytes, versions_alive
from .run import simulate, simulate_durations
from .sums import Tied
from .wavefront import Totals, simulate_totals

__all__ = [
    "Durations",
    "LinkTimes",
    "Tied",
    "Totals",
    "calibrate",
    "peak_memory_bytes",
    "simulate",
    "simulate_durations",
    "simulate_totals",
    "versions_alive",
]
