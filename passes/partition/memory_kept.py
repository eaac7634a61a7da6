"""What the training methods that the planner itself knows keep in memory at each stage."""

from __future__ import annotations

from pd2bw_fx.costs import Kept
from pd2bw_fx.errors import InputError

METHODS = ("2bw", "1f1b", "gpipe")


def kept_by(method: str, num_stages: int, microbatches_per_update: int) -> tuple[Kept, ...]:
    """Returns weight versions and microbatches in flight at a stage's worst moment, for each stage.

    With one forward, one backward, 2BW included, stage s of d has d - s microbatches in flight. GPipe has all
    of an update's. An update of no more microbatches than that has no gradient yet when all are in flight.

    Raises InputError for 2BW with fewer microbatches than stages (arXiv 2006.09503, section 3.1).
    """
    d, m = num_stages, microbatches_per_update
    if method == "2bw" and m < d:
        raise InputError(
            f"microbatches_per_update={m} with {d} stages; two weight versions are enough only from "
            f"microbatches_per_update={d} on"
        )
    if method == "gpipe":
        return (Kept(1, m, gradients_wait=True, updates_each=m == 1, flushes=True),) * d
    if method == "1f1b":
        return tuple(Kept(1, min(m, d - stage), m <= d - stage, m == 1, flushes=True) for stage in range(d))
    return tuple(Kept(2, d - stage, m == 1, m == 1) for stage in range(d))
