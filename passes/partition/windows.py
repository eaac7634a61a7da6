"""Windows: which stages a node can be on at all, if no stage may take longer than T.

A node's ancestors are on its own stage or earlier ones, so the stages up to its own must have the time (and
the memory) for all of them; the same from the other end for its descendants.
"""

from __future__ import annotations

import numpy as np

from .instance import Flags, Floats, Instance
from .program import Windows


def windows_for(instance: Instance, target_s: float, reach: Reach) -> Windows | None:
    """Windows that every assignment within `target_s` keeps, or None where that leaves none."""
    k = instance.num_stages
    first = np.zeros(instance.num_nodes, dtype=np.int64)
    last = np.full(instance.num_nodes, k - 1, dtype=np.int64)
    for amount, capacity in _resources(instance, target_s):
        before = amount + reach.over_ancestors(amount)
        after = amount + reach.over_descendants(amount)
        upto = capacity.cumsum()
        downto = capacity[::-1].cumsum()
        # A hair more than there is, so that rounding never cuts off an assignment that fits exactly.
        first = np.maximum(first, np.searchsorted(upto * (1 + 1e-9), before))
        last = np.minimum(last, k - 1 - np.searchsorted(downto * (1 + 1e-9), after))
    fits = _fits_alone(instance, target_s)
    for u_first in range(k):
        first = np.where((first == u_first) & ~fits[u_first], u_first + 1, first)
    for u_last in reversed(range(k)):
        last = np.where((last == u_last) & ~fits[u_last], u_last - 1, last)
    for u, v in reach.edges_forward:
        first[v] = max(first[v], first[u])
    for u, v in reversed(reach.edges_forward):
        last[u] = min(last[u], last[v])
    if (first > last).any() or (first >= k).any() or (last < 0).any():
        return None
    return Windows(first, last)


class Reach:
    """Ancestors and descendants of every node, as bits."""

    def __init__(self, num_nodes: int, edges: tuple[tuple[int, int], ...]) -> None:
        self.num_nodes = num_nodes
        self.edges_forward = sorted(edges, key=lambda edge: edge[0])
        self._ancestors = np.zeros((num_nodes, (num_nodes + 7) // 8), dtype=np.uint8)
        for u, v in sorted(edges, key=lambda edge: edge[1]):
            self._ancestors[v] |= self._ancestors[u]
            self._ancestors[v, u >> 3] |= np.uint8(128 >> (u & 7))

    def ancestors(self) -> Floats:
        """Entry [v, u] is 1 where u comes before v."""
        bits = np.unpackbits(self._ancestors, axis=1, count=self.num_nodes)
        return bits.astype(np.float64)

    def over_ancestors(self, amount: Floats) -> Floats:
        return self.ancestors() @ amount

    def over_descendants(self, amount: Floats) -> Floats:
        return amount @ self.ancestors()


def _resources(instance: Instance, target_s: float) -> list[tuple[Floats, Floats]]:
    """What each node needs and each stage has: time where there is a target, memory where it is finite."""
    resources = []
    if np.isfinite(target_s):
        resources.append((instance.work_s[0], _capacity_s(instance, target_s)))
    if np.isfinite(instance.limit_bytes).all():
        resources.append((instance.static_bytes, instance.limit_bytes.astype(np.float64)))
    return resources


def _capacity_s(instance: Instance, target_s: float) -> Floats:
    """How much work each stage can do in time, counted in seconds of stage 0."""
    capacity = np.empty(instance.num_stages)
    unit = instance.work_s[0]
    for stage in range(instance.num_stages):
        work_s = instance.work_s[stage]
        if (work_s[unit > 0] <= 0).any():
            capacity[stage] = np.inf
            continue
        some = unit > 0
        capacity[stage] = target_s * (unit[some] / work_s[some]).max() if some.any() else np.inf
    return capacity


def _fits_alone(instance: Instance, target_s: float) -> Flags:
    time = instance.work_s <= target_s * (1 + 1e-9)
    memory = instance.static_bytes[None, :] <= instance.limit_bytes[:, None]
    fits: Flags = time & memory
    if instance.forbidden is not None:
        fits &= ~instance.forbidden
    return fits
