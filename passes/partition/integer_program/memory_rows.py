"""The memory of every stage as rows of an integer program, one for each moment that may be its worst.

Mostly there is one such moment: all microbatches are in flight, and the gradients are there. Where gradients
wait there are two: all microbatches in flight without gradients, and one less with them. A large parameter
adds another one, when it is stepped and no microbatch is worked on. The stage fits where all of these rows
hold. A stage has no rows where everything that may be on it fits together.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from pd2bw_fx.passes.partition.instance import Floats, Instance
from pd2bw_fx.passes.solver import Variable

from .assignment import Assignment, Row, Windows

_BYTE = 1e-6  # what a byte counts at least where rows are to the byte: less might be lost in rounding sums


@dataclass(frozen=True, slots=True, eq=False)
class _Moment:
    """A moment that may be a stage's worst, and its row. `at_work` counts the microbatches in flight whose
    saved bytes are there even where the stage recomputes."""

    in_flight: int
    at_work: int
    has_gradients: bool
    is_stepping: bool = False
    row: Row = field(default_factory=Row)


class MemoryRows:
    """The rows of all stages. Bytes that follow from the nodes of a stage are added here; the caller adds the
    others with `hold` and `keep`."""

    def __init__(self, assignment: Assignment, instance: Instance) -> None:
        self._assignment = assignment
        self._instance = instance
        self._moments = [
            _moments(instance, stage, assignment.windows) for stage in range(instance.num_stages)
        ]
        for stage in range(instance.num_stages):
            if self.binds(stage):
                self._static(stage)
                self._largest(stage, self._instance.workspace_bytes, is_stepping=False)
                self._largest(stage, self._instance.stepped_bytes, is_stepping=True)
                self._saved(stage)
        self._shared()

    def binds(self, stage: int) -> bool:
        return bool(self._moments[stage])

    def hold(self, stage: int, variable: Variable, num_bytes: float) -> None:
        """Adds these bytes for every microbatch in flight, where the variable is one."""
        for moment in self._moments[stage]:
            moment.row.add(variable, num_bytes * moment.in_flight)

    def keep(self, stage: int, variable: Variable, num_bytes: float) -> None:
        """Adds these bytes for all microbatches in flight but one, where the variable is one."""
        for moment in self._moments[stage]:
            moment.row.add(variable, num_bytes * (moment.in_flight - moment.at_work))

    def limit(self, excess: Variable | None, *, to_the_byte: bool) -> None:
        """Requires all rows to be within the limit, in shares of it, plus `excess` where one is given.

        With `to_the_byte` rows are multiplied until a byte is more than a solver's tolerance.
        """
        for stage, moments in enumerate(self._moments):
            limit = float(self._instance.limit_bytes[stage])
            unit = max(1.0, limit * _BYTE) if to_the_byte else 1.0
            for moment in moments:
                row = Row()
                row.add_row(moment.row, unit / limit)
                if excess is not None:
                    row.add(excess, -unit)
                self._assignment.require(row, unit)

    def _static(self, stage: int) -> None:
        instance = self._instance
        for moment in self._moments[stage]:
            held = instance.static_bytes[stage]
            if not moment.has_gradients:
                held = held - instance.gradient_bytes
            for node in self._assignment.nodes(stage):
                self._assignment.add_x(moment.row, node, stage, float(held[node]))

    def _shared(self) -> None:
        for index, shared in enumerate(self._instance.shared):
            for stage, moments in enumerate(self._moments):
                if not moments:
                    continue
                holds = self._assignment.program.continuous(f"shared_{index}_{stage}", high=1.0)
                for moment in moments:
                    without = 0.0 if moment.has_gradients else shared.gradient_bytes
                    moment.row.add(holds, float(shared.num_bytes[stage]) - without)
                for node in shared.nodes:
                    row = Row()
                    self._assignment.add_x(row, node, stage, 1.0)
                    row.add(holds, -1.0)
                    self._assignment.require(row)

    def _largest(self, stage: int, num_bytes: Floats, *, is_stepping: bool) -> None:
        """Adds the largest of the nodes' bytes to the moments when the optimizer steps, or to the others."""
        sizes = num_bytes.tolist()
        moments = [moment for moment in self._moments[stage] if moment.is_stepping == is_stepping]
        nodes = [v for v in self._assignment.nodes(stage) if sizes[v]]
        if not nodes or not moments:
            return
        scale = max(sizes[v] for v in nodes)
        name = f"{'stepped' if is_stepping else 'workspace'}_{stage}"
        largest = self._assignment.program.continuous(name, high=1.0)
        for moment in moments:
            moment.row.add(largest, scale)
        for node in nodes:
            row = Row()
            self._assignment.add_x(row, node, stage, sizes[node] / scale)
            row.add(largest, -1.0)
            self._assignment.require(row)

    def _saved(self, stage: int) -> None:
        """Adds the saved bytes of every microbatch in flight, or, where the stage may recompute, of the one
        that is worked on."""
        for moment in self._moments[stage]:
            times = moment.at_work if self._instance.recompute else moment.in_flight
            for node in self._assignment.nodes(stage):
                num_bytes = float(self._instance.saved_bytes[node])
                self._assignment.add_x(moment.row, node, stage, times * num_bytes)


def _moments(instance: Instance, stage: int, windows: Windows) -> list[_Moment]:
    """Returns the moments to check; an empty list where all that may be on the stage fits together."""
    possible = windows.on(stage)
    held = sum(net.held_bytes for net in instance.nets)
    in_flight = int(instance.in_flight[stage])
    most = (
        float(instance.static_bytes[stage][possible].sum())
        + sum(float(shared.num_bytes[stage]) for shared in instance.shared)
        + in_flight * (float(instance.saved_bytes[possible].sum()) + held)
        + float(np.maximum(instance.workspace_bytes, instance.stepped_bytes)[possible].max(initial=0.0))
    )
    if most <= float(instance.limit_bytes[stage]):
        return []
    at_work = instance.workspace_bytes[possible]
    if instance.gradients_wait[stage]:
        later = 0 if instance.updates_each[stage] else 1
        moments = [
            _Moment(in_flight, 1, has_gradients=False),
            _Moment(in_flight - 1, later, has_gradients=True),
        ]
    else:
        moments = [_Moment(in_flight, 1, has_gradients=True)]
        at_work = at_work + instance.saved_bytes[possible]  # of the microbatch that is finished by the step
    if (instance.stepped_bytes[possible] > at_work).any():
        left = 0 if instance.flushes[stage] else in_flight - 1
        moments.append(_Moment(left, 0, has_gradients=True, is_stepping=True))
    return moments
