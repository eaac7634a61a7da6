"""The integer program: is there an assignment whose every stage takes at most T?

Cumulative variables y[v, s] = [stage of v <= s] make the order of stages cost nothing: y grows with s and
falls along edges. Everything else is continuous and follows from y:

- a tensor that cannot reach further than the next stage costs c at both sides of the boundary it crosses;
- one that can jump a stage has a variable for each stage (or pair of stages) that it may touch;
- recomputing is one binary a stage, with one large constant for its time and one for its memory.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from pd2bw_fx.passes.solver import IntegerProgram, Outcome, Status, Variable

from .instance import Floats, Instance, Integers, evaluate


@dataclass(frozen=True, slots=True, eq=False)
class Windows:
    """The stages that are possible for each node: first[v] <= stage of v <= last[v]."""

    first: Integers
    last: Integers


class _Row:
    """A linear expression under construction: terms by variable, and a constant."""

    def __init__(self) -> None:
        self.terms: dict[Variable, float] = {}
        self.constant = 0.0

    def add(self, variable: Variable | float, coefficient: float) -> None:
        if isinstance(variable, int | float):
            self.constant += coefficient * variable
        else:
            self.terms[variable] = self.terms.get(variable, 0.0) + coefficient

    def items(self) -> list[tuple[Variable, float]]:
        return [(variable, value) for variable, value in self.terms.items() if value != 0.0]


class FeasibilityProgram:
    """Built for one instance, one target and the windows that hold for that target.

    Times are divided by the target and bytes by the limit, so that the solver's tolerances are relative.
    With `target_s` infinite only the memory is asked about. With `soft_memory` the memory rows may be
    exceeded and the largest share by which one is becomes the objective.
    """

    def __init__(
        self, instance: Instance, target_s: float, windows: Windows, *, soft_memory: bool = False
    ) -> None:
        self.instance = instance
        self.target_s = target_s
        self.windows = windows
        self.program = IntegerProgram("stages")
        k = instance.num_stages
        self._contradicts_itself = False
        self._early: dict[tuple[int, int], Variable] = {}
        self._work = [_Row() for _ in range(k)]
        self._links = [_Row() for _ in range(k)]
        self._memory = [_Row() for _ in range(k)]
        self._excess = self.program.continuous("excess") if soft_memory else None
        self._memory_binds = self._stages_where_memory_can_bind()
        self._nodes()
        for index in range(len(instance.nets)):
            self._net(index)
        self._shared()
        self._recompute()
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
        if self._contradicts_itself:
            return Status.INFEASIBLE, None
        if not self._early and self._excess is None:
            return self._only_choice()
        outcome = self.program.solve(
            solver=solver, time_limit_s=time_limit_s, refuting=refuting, on_wait=on_wait
        )
        return outcome.status, self._assignment(outcome) if outcome.has_solution else None

    def _only_choice(self) -> tuple[Status, Integers | None]:
        """Every node's stage is settled: no solver is needed to add it up."""
        loads = evaluate(self.instance, self.windows.last)
        if loads.fits and loads.bottleneck_s <= self.target_s:
            return Status.OPTIMAL, self.windows.last.copy()
        return Status.INFEASIBLE, None

    def exclude(self, stage_of: Integers) -> None:
        """Allow every assignment but this one."""
        if not self._early:
            self._contradicts_itself = True
            return
        row = _Row()
        for (node, stage), variable in self._early.items():
            early = bool(stage_of[node] <= stage)
            row.add(variable, 1.0 if early else -1.0)
            row.constant -= float(early)
        self.program.at_most(row.items(), -1.0 - row.constant)

    def _assignment(self, outcome: Outcome) -> Integers:
        stage_of = self.windows.last.copy()
        for (node, stage), variable in self._early.items():
            if outcome.values.get(variable.name, 0.0) > 0.5:
                stage_of[node] = min(stage_of[node], stage)
        return stage_of

    def _y(self, node: int, stage: int) -> Variable | float:
        if stage < self.windows.first[node]:
            return 0.0
        if stage >= self.windows.last[node]:
            return 1.0
        return self._early[node, stage]

    def _add_x(self, row: _Row, node: int, stage: int, coefficient: float) -> None:
        """Add coefficient * [stage of node = stage]."""
        row.add(self._y(node, stage), coefficient)
        row.add(self._y(node, stage - 1), -coefficient)

    def _require(self, row: _Row, at_most: float = 0.0) -> None:
        terms = row.items()
        if terms:
            self.program.at_most(terms, at_most - row.constant)
        elif row.constant > at_most + 1e-9:
            self._contradicts_itself = True

    def _stages(self, node: int) -> range:
        return range(int(self.windows.first[node]), int(self.windows.last[node]) + 1)

    def _nodes(self) -> None:
        instance = self.instance
        for node in range(instance.num_nodes):
            stages = self._stages(node)
            for stage in stages[:-1]:
                self._early[node, stage] = self.program.binary(f"y_{node}_{stage}")
            for stage in stages[1:-1]:
                self._at_most_difference(node, stage - 1, node, stage)
            for stage in stages:
                self._add_x(self._work[stage], node, stage, float(instance.work_s[stage, node]))
                if self._memory_binds[stage]:
                    self._add_x(self._memory[stage], node, stage, float(instance.static_bytes[node]))
        self._never()
        for u, v in instance.edges:
            for stage in range(int(self.windows.first[v]), int(self.windows.last[u])):
                self._at_most_difference(v, stage, u, stage)
        if not instance.may_be_empty:
            self._nothing_empty()

    def _never(self) -> None:
        forbidden = self.instance.forbidden
        if forbidden is None:
            return
        for stage, node in np.argwhere(forbidden).tolist():
            row = _Row()
            self._add_x(row, node, stage, 1.0)
            self._require(row)

    def _at_most_difference(self, small: int, small_stage: int, large: int, large_stage: int) -> None:
        row = _Row()
        row.add(self._y(small, small_stage), 1.0)
        row.add(self._y(large, large_stage), -1.0)
        self._require(row)

    def _nothing_empty(self) -> None:
        for stage in range(self.instance.num_stages):
            row = _Row()
            for node in range(self.instance.num_nodes):
                self._add_x(row, node, stage, -1.0)
            self._require(row, -1.0)

    def _net(self, index: int) -> None:
        net = self.instance.nets[index]
        low = int(min(self.windows.first[v] for v in net.members))
        high = int(max(self.windows.last[v] for v in net.members))
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
        self._apart(net.producer, net.consumers, low, cross)
        for stage, other in ((low, high), (high, low)):
            self._links[stage].add(cross, float(costs[stage, other]))
            self._hold(stage, cross, net.held_bytes)

    def _apart(self, producer: int, consumers: tuple[int, ...], stage: int, cross: Variable) -> None:
        """cross >= |y[producer] - y[consumer]| at this boundary, for each consumer."""
        for consumer in consumers:
            for one, other in ((producer, consumer), (consumer, producer)):
                row = _Row()
                row.add(self._y(one, stage), 1.0)
                row.add(self._y(other, stage), -1.0)
                row.add(cross, -1.0)
                self._require(row)

    def _hub_net(self, index: int, low: int, high: int) -> None:
        """Each stage that has some members but not all pays once."""
        net, costs = self.instance.nets[index], self.instance.cost_s[index]
        for stage in range(low, high + 1):
            other = stage - 1 if stage > low else stage + 1
            split = self.program.continuous(f"split_{index}_{stage}", high=1.0)
            for consumer in net.consumers:
                for sign in (1.0, -1.0):
                    row = _Row()
                    self._add_x(row, net.producer, stage, sign)
                    self._add_x(row, consumer, stage, -sign)
                    row.add(split, -1.0)
                    self._require(row)
            self._links[stage].add(split, float(costs[stage, other]))
            self._hold(stage, split, net.held_bytes)

    def _direct_net(self, index: int, low: int, high: int) -> None:
        """A variable for each pair of stages that the tensor may travel between; both ends pay."""
        net, costs = self.instance.nets[index], self.instance.cost_s[index]
        for target in range(low + 1, high + 1):
            readers = [v for v in net.consumers if self.windows.first[v] <= target <= self.windows.last[v]]
            sources = [s for s in self._stages(net.producer) if s < target]
            if not readers or not sources:
                continue
            arrives = _Row()
            for source in sources:
                sent = self.program.continuous(f"sent_{index}_{source}_{target}", high=1.0)
                arrives.add(sent, -1.0)
                row = _Row()
                row.add(sent, 1.0)
                self._add_x(row, net.producer, source, -1.0)
                self._require(row)
                self._links[source].add(sent, float(costs[source, target]))
                self._links[target].add(sent, float(costs[target, source]))
                self._hold(target, sent, net.held_bytes)
            for reader in readers:
                row = _Row()
                row.terms.update(arrives.terms)
                self._add_x(row, reader, target, 1.0)
                self._add_x(row, net.producer, target, -1.0)
                self._require(row)
        if net.held_bytes:
            self._held_by_producer(index)

    def _held_by_producer(self, index: int) -> None:
        net = self.instance.nets[index]
        for stage in self._stages(net.producer):
            if not self._memory_binds[stage]:
                continue
            held = self.program.continuous(f"held_{index}_{stage}", high=1.0)
            self._hold(stage, held, net.held_bytes)
            for consumer in net.consumers:
                row = _Row()
                self._add_x(row, net.producer, stage, 1.0)
                self._add_x(row, consumer, stage, -1.0)
                row.add(held, -1.0)
                self._require(row)

    def _hold(self, stage: int, variable: Variable, num_bytes: int) -> None:
        if num_bytes and self._memory_binds[stage]:
            self._memory[stage].add(variable, float(num_bytes) * float(self.instance.in_flight[stage]))

    def _shared(self) -> None:
        for index, shared in enumerate(self.instance.shared):
            for stage in range(self.instance.num_stages):
                if not self._memory_binds[stage]:
                    continue
                holds = self.program.continuous(f"shared_{index}_{stage}", high=1.0)
                self._memory[stage].add(holds, float(shared.num_bytes))
                for node in shared.nodes:
                    row = _Row()
                    self._add_x(row, node, stage, 1.0)
                    row.add(holds, -1.0)
                    self._require(row)

    def _recompute(self) -> None:
        for stage in range(self.instance.num_stages):
            self._workspace(stage)
            if self.instance.recompute != "auto":
                self._recompute_fixed(stage)
            else:
                self._recompute_chosen(stage)

    def _workspace(self, stage: int) -> None:
        instance = self.instance
        nodes = [
            v for v in range(instance.num_nodes) if instance.workspace_bytes[v] and stage in self._stages(v)
        ]
        if not nodes or not self._memory_binds[stage]:
            return
        scale = float(max(instance.workspace_bytes[v] for v in nodes))
        workspace = self.program.continuous(f"workspace_{stage}", high=1.0)
        self._memory[stage].add(workspace, scale)
        for node in nodes:
            row = _Row()
            self._add_x(row, node, stage, float(instance.workspace_bytes[node]) / scale)
            row.add(workspace, -1.0)
            self._require(row)

    def _recompute_fixed(self, stage: int) -> None:
        instance = self.instance
        times = 1.0 if instance.recompute else float(instance.in_flight[stage])
        for node in range(instance.num_nodes):
            if instance.recompute:
                self._add_x(self._work[stage], node, stage, float(instance.again_s[stage, node]))
            if self._memory_binds[stage]:
                self._add_x(self._memory[stage], node, stage, times * float(instance.saved_bytes[node]))

    def _recompute_chosen(self, stage: int) -> None:
        """One more forward, or in_flight times the saved bytes: a binary says which."""
        instance = self.instance
        if not self._memory_binds[stage]:
            return
        nodes = [v for v in range(instance.num_nodes) if stage in self._stages(v)]
        forward_s = self._most(instance.again_s[stage], stage, nodes)
        saved = self._most(instance.saved_bytes, stage, nodes)
        for node in nodes:
            self._add_x(self._memory[stage], node, stage, float(instance.saved_bytes[node]))
        more = float(instance.in_flight[stage] - 1)
        if more == 0 or saved == 0:
            return
        chosen = self.program.binary(f"recompute_{stage}")
        again = self.program.continuous(f"again_{stage}")
        kept = self.program.continuous(f"kept_{stage}")
        scale_s, scale = max(forward_s, 1e-30), saved * more
        time, memory = _Row(), _Row()
        for node in nodes:
            self._add_x(time, node, stage, float(instance.again_s[stage, node]) / scale_s)
            self._add_x(memory, node, stage, more * float(instance.saved_bytes[node]) / scale)
        time.add(again, -1.0)
        time.add(chosen, 1.0)
        self._require(time, 1.0)
        memory.add(kept, -1.0)
        memory.add(chosen, -1.0)
        self._require(memory)
        self._work[stage].add(again, forward_s)
        self._memory[stage].add(kept, scale)

    def _most(self, amount: Floats, stage: int, nodes: list[int]) -> float:
        """A bound on the sum over any of `nodes` that this stage has time for: the densest of them first."""
        amounts, work_s = amount[nodes], self.instance.work_s[stage, nodes]
        if not np.isfinite(self.target_s):
            return float(amounts.sum())
        timeless = work_s <= 0
        order = np.argsort(-amounts[~timeless] / work_s[~timeless], kind="stable")
        amounts_s, works_s = amounts[~timeless][order], work_s[~timeless][order]
        started_s = works_s.cumsum() - works_s
        shares = np.clip((self.target_s * (1 + 1e-9) - started_s) / works_s, 0.0, 1.0)
        return float(amounts[timeless].sum() + (shares * amounts_s).sum())

    def _limits(self) -> None:
        instance = self.instance
        for stage in range(instance.num_stages):
            if np.isfinite(self.target_s):
                self._limit_time(stage)
            if self._memory_binds[stage]:
                limit = float(instance.limit_bytes[stage])
                row = _Row()
                for variable, value in self._memory[stage].items():
                    row.add(variable, value / limit)
                row.constant = self._memory[stage].constant / limit
                if self._excess is not None:
                    row.add(self._excess, -1.0)
                self._require(row, 1.0)
        if self._excess is not None:
            self.program.minimise([(self._excess, 1.0)])

    def _limit_time(self, stage: int) -> None:
        parts = [self._work[stage], self._links[stage]]
        groups = [[part] for part in parts] if self.instance.overlap else [parts]
        for group in groups:
            row = _Row()
            for part in group:
                for variable, value in part.items():
                    row.add(variable, value / self.target_s)
                row.constant += part.constant / self.target_s
            self._require(row, 1.0)

    def _stages_where_memory_can_bind(self) -> list[bool]:
        """Only where everything that may land on a stage exceeds its limit is a row needed."""
        instance = self.instance
        held = sum(net.held_bytes for net in instance.nets)
        shared = sum(shared.num_bytes for shared in instance.shared)
        binds = []
        for stage in range(instance.num_stages):
            possible = (self.windows.first <= stage) & (stage <= self.windows.last)
            in_flight = float(instance.in_flight[stage])
            most = (
                float(instance.static_bytes[possible].sum())
                + shared
                + in_flight * (float(instance.saved_bytes[possible].sum()) + held)
                + float(instance.workspace_bytes[possible].max(initial=0.0))
            )
            binds.append(most > float(instance.limit_bytes[stage]))
        return binds
