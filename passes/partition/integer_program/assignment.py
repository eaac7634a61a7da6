"""The stage of every node as variables of an integer program: y[v, s] = [stage of v <= s], binary.

With cumulative variables the order of stages needs no further ones: y grows with s and falls along edges.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from pd2bw_fx.passes.partition.instance import Flags, Instance, Integers
from pd2bw_fx.passes.solver import IntegerProgram, Outcome, Variable


@dataclass(frozen=True, slots=True, eq=False)
class Windows:
    """The stages that are possible for each node: first[v] <= stage of v <= last[v]."""

    first: Integers
    last: Integers

    def on(self, stage: int) -> Flags:
        """Returns which nodes can be on this stage."""
        possible: Flags = (self.first <= stage) & (stage <= self.last)
        return possible


class Row:
    """A linear expression under construction: terms by variable, and a constant."""

    def __init__(self) -> None:
        self.terms: dict[Variable, float] = {}
        self.constant = 0.0

    def add(self, variable: Variable | float, coefficient: float) -> None:
        if isinstance(variable, int | float):
            self.constant += coefficient * variable
        else:
            self.terms[variable] = self.terms.get(variable, 0.0) + coefficient

    def add_row(self, other: Row, factor: float) -> None:
        for variable, value in other.terms.items():
            self.add(variable, value * factor)
        self.constant += other.constant * factor

    def items(self) -> list[tuple[Variable, float]]:
        return [(variable, value) for variable, value in self.terms.items() if value != 0.0]


class Assignment:
    """The variables of an instance within windows, and the rows that make every solution an assignment."""

    def __init__(self, program: IntegerProgram, instance: Instance, windows: Windows) -> None:
        self.program = program
        self.windows = windows
        self.contradicts_itself = False
        self._early: dict[tuple[int, int], Variable] = {}
        for node in range(instance.num_nodes):
            stages = self.stages(node)
            for stage in stages[:-1]:
                self._early[node, stage] = program.binary(f"y_{node}_{stage}")
            for stage in stages[1:-1]:
                self._no_more(node, stage - 1, node, stage)
        self._never(instance)
        for u, v in instance.edges:
            for stage in range(int(windows.first[v]), int(windows.last[u])):
                self._no_more(v, stage, u, stage)
        if not instance.may_be_empty:
            self._nothing_empty(instance)

    @property
    def is_settled(self) -> bool:
        """Whether every node has a single stage that it can be on."""
        return not self._early

    def stages(self, node: int) -> range:
        return range(int(self.windows.first[node]), int(self.windows.last[node]) + 1)

    def nodes(self, stage: int) -> list[int]:
        """Returns the nodes that can be on this stage."""
        possible: list[int] = np.flatnonzero(self.windows.on(stage)).tolist()
        return possible

    def y(self, node: int, stage: int) -> Variable | float:
        if stage < self.windows.first[node]:
            return 0.0
        if stage >= self.windows.last[node]:
            return 1.0
        return self._early[node, stage]

    def add_x(self, row: Row, node: int, stage: int, coefficient: float) -> None:
        """Adds coefficient * [stage of node = stage]."""
        row.add(self.y(node, stage), coefficient)
        row.add(self.y(node, stage - 1), -coefficient)

    def require(self, row: Row, at_most: float = 0.0) -> None:
        terms = row.items()
        if terms:
            self.program.at_most(terms, at_most - row.constant)
        elif row.constant > at_most + 1e-9:
            self.contradicts_itself = True

    def apart(self, one: int, others: Iterable[int], stage: int, cross: Variable) -> None:
        """Requires cross >= |y[one] - y[other]| at this boundary, for each of the others."""
        for other in others:
            self._no_more(one, stage, other, stage, cross)
            self._no_more(other, stage, one, stage, cross)

    def on_one_only(self, here: int, there: int, stage: int, variable: Variable) -> None:
        """Requires variable >= [stage of here = stage] - [stage of there = stage]."""
        if not self.windows.first[here] <= stage <= self.windows.last[here]:
            return
        row = Row()
        self.add_x(row, here, stage, 1.0)
        self.add_x(row, there, stage, -1.0)
        row.add(variable, -1.0)
        self.require(row)

    def exclude(self, stage_of: Integers) -> None:
        """Excludes this one assignment."""
        if self.is_settled:
            self.contradicts_itself = True
            return
        row = Row()
        for (node, stage), variable in self._early.items():
            early = bool(stage_of[node] <= stage)
            row.add(variable, 1.0 if early else -1.0)
            row.constant -= float(early)
        self.program.at_most(row.items(), -1.0 - row.constant)

    def stage_of(self, outcome: Outcome) -> Integers:
        """Returns the stage of every node in the solver's solution."""
        stage_of = self.windows.last.copy()
        for (node, stage), variable in self._early.items():
            if outcome.values.get(variable.name, 0.0) > 0.5:
                stage_of[node] = min(stage_of[node], stage)
        return stage_of

    def _never(self, instance: Instance) -> None:
        if instance.forbidden is None:
            return
        for stage, node in np.argwhere(instance.forbidden).tolist():
            row = Row()
            self.add_x(row, node, stage, 1.0)
            self.require(row)

    def _no_more(
        self, small: int, small_stage: int, large: int, large_stage: int, but: Variable | None = None
    ) -> None:
        """Requires y[small] <= y[large] (+ but), with no row where the windows imply it."""
        less, more = self.y(small, small_stage), self.y(large, large_stage)
        if (isinstance(less, float) and less == 0.0) or (isinstance(more, float) and more == 1.0):
            return
        row = Row()
        row.add(less, 1.0)
        row.add(more, -1.0)
        if but is not None:
            row.add(but, -1.0)
        self.require(row)

    def _nothing_empty(self, instance: Instance) -> None:
        for stage in range(instance.num_stages):
            row = Row()
            for node in self.nodes(stage):
                self.add_x(row, node, stage, -1.0)
            self.require(row, -1.0)
