"""partition: blocks to stages and stages to devices, by an integer program with a proof.

`reader.py` and `placement.py` turn a problem or a published workload into numbers (`instance.py`), with the
user's wishes in them (`constrain.py`), once for each order of the devices that is tried (`devices.py`,
`choices.py`). `search.py` has the order of the steps that find the fastest assignment and prove it,
`search_state.py` the steps (`intervals.py` upper bounds by cutting `orders.py`, `windows.py` reductions,
`least.py` a bound from single nodes, `relaxation.py` and `downsets.py` enumeration where there is little to
enumerate, `dominance.py`, `side_branches.py` and `relaxed_bound.py` so that there is little, `program.py` the integer
program); `search_with_routes.py` looks once more, for plans whose values go by other stages (`route.py`).
`planning.py` writes the plan. `infeasible.py` says why there is none, `shortfall.py` by how much,
`nearest.py` what would be enough, `explain.py` why it is as it is, `check.py` what an edited one costs;
`sweep.py` chooses what is around the program, `replicas.py` the copies of single stages, `baselines.py`
prices what others would have done.
"""

from .baselines import Baseline, baselines
from .check import check_plan
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
    "Placement",
    "baselines",
    "capped",
    "check_plan",
    "devices_meant",
    "evaluate",
    "explain",
    "partition",
    "partition_replicated",
    "plan_workload",
    "require_blocks",
    "sweep",
]
