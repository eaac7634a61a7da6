"""Runs a schedule's action lists on a model of time.

durations.py  the model: seconds at each stage and on each link
run.py        `simulate`: when every action happens
sums.py       gradients that several ranks sum before an update
memory.py     what every rank holds at its worst moment
calibrate.py  what a real run took besides the plan's times
wavefront.py  `simulate_totals`: sums alone, for thousands of ranks
"""

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
