"""The step of the search that asks how far stages get within their memory (`bounds/frontiers.py`).

Where memory binds it tells in milliseconds that nothing fits, or that no plan is faster than a target, which
takes programs of thousands of operators longer than there is time.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace

import numpy as np

from pd2bw_fx.passes.partition.bounds.downsets import OutOfTime
from pd2bw_fx.passes.partition.bounds.frontiers import Frontiers, memory_binds
from pd2bw_fx.passes.partition.choices import FEW_CHOICES, Answer, Deadline
from pd2bw_fx.passes.partition.instance import Instance, evaluate, respects_edges
from pd2bw_fx.passes.solver import Status

from .search_state import SearchState

_SHARE = 0.1  # of the time left, for what fits, and again for a bound
_TIGHTER = 8  # times that limits are made tighter, for an assignment that also has room for all else
_NEARLY = 1e-3  # of the incumbent: a bisection of the target ends where so much is open


class ByFrontiers:
    """Raises the bound of a search before a deadline, and finds an assignment or that there is none."""

    def __init__(self, state: SearchState, within: Deadline) -> None:
        self._state = state
        self._within = self._deadline = within
        self._frontiers: Frontiers | None = None
        self._are_listed = self._is_settled = False

    def __call__(self, gap: float) -> None:
        self.settle()
        self._deadline = Deadline(self._within.left_s * _SHARE, within=self._within)
        with suppress(OutOfTime):  # what was found and proven until then is in the state
            self._bisect(gap)

    def settle(self) -> None:
        """Refutes every target on choices where nothing fits, and looks for an assignment on the others,
        unless there is one."""
        if self._is_settled or np.isfinite(self._state.bottleneck_s):
            return
        self._is_settled = True
        self._deadline = Deadline(self._within.left_s * _SHARE, within=self._within)
        with suppress(OutOfTime):
            self._ask_what_fits()

    def _ask_what_fits(self) -> None:
        choices = self._state.choices
        for choice in choices.different_in_memory():
            instance = choices[choice]
            frontiers = self._listed(instance) if memory_binds(instance) else None
            if frontiers is None:
                continue
            if frontiers.chain(instance, np.inf, self._deadline) is None:
                self._state.refuted_s[choices.that_fit_as(choice)] = np.inf
            else:
                self._look(frontiers, choice, np.inf)

    def _bisect(self, gap: float) -> None:
        """Finds the largest target that is refuted. It asks for the least improvement first."""
        state = self._state
        if not np.isfinite(state.bottleneck_s) or len(state.choices) > FEW_CHOICES or state.is_proven(gap):
            return
        if not all(memory_binds(state.choices[choice]) for choice in range(len(state.choices))):
            return
        low_s, high_s = state.bound_s(), float(state.bottleneck_s)
        target_s = high_s * (1.0 - gap)
        while high_s - low_s > max(gap, _NEARLY) * state.bottleneck_s:
            if self._is_refuted(target_s):
                low_s = target_s
                state.tell()
            else:
                high_s = target_s
            target_s = (low_s + high_s) / 2
        if high_s < state.bottleneck_s and self._frontiers is not None:
            self._look(self._frontiers, max(state.choice, 0), high_s)  # -1: nothing is known yet

    def _is_refuted(self, target_s: float) -> bool:
        state = self._state
        for choice in np.flatnonzero(state.refuted_s < target_s).tolist():
            instance = state.choices[choice]
            frontiers = self._listed(instance)
            if frontiers is None or frontiers.chain(instance, target_s, self._deadline) is not None:
                return False
            state.refuted_s[choice] = target_s
        return True

    def _look(self, frontiers: Frontiers, choice: int, target_s: float) -> None:
        """Offers assignments at a target that is not refuted. Where a stage needs more memory than the
        frontiers count, its limit is made tighter by as much, until one fits."""
        instance = self._state.choices[choice]
        limits = instance.limit_bytes.copy()
        for _ in range(_TIGHTER):
            tighter = replace(instance, limit_bytes=limits)
            stage_of = frontiers.chain(tighter, target_s, self._deadline)
            if stage_of is None:
                return
            if respects_edges(instance, stage_of):
                self._state.offer(Answer(Status.FEASIBLE, choice, stage_of))
            over = evaluate(instance, stage_of).memory_bytes - instance.limit_bytes
            if not (over > 0).any():
                return
            limits -= np.maximum(over, 0.0)

    def _listed(self, instance: Instance) -> Frontiers | None:
        if not self._are_listed:
            self._frontiers = Frontiers.of(instance.num_nodes, instance.edges, self._deadline)
            self._are_listed = True
        return self._frontiers
