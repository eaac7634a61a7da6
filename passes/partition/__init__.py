"""partition: blocks to stages and stages to devices, by an integer program with a proof.

`reader.py` and `pd2bw_fx/workload.py` turn a problem into numbers (`instance.py`), `search.py` finds the
fastest assignment and proves it (`intervals.py` upper bounds, `windows.py` reductions, `program.py` the
integer program), `planning.py` writes the plan, `infeasible.py` says why there is none.
"""

from .face import partition
from .instance import evaluate

__all__ = ["evaluate", "partition"]
