"""The state of a search, the incumbent and what is proven, and the steps that improve it."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress

import numpy as np

from pd2bw_fx.errors import SolverError
from pd2bw_fx.passes.partition.bounds import relaxed_bound
from pd2bw_fx.passes.partition.bounds.downsets import DeviceKind, DownSets, OutOfTime
from pd2bw_fx.passes.partition.bounds.least_load import LeastLoads, kinds_of
from pd2bw_fx.passes.partition.bounds.relaxation import is_refuted
from pd2bw_fx.passes.partition.bounds.relaxed_bound import RelaxedBound
from pd2bw_fx.passes.partition.bounds.windows import Reach, windows_for
from pd2bw_fx.passes.partition.choices import FEW_CHOICES, Answer, Choices, Deadline, floor_of
from pd2bw_fx.passes.partition.instance import Instance, Integers, respects_edges, within_reach
from pd2bw_fx.passes.partition.integer_program.feasibility import FeasibilityProgram, takes_too_long
from pd2bw_fx.passes.partition.route import loads_of
from pd2bw_fx.passes.solver import Status
from pd2bw_fx.plan import Progress

from .intervals import IntervalTables, best_cut, rough_cut
from .orders import Shuffler, topological_orders

_TOLERANCE = 2e-6  # of a target: solvers keep their rows to a millionth, and twice that is within it
_BROKEN = 1e-3  # of a target: more than all tolerances and large constants together can account for
_COARSE_GAP = 0.01  # the gap of the first pass over the device orders of a large problem
_FINE_GAP = 0.002  # a bisection of the target ends at this gap
_LONG_TO_CUT = 2_000_000  # nodes times nodes times stages: about half a second for one order
_SMALL = 2000  # nodes times stages: below this there is one pass, at the finest gap
_MOST_EXCLUDED = 50  # assignments of one program that turn out slower or larger than it has them
# After so many orders in a row without improvement a bound is asked for; after the last number the step ends.
_FRUITLESS_ORDERS = (0, 25, 100)
_LEAST_LOADS_SHARE = 0.3  # of the time of the step that asks for the bound
_NEAR_THE_TARGET = 0.9  # of the target: a bound below this will not reach a slightly lower target either
_LEAST_USEFUL_BOUND = 1e-6  # of the incumbent: bisection does not go on below this
_FEW_DOWN_SETS = 10_000  # more of them are not enumerated before a program
_MANY_DOWN_SETS = 200_000  # more of them are not enumerated for a problem
_LARGE = 5000  # nodes times stages: with more, down-sets near a target are not listed for a problem
_ENUMERATION_SHARE = 0.25  # of the time left, for enumerating them

Cut = Callable[[Instance, Sequence[int], IntervalTables], Integers | None]
"""Cuts an order of the nodes into stages, or returns None where nothing fits."""

Question = Callable[[float, Deadline], Answer]
"""Answers for a target in seconds, before a deadline."""


class SearchState:
    """The incumbent (`choice`, `stage_of`, `bottleneck_s`), and the largest target that each choice is known
    not to reach (`refuted_s`)."""

    def __init__(
        self,
        choices: Choices,
        *,
        solver: str,
        deadline: Deadline,
        report: Callable[[Progress], None] | None,
        kinds: Sequence[DeviceKind],
    ) -> None:
        self.choices = choices
        self.report = report
        self.started_s = time.perf_counter()
        self.solver = solver
        self.deadline = deadline
        self.reach = Reach(choices[0].num_nodes, choices[0].edges)
        if not kinds and len(choices) == 1 and not choices[0].overlap:
            kinds = kinds_of(choices[0])
        self.least_loads = LeastLoads(kinds, self.reach) if kinds else None
        self.least_load_s: float | None = None  # the last answer
        self.orders = topological_orders(choices[0])
        self.bottleneck_s = np.inf
        self.choice = -1
        self.stage_of: Integers | None = None
        self.seen_s = np.full(len(choices), np.inf)
        self.refuted_s = np.full(len(choices), -np.inf)
        self.floor_s = choices.floor_s()
        self.is_enumerated = self.has_left_out = False
        self.joined_nodes: Integers | None = None
        # `max_sets` of the last time that relaxed rules were asked, by whether nodes were joined.
        self.relaxed_sets = {True: 0.0, False: 0.0}
        self.down_sets: DownSets | None = None

    def bound_s(self) -> float:
        """Returns a bound that no assignment of any choice is faster than."""
        refuted_s = float(self.refuted_s.min())
        if not self.choices.are_all and (refuted_s < np.inf or self.bottleneck_s < np.inf):
            refuted_s = 0.0  # other device orders may be faster
        return min(max(refuted_s, self.floor_s), float(self.bottleneck_s))

    def is_proven(self, gap: float) -> bool:
        return self.bound_s() >= float(self.bottleneck_s) * (1.0 - gap)

    def tell(self) -> None:
        if self.report is not None and self.stage_of is not None:
            elapsed_s = time.perf_counter() - self.started_s
            self.report(Progress(float(self.bottleneck_s), max(0.0, self.bound_s()), elapsed_s))

    def most_promising_first(self) -> list[int]:
        return [int(choice) for choice in np.argsort(self.seen_s, kind="stable")]

    def first_assignments(self) -> None:
        """Cuts a few topological orders where it is best, for as many choices as a third of the time allows.

        Where there are many choices, or a cut takes long, all are cut roughly first. That tells which of them
        are worth a close look, and gives a plan however little time there is.
        """
        share = Deadline(self.deadline.left_s / 3)
        size = self.choices[0].num_nodes ** 2 * self.choices[0].num_stages
        tables = IntervalTables()
        is_rough = len(self.choices) > FEW_CHOICES or size > _LONG_TO_CUT
        for choice in range(len(self.choices)):
            if choice > 0 and share.left_s == 0:
                break
            self._cut(choice, rough_cut if is_rough else best_cut, share, tables)
        if not is_rough:
            return
        for number, choice in enumerate(self.most_promising_first()[:FEW_CHOICES]):
            if self.deadline.left_s == 0 and (number > 0 or self.stage_of is not None):
                break
            self._cut(choice, best_cut, self.deadline, tables)

    def _cut(self, choice: int, cut: Cut, deadline: Deadline, tables: IntervalTables) -> None:
        """Offers the cuts of a few orders for one choice, until one is at a lower bound of work alone or, if
        there is a plan, the time is up."""
        instance = self.choices[choice]
        near = within_reach(instance, _at_best_s(instance))
        for order in (*_pinned_order(instance, self.reach), *self.orders):
            if self.stage_of is not None and deadline.left_s == 0:
                return
            stage_of = cut(near, order, tables)
            if stage_of is not None and respects_edges(instance, stage_of):
                self._offer(choice, stage_of)
            if self.seen_s[choice] <= floor_of(instance) * (1 + _TOLERANCE):
                return

    def _offer(self, choice: int, stage_of: Integers, *, or_as_good: bool = False) -> None:
        loads = loads_of(self.choices[choice], stage_of)
        if not loads.fits:
            return
        self.seen_s[choice] = min(self.seen_s[choice], loads.bottleneck_s)
        if loads.bottleneck_s < self.bottleneck_s:
            self.bottleneck_s, self.choice, self.stage_of = loads.bottleneck_s, choice, stage_of
            self.tell()
        elif or_as_good and loads.bottleneck_s == self.bottleneck_s:
            self.choice, self.stage_of = choice, stage_of

    def offer(self, answer: Answer) -> None:
        """Takes an answer's assignment, if it has one, as the incumbent if it is better."""
        if answer.stage_of is not None:
            self._offer(answer.choice, answer.stage_of)

    def refute(self, target_s: float) -> None:
        """Takes the target as a bound on all choices."""
        self.refuted_s[:] = np.maximum(self.refuted_s, target_s)
        self.tell()

    def ask_programs(self, finest: float) -> None:
        is_small = self.choices[0].num_nodes * self.choices[0].num_stages <= _SMALL
        for gap in (finest,) if is_small or finest >= _COARSE_GAP else (_COARSE_GAP, finest):
            for tried, choice in enumerate(self.most_promising_first()):
                # Where not all orders are choices nothing can be proven, so the most promising are enough.
                is_enough = tried >= FEW_CHOICES and not self.choices.are_all and self.stage_of is not None
                if self.deadline.left_s == 0 or is_enough:
                    break
                self.refute_or_improve(choice, gap)

    def refute_or_improve(self, choice: int, gap: float) -> None:
        """Asks programs until this choice has nothing faster by `gap`, or the time is up."""
        while True:
            target_s = float(self.bottleneck_s) * (1.0 - gap)
            if self.refuted_s[choice] >= target_s or self.bound_s() >= target_s:
                return
            status, stage_of = self._ask(choice, target_s)
            if status is Status.INFEASIBLE:
                # A program without a target asks about memory alone, which most device orders have alike.
                alike = [choice] if np.isfinite(target_s) else self.choices.that_fit_as(choice)
                self.refuted_s[alike] = target_s
                self.tell()
                return
            if stage_of is None:
                return
            self._offer(choice, stage_of)

    def ask_least_loads(self, gap: float) -> None:
        target_s = float(self.bottleneck_s) * (1.0 - gap)
        is_far = self.least_load_s is not None and self.least_load_s < _NEAR_THE_TARGET * target_s
        if self.least_loads is None or is_far or not self.bound_s() < target_s < np.inf:
            return
        share = Deadline(self.deadline.left_s * _LEAST_LOADS_SHARE)
        found_s = self.least_loads.floor_s(target_s, share, known_s=self.bound_s())
        if share.left_s > 0:
            self.least_load_s = found_s
        self.floor_s = max(self.floor_s, found_s)
        self.tell()

    def shuffle(self, gap: float, *, patience: int = _FRUITLESS_ORDERS[-1]) -> None:
        """Cuts other orders near the incumbent's until `patience` in a row bring nothing. Now and then it
        asks for a bound."""
        shuffler = Shuffler(self.choices[0].num_nodes, self.choices[0].edges)
        fruitless = 0
        while self.stage_of is not None and self.deadline.left_s > 0:
            if fruitless in _FRUITLESS_ORDERS:
                self.ask_least_loads(gap)
            if fruitless == patience or self.is_proven(gap):
                return
            fruitless = 0 if self._shuffle_once(shuffler, fruitless, gap) else fruitless + 1

    def _shuffle_once(self, shuffler: Shuffler, number: int, gap: float) -> bool:
        """Cuts one more order, every other time for another choice. Returns whether that gains the gap."""
        choice = self.choice if number % 2 == 0 else number // 2 % len(self.choices)
        before_s = self.bottleneck_s
        assert self.stage_of is not None
        near = within_reach(self.choices[choice], float(self.bottleneck_s))
        stage_of = best_cut(near, shuffler.order(self.stage_of))
        if stage_of is None or not respects_edges(self.choices[choice], stage_of):
            return False
        self._offer(choice, stage_of, or_as_good=True)
        return bool(self.bottleneck_s < before_s * (1.0 - gap))

    def ask_relaxed_bound(
        self, gap: float, *, max_sets: int = _MANY_DOWN_SETS, max_size: int = _LARGE, goes_on: bool = True
    ) -> None:
        """Asks for the bounds by relaxed rules (`RelaxedBound.of`), where there is one choice.

        Both kinds of them are asked, but none again for which that would bring nothing more. Unless it
        `goes_on`, down-sets near a target are listed for the least improvement alone.
        """
        for joined in (True, False):
            if len(self.choices) > 1 or self.is_proven(gap) or not np.isfinite(self.bottleneck_s):
                return
            if self.relaxed_sets[joined] >= max_sets or not relaxed_bound.applies_to(self.choices[0]):
                continue
            near = within_reach(self.choices[0], self.bottleneck_s)
            number_of = self._joined_nodes(near) if joined else np.arange(near.num_nodes)
            if joined and number_of.max() + 1 == near.num_nodes:
                continue  # none was joined
            rules = RelaxedBound.of(near, number_of, max_sets=max_sets, max_size=max_size)
            if rules is None:
                continue
            with suppress(OutOfTime):
                if self._ask_fastest(rules, gap, goes_on=goes_on):
                    self.enumerate(rules, gap)
                if self.deadline.left_s > 0:
                    self.relaxed_sets[joined] = np.inf if rules.has_all_sets else max_sets

    def _joined_nodes(self, near: Instance) -> Integers:
        """Joins nodes once: what may be joined at no loss for a target may be for smaller ones too."""
        if self.joined_nodes is None:
            found = relaxed_bound.joined_nodes(near, self.deadline)
            if self.deadline.left_s == 0:
                return found
            self.joined_nodes = found
        return self.joined_nodes

    def _ask_fastest(self, rules: RelaxedBound, gap: float, *, goes_on: bool) -> bool:
        """Returns whether other targets should be asked, which it does if `goes_on`, or if this one was
        answered. Raises OutOfTime."""
        bound_s, stage_of = rules.fastest(float(self.bottleneck_s) * (1.0 - gap), self.deadline)
        self.refute(bound_s)
        if stage_of is not None:
            self._offer(0, stage_of)
        return goes_on or rules.has_all_sets or bound_s > 0

    def ask_windows(self, gap: float) -> None:
        """Bisects for a quick bound: the largest target at which, on every choice, some node has no stage."""
        low_s, high_s = self.bound_s(), float(self.bottleneck_s) * (1.0 - gap)
        while np.isfinite(high_s) and high_s - low_s > _FINE_GAP * high_s:
            target_s = (low_s + high_s) / 2
            for choice in np.flatnonzero(self.refuted_s < target_s).tolist():
                if self.deadline.left_s == 0:
                    return
                near = within_reach(self.choices[choice], target_s)
                if windows_for(near, target_s, self.reach) is not None:
                    high_s = target_s
                    break
                self.refuted_s[choice] = target_s
            else:
                low_s = target_s
        self.tell()

    def enumerate(self, ask: Question, gap: float) -> None:
        """Asks until nothing is faster by `gap`, or the time is up, or there is too much to enumerate.

        Targets are, in turns, the least improvement, which often does not exist, and halfway to the bound.
        Below a target with an unknown answer they are halfway only.
        """
        is_least, unknown_s = True, np.inf
        while self.bound_s() < (target_s := float(self.bottleneck_s) * (1.0 - gap)):
            if target_s < unknown_s:
                unknown_s = np.inf
            high_s = min(float(self.bottleneck_s), unknown_s)
            middle_s = (high_s + max(0.0, self.bound_s())) / 2
            is_far = middle_s < high_s * (1.0 - _FINE_GAP)
            is_of_use = is_far and middle_s > _LEAST_USEFUL_BOUND * self.bottleneck_s
            if unknown_s < np.inf and not is_of_use:
                return
            if is_far and (unknown_s < np.inf or not is_least):
                target_s = middle_s
            is_least = not is_least
            answer = ask(target_s, self.deadline)
            status = answer.status
            self.offer(answer)
            self.refuted_s[:] = np.maximum(self.refuted_s, answer.bound_s)
            if status is Status.INFEASIBLE:
                self.refuted_s[:] = np.maximum(self.refuted_s, target_s)
            elif status is Status.UNKNOWN:
                if self.deadline.left_s == 0 or not np.isfinite(target_s):
                    return
                unknown_s = target_s
            elif not self.bottleneck_s <= target_s * (1 + _TOLERANCE):
                raise SolverError("an enumerated assignment is slower than it was counted; please report")
            self.tell()

    def _is_refuted_by_enumeration(self, instance: Instance, target_s: float) -> bool:
        """Returns whether relaxed rules (`relaxation.py`) are enough to exclude the target."""
        if not np.isfinite(target_s):
            return False
        if not self.is_enumerated:
            self.is_enumerated = True
            self.down_sets = DownSets.of([DeviceKind(instance, 0, 1)], max_sets=_FEW_DOWN_SETS)
        if self.down_sets is None:
            return False
        self.down_sets = self.down_sets.within_reach(target_s)
        try:
            share = Deadline(self.deadline.left_s * _ENUMERATION_SHARE)
            return is_refuted(instance, self.down_sets, target_s, share)
        except OutOfTime:
            return False

    def _ask(self, choice: int, target_s: float) -> tuple[Status, Integers | None]:
        instance = self.choices[choice]
        if self.deadline.left_s == 0:
            return Status.UNKNOWN, None
        near = within_reach(instance, target_s)
        windows = windows_for(near, target_s, self.reach)
        if windows is None or self._is_refuted_by_enumeration(near, target_s):
            return Status.INFEASIBLE, None
        if takes_too_long(near, windows, self.deadline.left_s):
            self.has_left_out = True
            return Status.UNKNOWN, None
        program = FeasibilityProgram(near, target_s, windows)
        excluded: list[Integers] = []
        is_too_large = False
        while len(excluded) < _MOST_EXCLUDED:
            status, stage_of = program.solve(
                solver=self.solver,
                time_limit_s=self.deadline.left_s,
                refuting=bool(np.isfinite(self.bottleneck_s)),
                on_wait=self.tell,
            )
            if stage_of is None:
                return status, None
            loads = loads_of(instance, stage_of)
            is_slower = loads.bottleneck_s > target_s * (1 + _TOLERANCE)
            is_far = loads.bottleneck_s > target_s * (1 + _BROKEN) and not instance.hands_on
            if is_far or not respects_edges(instance, stage_of):
                raise SolverError(
                    f"{self.solver} returned an assignment that breaks the program it solved "
                    f"({loads.bottleneck_s:g} s against {target_s:g} s); try another solver"
                )
            if loads.fits and not is_slower:
                return status, stage_of
            # The assignment is too large by less than the solver's tolerance (a few bytes in a gigabyte), or
            # too slow by the tolerances of several rows together or with the routes that it is given. Exclude
            # it; others may be too large by as little, so bytes are counted one by one from now on.
            self._offer(choice, stage_of)
            excluded.append(stage_of)
            if not loads.fits and not is_too_large:
                is_too_large = True
                program = FeasibilityProgram(near, target_s, windows, to_the_byte=True)
                for each in excluded[:-1]:
                    program.exclude(each)
            program.exclude(stage_of)
        return Status.UNKNOWN, None


def _at_best_s(instance: Instance) -> float:
    """Returns all work and transfers, each where it takes least. First cuts ignore far larger times."""
    apart = ~np.eye(instance.num_stages, dtype=bool)
    transfers_s = instance.cost_s[:, apart].min(axis=1) if instance.num_stages > 1 else np.zeros(1)
    return float(instance.work_s.min(axis=0).sum() + transfers_s.sum())


def _pinned_order(instance: Instance, reach: Reach) -> list[Sequence[int]]:
    """Returns an order with nodes pinned to early stages first, or none where there are no pins.

    Without it, it could be that no cut keeps to the pins.
    """
    if instance.forbidden is None or not instance.forbidden.any():
        return []
    windows = windows_for(instance, np.inf, reach)
    if windows is None:
        return []
    nodes = range(instance.num_nodes)
    return [sorted(nodes, key=lambda node: (windows.first[node], windows.last[node], node))]
