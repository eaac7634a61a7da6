"""Linear programs for HiGHS, which are asked for the multipliers of their rows.

HiGHS is called without PuLP, which has no way to change a bound and to go on from the last solution, and
takes longer to write down a hundred thousand numbers than HiGHS takes to solve them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import highspy
import numpy as np

from .solver import SilentHighs, model_of_rows

_EXCESS_PRICE = 1e3  # of what exceeds a limit, where the largest price is 1
_SETTINGS = {"output_flag": False, "threads": 1, "random_seed": 0}
# Without the crossover to a corner: multipliers near the best ones do.
_INTERIOR = {"solver": "ipm", "run_crossover": "off"}


class ClosureProgram:
    """The least sum of `prices` over shares 0 <= x[v] <= 1 of nodes, with x[a] >= x[b] for each arc (a, b).

    `limits` are other prices, each with the most that their sum may be. They may be exceeded at a high price,
    so that there always is a solution.
    """

    def __init__(self, prices: Any, arcs: Any, limits: Sequence[tuple[Any, float]]) -> None:
        num_nodes, num_arcs, infinity = len(prices), len(arcs), highspy.kHighsInf
        self._num_arcs = num_arcs
        self._scale = float(np.abs(prices).max(initial=0.0)) or 1.0
        self._units = np.array([float(np.abs(of).max(initial=0.0)) or 1.0 for of, _ in limits])
        caps = np.array([at_most for _, at_most in limits]) / self._units
        starts, columns = [2 * np.arange(num_arcs)], [arcs.ravel()]
        values, end = [np.tile([1.0, -1.0], num_arcs)], 2 * num_arcs
        for number, (of, _) in enumerate(limits):
            used = np.flatnonzero(of)
            starts.append(np.array([end]))
            columns += [used, np.array([num_nodes + number])]
            values += [of[used] / self._units[number], np.array([-1.0])]
            end += len(used) + 1
        model = model_of_rows(
            costs=np.concatenate((prices / self._scale, np.full(len(limits), _EXCESS_PRICE))),
            lower=np.zeros(num_nodes + len(limits)),
            upper=np.concatenate((np.ones(num_nodes), np.full(len(limits), infinity))),
            at_least=np.concatenate((np.zeros(num_arcs), np.full(len(limits), -infinity))),
            at_most=np.concatenate((np.full(num_arcs, infinity), caps)),
            starts=np.concatenate((*starts, [end])),
            columns=np.concatenate(columns),
            factors=np.concatenate(values),
        )
        self._highs = _with_settings(_SETTINGS, model)

    def fix(self, node: int, low: float, high: float) -> None:
        """Changes the bounds of a node's share."""
        self._highs.changeColBounds(node, low, high)

    def multipliers(self) -> tuple[Any, Any]:
        """Returns the multipliers of the arcs and of the limits in an optimal solution; none is negative."""
        self._highs.run()
        if self._highs.getModelStatus() != highspy.HighsModelStatus.kOptimal:
            return np.zeros(self._num_arcs), np.zeros(len(self._units))
        duals = np.array(self._highs.getSolution().row_dual) * self._scale
        of_limits = -duals[self._num_arcs :] / self._units
        return np.maximum(duals[: self._num_arcs], 0.0), np.maximum(of_limits, 0.0)


class RowProgram:
    """The least sum of `costs` over amounts between `lower` and `upper`, with rows added in blocks."""

    def __init__(self, costs: Any, lower: Any, upper: Any) -> None:
        self._columns = costs, lower, upper
        self._num_rows = 0
        self._entries: list[tuple[Any, Any, Any]] = []
        self._bounds: list[tuple[Any, Any]] = []

    def add(self, *terms: tuple[Any, Any]) -> slice:
        """Adds rows whose sums are at least zero: each term has a column for every row, and its factors.

        Returns the place of the rows' multipliers.
        """
        count = len(terms[0][0])
        start, self._num_rows = self._num_rows, self._num_rows + count
        numbers = np.arange(start, self._num_rows)
        for columns, factors in terms:
            self._entries.append((numbers, columns, np.broadcast_to(factors, (count,))))
        self._bounds.append((np.zeros(count), np.full(count, highspy.kHighsInf)))
        return slice(start, self._num_rows)

    def limit(self, columns: Any, factors: Any, at_most: float) -> None:
        """Adds one row, whose sum is at most `at_most`."""
        unit = float(np.abs(factors).max(initial=0.0)) or 1.0
        self._entries.append((np.full(len(columns), self._num_rows), columns, factors / unit))
        self._bounds.append((np.array([-highspy.kHighsInf]), np.array([at_most / unit])))
        self._num_rows += 1

    def multipliers(self, time_limit_s: float) -> Any:
        """Returns a multiplier of each row, none negative, near those of an optimal solution.

        They are zeros where there is none, or none in time.
        """
        costs, lower, upper = self._columns
        rows, columns, factors = (np.concatenate(parts) for parts in zip(*self._entries, strict=True))
        order = np.lexsort((columns, rows))
        scale = float(np.abs(costs).max(initial=0.0)) or 1.0
        at_least, at_most = (np.concatenate(of) for of in zip(*self._bounds, strict=True))
        model = model_of_rows(
            costs=costs / scale,
            lower=lower,
            upper=upper,
            at_least=at_least,
            at_most=at_most,
            starts=np.searchsorted(rows[order], np.arange(self._num_rows + 1)),
            columns=columns[order],
            factors=factors[order],
        )
        highs = _with_settings(_SETTINGS | _INTERIOR | {"time_limit": time_limit_s}, model)
        highs.run()
        duals = np.array(highs.getSolution().row_dual)
        if len(duals) != self._num_rows:
            return np.zeros(self._num_rows)
        return np.maximum(duals, 0.0) * scale


def _with_settings(settings: Mapping[str, Any], model: highspy.HighsLp) -> SilentHighs:
    highs = SilentHighs()
    for name, value in settings.items():
        highs.setOptionValue(name, value)
    highs.passModel(model)
    return highs
