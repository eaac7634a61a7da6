"""The step of the search that lists the cuts near a target (`bounds/near_cuts.py`), from both sides.

For a better plan it lists the cuts near those of the incumbent, and takes the best chain of them: all stages
change at once. If that brings nothing, it lists cuts farther off.

For a bound it asks at targets between the bound and the incumbent. A target near the bound leaves few cuts,
which are listed completely. Then either a chain of them is a better plan, or the target is a bound. Where a
target leaves too many, it branches: a node is before one of the cuts, or it is not. Either half costs more,
and has fewer cuts. A target that takes too many branches is asked again when more are allowed.
"""

from __future__ import annotations

from contextlib import suppress

import numpy as np

from pd2bw_fx.passes.partition.bounds.cut_graph import CutGraph
from pd2bw_fx.passes.partition.bounds.downsets import DeviceKind, DownSets, OutOfTime
from pd2bw_fx.passes.partition.bounds.near_cuts import NearCuts, applies_to
from pd2bw_fx.passes.partition.choices import Answer
from pd2bw_fx.passes.partition.instance import within_reach
from pd2bw_fx.passes.solver import Status

from .search_state import SearchState

_RADII = (0.1, 0.2, 0.4, 0.8)  # of the incumbent's slowest stage
_GAINS = (0.01, 0.001)  # of the incumbent: what is asked for first
_FEW_NEAR = 1500  # cuts of one place near the incumbent, at first
_FEW = 4000  # cuts of one place that are listed for a bound
_FEWER = 0.5  # of the open nodes of cuts that were too many: listing is tried again
_BRANCHES = 32  # for a bound, when nothing more becomes known without branches
_MORE = 4  # times as many when nothing more becomes known with these
_MAX_CELLS = 200_000_000  # cuts of all places times nodes
_NEARLY = 4  # times the gap to prove: where so little is left, the least improvement is asked for
_SETTLED = 0.05  # of the gap: bisection ends where so much of it is between known and unknown


class ByCuts:
    """Improves the incumbent and the bound of a search until the gap is proven or the time is up."""

    def __init__(self, state: SearchState) -> None:
        self._state = state
        self._questions: _Questions | None = None

    def __call__(self, gap: float, *, may_branch: bool = True) -> None:
        """Goes on where the last call ended. Unless it `may_branch`, it ends when nothing else is left."""
        state = self._state
        if len(state.choices) != 1 or not applies_to(state.choices[0]) or state.stage_of is None:
            return
        with suppress(OutOfTime):  # what was found and proven until then is in the state
            if self._questions is None:
                self._questions = _Questions(state)
                self._questions.improve(gap)
            self._questions.prove(gap, may_branch=may_branch)


class _Questions:
    """What is asked about one instance, whose stages are all alike."""

    def __init__(self, state: SearchState) -> None:
        self._state = state
        instance = within_reach(state.choices[0], float(state.bottleneck_s))
        self._kind = DeviceKind(instance, 0, instance.num_stages)
        self._graph = CutGraph(self._kind, state.reach)
        self._few = _FEW_NEAR
        self._most_branches = 0
        self._most = _MAX_CELLS // (instance.num_stages * max(instance.num_nodes, len(instance.nets), 1))

    def improve(self, gap: float) -> None:
        """Looks for better plans near the incumbent, until there is none that the few cuts listed make."""
        state = self._state
        for gain in (*(_GAINS if self._few == _FEW_NEAR else ()), gap):
            at = 0
            while at < len(_RADII) and not state.is_proven(gap):
                answer = self._ask_near(self._slightly_less(gain), _RADII[at])
                at = 0 if self._is_gained(answer) else at + 1

    def prove(self, gap: float, *, may_branch: bool) -> None:
        """Asks at targets from the bound up, until the gap is proven. Raises OutOfTime.

        Unless it `may_branch`, it ends when nothing more becomes known without.
        """
        state, unknown_s, step_s = self._state, np.inf, np.inf
        self._most_branches = max(self._most_branches, _BRANCHES if may_branch else 0)
        while not state.is_proven(gap):
            bound_s, best_s = state.bound_s(), float(state.bottleneck_s)
            if unknown_s - bound_s < _SETTLED * (best_s - bound_s):
                if not may_branch:
                    return
                # Targets not much farther from the bound than the last that was unknown are asked first.
                step_s = _MORE * (unknown_s - bound_s)
                self._most_branches, unknown_s = self._most_branches * _MORE, np.inf
                self._few = min(self._few * 2, self._most)
                self.improve(gap)
                continue
            slightly_less_s = self._slightly_less(gap)
            target_s = min((bound_s + min(unknown_s, best_s)) / 2, bound_s + step_s, slightly_less_s)
            if unknown_s == np.inf and best_s - bound_s < _NEARLY * gap * best_s:
                target_s = slightly_less_s
            answer = self._ask(target_s)
            if answer.status is Status.INFEASIBLE:
                state.refute(target_s)
                step_s *= 2
            elif self._is_gained(answer):
                self.improve(gap)
            else:
                unknown_s = target_s

    def _is_gained(self, answer: Answer) -> bool:
        """Takes an answer's assignment, and returns whether it is better than the incumbent was."""
        before_s = self._state.bottleneck_s
        self._state.offer(answer)
        return bool(self._state.bottleneck_s < before_s)

    def _slightly_less(self, gap: float) -> float:
        return float(self._state.bottleneck_s) * (1 - gap)

    def _ask_near(self, target_s: float, radius: float) -> Answer:
        """Looks for a plan among the few cuts listed of those near the incumbent's."""
        assert self._state.stage_of is not None
        cuts = NearCuts(self._graph, self._kind.count, target_s)
        cuts.keep_near(self._state.stage_of, radius * target_s)
        answer = self._list(cuts, target_s, self._few)
        return answer if answer.stage_of is not None else Answer(Status.UNKNOWN)

    def _ask(self, target_s: float) -> Answer:
        """Looks for a plan, or proves that there is none, in few branches."""
        deadline, num_branches = self._state.deadline, 0
        left = [(NearCuts(self._graph, self._kind.count, target_s), np.inf)]
        while left:
            cuts, too_many_open = left.pop()
            if cuts.is_refuted(deadline):
                continue
            if cuts.num_open <= _FEWER * too_many_open:
                answer = self._list(cuts, target_s, _FEW)
                if answer.status is Status.FEASIBLE:
                    return answer
                if answer.status is Status.INFEASIBLE:
                    continue
                too_many_open = cuts.num_open
            if num_branches == self._most_branches:
                return Answer(Status.UNKNOWN)
            num_branches += 1
            left += [(half, too_many_open) for half in cuts.halves()]
        return Answer(Status.INFEASIBLE)

    def _list(self, cuts: NearCuts, target_s: float, most: int) -> Answer:
        deadline = self._state.deadline
        listed = cuts.listed(most, deadline)
        if listed is None:
            return Answer(Status.INFEASIBLE)
        if len(listed.member) == 0:
            return Answer(Status.UNKNOWN)
        chain = DownSets([self._kind], listed.member).chain_within(target_s, deadline)
        if chain is not None:
            return Answer(Status.FEASIBLE, 0, chain.stage_of)
        return Answer(Status.INFEASIBLE if listed.are_all else Status.UNKNOWN)
