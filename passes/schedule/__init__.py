"""Schedules: the order in which each rank computes, sends, receives and updates.

A training method is one object in `METHODS` (its face is `Method`): which rank runs what, in which order and
on which weight version. The engine executes its lists, the simulator times them, the report draws them.

    method       file            updates
    2bw          streamed.py     two versions, one update late everywhere
    pipedream    streamed.py     stashed versions, unequal replicas, vertical sync
    pb, pipemare streamed.py     one version; a backward runs on other weights than its forward did
    1f1b, gpipe  flushed.py      synchronous
    ddp          flushed.py      one stage, N replicas
    interleaved  interleaved.py  synchronous, several stages a rank
"""

from .build import SYNCHRONOUS, build_schedule, num_versions, schedule_of, stage_actions, weight_version
from .check import check_schedule
from .flushed import warm_up_forwards
from .method import Method
from .methods import METHODS, method_of

__all__ = [
    "METHODS",
    "SYNCHRONOUS",
    "Method",
    "build_schedule",
    "check_schedule",
    "method_of",
    "num_versions",
    "schedule_of",
    "stage_actions",
    "warm_up_forwards",
    "weight_version",
]
