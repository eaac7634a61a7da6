"""The integer program: is there an assignment in which every stage takes at most T?

The binaries of `assignment.py` say the stage of every node, and the rows of `memory_rows.py` what a stage
holds. This module adds the time of a stage. Its variables are continuous and follow from the binaries:

- a tensor that cannot reach further than the next stage costs c at both sides of the boundary it crosses;
- one that can jump a stage has a variable for each stage (or pair of stages) that it may touch;
- recomputing is one binary a stage, with one large constant for its time and one for its memory.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from pd2bw_fx.passes.partition.instance import Floats, Instance, Integers, evaluate
from pd2bw_fx.passes.solver import IntegerProgram, Status

from .assignment import Assignment, Row, Windows
from .memory_rows import MemoryRows

_ROW_S = 8e-5  # to write a row down
_FEW_ROWS = 50_000  # are written down however little time there is


def takes_too_long(instance: Instance, windows: Windows, left_s: float) -> bool:
    """Returns whether the program would take more than half of this time to write down."""
    widths = windows.last - windows.first + 1
    nets = [list(net.members) for net in instance.nets]
    spans = np.array([int(windows.last[at].max() - windows.first[at].min()) for at in nets], dtype=np.int64)
    pairs = spans * (spans + 1) // 2 if instance.per_destination else 2 * spans
    num_rows = int(widths.sum() + pairs.sum())
    return num_rows > _FEW_ROWS and num_rows * _ROW_S > left_s / 2


class FeasibilityProgram:
    """The program for one instance, one target, and the windows that hold for that target.

    Times are divided by the target and bytes by the limit, so that the solver's tolerances are relative.
    With an infinite `target_s` it asks about the memory alone. With `soft_memory` the memory rows may be
    exceeded, and the objective is the largest excess, as a share of the limit. With `to_the_byte` the memory
    rows are multiplied, and the solver's tolerance divided, so that a byte is far more than the tolerance.
    """

    def __init__(
        self,
        instance: Instance,
        target_s: float,
        windows: Windows,
        *,
        soft_memory: bool = False,
        to_the_byte: bool = False,
    ) -> None:
        self.instance = instance
        self.target_s = target_s
        self.program = IntegerProgram("stages")
        self.assignment = Assignment(self.program, instance, windows)
        self._memory = MemoryRows(self.assignment, instance)
        self._work = [Row() for _ in range(instance.num_stages)]
        self._links = [Row() for _ in range(instance.num_stages)]
        self._to_the_byte = to_the_byte
        self._excess = self.program.continuous("excess") if soft_memory else None
        for stage in range(instance.num_stages):
            self._add_work(stage)
            if instance.recompute == "auto":
                self._recompute_chosen(stage)
        for index in range(len(instance.nets)):
            self._net(index)
        self._limits()

    def solve(
        self,
        *,
        solver: str,
        time_limit_s: float | None,
        refuting: bool = False,
        on_wait: Callable[[], None] | None = None,
    ) -> tuple[Status, Integers | None]:
        """The solver's status, and the stage of every node where it found an assignment."""
        if self.assignment.contradicts_itself:
            return Status.INFEASIBLE, None
        if self.assignment.is_settled and self._excess is None and not self.instance.hands_on:
            return self._only_choice()
        outcome = self.program.solve(
            solver=solver,
            time_limit_s=time_limit_s,
            refuting=refuting,
            exactly=self._to_the_byte,
            on_wait=on_wait,
        )
        return outcome.status, self.assignment.stage_of(outcome) if outcome.has_solution else None

    def exclude(self, stage_of: Integers) -> None:
        """Excludes this one assignment."""
        self.assignment.exclude(stage_of)

    def _only_choice(self) -> tuple[Status, Integers | None]:
        """Evaluates the one assignment that the windows leave; no solver is needed."""
        only = self.assignment.windows.last
        loads = evaluate(self.instance, only)
        if loads.fits and loads.bottleneck_s <= self.target_s:
            return Status.OPTIMAL, only.copy()
        return Status.INFEASIBLE, None

    def _add_work(self, stage: int) -> None:
        work_s = self.instance.work_s[stage]
        if self.instance.recompute is True:
            work_s = work_s + self.instance.again_s[stage]
        for node in self.assignment.nodes(stage):
            self.assignment.add_x(self._work[stage], node, stage, float(work_s[node]))

    def _recompute_chosen(self, stage: int) -> None:
        """Adds a binary that chooses between one more forward and the saved bytes of all microbatches."""
        instance = self.instance
        nodes = self.assignment.nodes(stage)
        saved = self._most(instance.saved_bytes, stage, nodes)
        if not self._memory.binds(stage) or instance.in_flight[stage] == 1 or saved == 0:
            return
        forward_s = self._most(instance.again_s[stage], stage, nodes)
        chosen = self.program.binary(f"recompute_{stage}")
        again = self.program.continuous(f"again_{stage}")
        kept = self.program.continuous(f"kept_{stage}")
        scale_s = max(forward_s, 1e-30)
        time, memory = Row(), Row()
        for node in nodes:
            self.assignment.add_x(time, node, stage, float(instance.again_s[stage, node]) / scale_s)
            self.assignment.add_x(memory, node, stage, float(instance.saved_bytes[node]) / saved)
        time.add(again, -1.0)
        time.add(chosen, 1.0)
        self.assignment.require(time, 1.0)
        memory.add(kept, -1.0)
        memory.add(chosen, -1.0)
        self.assignment.require(memory)
        self._work[stage].add(again, forward_s)
        self._memory.keep(stage, kept, saved)

    def _most(self, amount: Floats, stage: int, nodes: list[int]) -> float:
        """Returns a bound on the sum of `amount` over any nodes that this stage has time for.

        It takes the nodes with the largest amount for their time first, as a knapsack's relaxation does.
        """
        amounts, work_s = amount[nodes], self.instance.work_s[stage, nodes]
        if not np.isfinite(self.target_s):
            return float(amounts.sum())
        timeless = work_s <= 0
        order = np.argsort(-amounts[~timeless] / work_s[~timeless], kind="stable")
        amounts_s, works_s = amounts[~timeless][order], work_s[~timeless][order]
        started_s = works_s.cumsum() - works_s
        shares = np.clip((self.target_s * (1 + 1e-9) - started_s) / works_s, 0.0, 1.0)
        return float(amounts[timeless].sum() + (shares * amounts_s).sum())

    def _net(self, index: int) -> None:
        net, windows = self.instance.nets[index], self.assignment.windows
        low = int(min(windows.first[v] for v in net.members))
        high = int(max(windows.last[v] for v in net.members))
        if low == high:
            return
        if high - low == 1:
            self._adjacent_net(index, low, high)
        elif self.instance.per_destination:
            self._direct_net(index, low, high)
        else:
            self._hub_net(index, low, high)

    def _adjacent_net(self, index: int, low: int, high: int) -> None:
        net, costs = self.instance.nets[index], self.instance.cost_s[index]
        cross = self.program.continuous(f"cross_{index}_{low}", high=1.0)
        self.assignment.apart(net.producer, net.consumers, low, cross)
        for stage, other in ((low, high), (high, low)):
            self._links[stage].add(cross, float(costs[stage, other]))
            self._memory.hold(stage, cross, net.held_bytes)

    def _hub_net(self, index: int, low: int, high: int) -> None:
        """Adds a net that each stage with some of its members, but not all, pays for once."""
        net, costs = self.instance.nets[index], self.instance.cost_s[index]
        for stage in range(low, high + 1):
            other = stage - 1 if stage > low else stage + 1
            split = self.program.continuous(f"split_{index}_{stage}", high=1.0)
            for consumer in net.consumers:
                self.assignment.on_one_only(net.producer, consumer, stage, split)
                self.assignment.on_one_only(consumer, net.producer, stage, split)
            self._links[stage].add(split, float(costs[stage, other]))
            self._memory.hold(stage, split, net.held_bytes)

    def _direct_net(self, index: int, low: int, high: int) -> None:
        """Adds a variable for each pair of stages that the tensor may travel between, at the cost of both.

        With `hands_on` any stage that the tensor has come to may send it, and always the whole of it.
        """
        net, costs = self.instance.nets[index], self.instance.cost_s[index]
        hands_on = self.instance.hands_on
        arrived: dict[int, Row] = {}
        for target in range(low + 1, high + 1):
            readers = [v for v in net.consumers if target in self.assignment.stages(v)]
            sources = [s for s in self.assignment.stages(net.producer) if s < target]
            if hands_on:
                sources = sorted({*sources, *arrived})
            if not (readers or (hands_on and target < high)) or not sources:
                continue
            arrives = arrived[target] = Row()
            for source in sources:
                name = f"sent_{index}_{source}_{target}"
                sent = self.program.binary(name) if hands_on else self.program.continuous(name, high=1.0)
                arrives.add(sent, -1.0)
                row = Row()
                row.add(sent, 1.0)
                self.assignment.add_x(row, net.producer, source, -1.0)
                if hands_on and source in arrived:
                    row.add_row(arrived[source], 1.0)
                self.assignment.require(row)
                self._links[source].add(sent, float(costs[source, target]))
                self._links[target].add(sent, float(costs[target, source]))
                self._memory.hold(target, sent, net.held_bytes)
            for reader in readers:
                row = Row()
                row.terms.update(arrives.terms)
                self.assignment.add_x(row, reader, target, 1.0)
                self.assignment.add_x(row, net.producer, target, -1.0)
                self.assignment.require(row)
        if net.held_bytes:
            self._held_by_producer(index)

    def _held_by_producer(self, index: int) -> None:
        net = self.instance.nets[index]
        for stage in self.assignment.stages(net.producer):
            if not self._memory.binds(stage):
                continue
            held = self.program.continuous(f"held_{index}_{stage}", high=1.0)
            self._memory.hold(stage, held, net.held_bytes)
            for consumer in net.consumers:
                self.assignment.on_one_only(net.producer, consumer, stage, held)

    def _limits(self) -> None:
        if np.isfinite(self.target_s):
            for stage in range(self.instance.num_stages):
                self._limit_time(stage)
        self._memory.limit(self._excess, to_the_byte=self._to_the_byte)
        if self._excess is not None:
            self.program.minimise([(self._excess, 1.0)])

    def _limit_time(self, stage: int) -> None:
        work, links = self._work[stage], self._links[stage]
        for group in [[work], [links]] if self.instance.overlap else [[work, links]]:
            row = Row()
            for part in group:
                row.add_row(part, 1.0 / self.target_s)
            besides_s = float(self.instance.besides_s[stage]) if work in group else 0.0
            self.assignment.require(row, 1.0 - besides_s / self.target_s)
