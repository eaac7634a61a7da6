"""partition: puts blocks on stages and stages on devices, by a search that proves how good its plan is.

An `Instance` holds a problem as plain numbers, for one order of the devices. The search keeps an incumbent,
the fastest assignment so far, and a lower bound that no assignment beats. It ends when the two meet.

    what is asked
        plan_problem.py       `partition`: a problem on a cluster
        placement.py          `plan_workload`: a published workload on accelerators and CPUs
        replicas.py           `partition_replicated`: stages with several copies
        sweep.py              `sweep`: number of stages, replicas, microbatch size
        request.py            what the planner is asked for, also with more memory or more stages
        constrain.py          the user's constraints as changes of the problem: joined, pinned, capped
        memory_kept.py        weight versions and microbatches that each built-in method keeps
        gradient_sums.py      the time that copies of a stage need to sum their gradients
    numbers for the search
        instance.py           `Instance`, and what an assignment costs it
        reader.py             a problem and a cluster as an instance
        groups.py             nodes of a workload that are planned as one
        devices.py            the device orders to try
        choices.py            the instances of all those orders, `SearchResult`, `Deadline`
        route.py, sharing.py  how a value travels to the stages that read it
    search/                   incumbent, order of the steps, cuts of topological orders
    bounds/                   lower bounds and refutations without an integer program
    integer_program/          feasibility at a target, as an integer program
    infeasibility/            why there is no plan, and what would be enough
    what comes out
        thin_cuts.py          less to send where the slowest stage is as fast
        planning.py           the plan of an assignment
        check.py              `check_plan`: an edited plan, priced again
        explain.py            `explain`: why a plan is as it is
        baselines.py          `baselines`: what other planners would choose, at the same costs

Many bounds relax the rules: a stage then has at most as much to do as it really has. So a target that is
infeasible under relaxed rules is infeasible. An assignment that is feasible under them may be slower by the
real rules, and is evaluated again. The modules of `bounds/` say what they relax, and rely on this.
"""

from .baselines import Baseline, baselines
from .check import check_plan
from .choices import Deadline, NothingFaster, floor_s
from .constrain import capped, devices_meant
from .explain import explain
from .instance import evaluate
from .memory_kept import METHODS
from .placement import Placement, plan_workload
from .plan_problem import partition, require_blocks
from .replicas import partition_replicated
from .sweep import sweep

__all__ = [
    "METHODS",
    "Baseline",
    "Deadline",
    "NothingFaster",
    "Placement",
    "baselines",
    "capped",
    "check_plan",
    "devices_meant",
    "evaluate",
    "explain",
    "floor_s",
    "partition",
    "partition_replicated",
    "plan_workload",
    "require_blocks",
    "sweep",
]
