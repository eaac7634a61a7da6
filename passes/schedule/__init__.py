"""Schedules: the order in which each rank computes, sends, receives and updates.

A training method is one object in `METHODS`, of a subclass of `Method`. It says which rank runs what, in
which order and on which weight version. The engine executes its lists, the simulator times them, the report
draws them. `register_method` adds a method of a user's own.

    method        file            updates
    2bw           streamed.py     two versions, one update late everywhere
    pipedream     streamed.py     stashed versions, unequal replicas, vertical sync
    pb, pipemare  streamed.py     one version; a backward runs on other weights than its forward did
    1f1b, gpipe   flushed.py      synchronous
    bapipe        flushed.py      synchronous: one of the two, chosen for a cluster
    ddp           flushed.py      synchronous: one stage, N replicas
    interleaved   interleaved.py  synchronous: several stages a rank
    chimera       chimera.py      synchronous: two pipelines in opposite directions
    zb-h1, zb-h2  zero_bubble.py  synchronous: the backward in two halves
    zb-auto       zb_auto.py      synchronous: the same, in an order that zb_search.py finds
    inference     flushed.py      none: forwards alone
"""

from .build import SYNCHRONOUS, build_schedule, schedule_of
from .check import check_schedule
from .check_method import check_method
from .flushed import BaPipe, warm_up_forwards
from .method import Method, Placing, StageMethod
from .methods import METHODS, method_of, register_method, registered_method, training_methods
from .of_plan import keeping, keeping_copies, shape_of
from .times import Times

__all__ = [
    "METHODS",
    "BaPipe",
    "SYNCHRONOUS",
    "StageMethod",
    "Method",
    "Placing",
    "Times",
    "build_schedule",
    "check_method",
    "check_schedule",
    "keeping",
    "keeping_copies",
    "method_of",
    "register_method",
    "registered_method",
    "schedule_of",
    "shape_of",
    "training_methods",
    "warm_up_forwards",
]
