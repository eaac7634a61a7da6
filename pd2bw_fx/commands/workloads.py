"""Plans a published workload, without torch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pd2bw_fx.commands.progress import ProgressLine, in_workload_units
from pd2bw_fx.passes.partition import Placement, plan_workload
from pd2bw_fx.workload import read_workload


def placed(workload: Path, *, accelerators_only: bool, **search: Any) -> Placement:
    """Returns where each node of the workload goes, with a line on stderr while a long search runs."""
    line = ProgressLine(text=in_workload_units)
    placement = plan_workload(
        read_workload(workload), accelerators_only=accelerators_only, progress=line, **search
    )
    line.close()
    return placement
