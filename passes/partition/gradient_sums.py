"""The time to sum gradients over the copies of a stage, once an update, as a sum over the stage's nodes.

    r copies, |w| bytes, links of latency L and bandwidth B     2 (r - 1) (buckets L + |w| / (r B))

This is `costs.ring_s`. There are ceil(|w| / bucket) buckets, which is not a sum over nodes. So the planner
counts 1 + |w| / bucket of them, which is such a sum and never less. Where all gradients of the model fit in
one bucket it counts 1.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pd2bw_fx.cluster import Cluster
from pd2bw_fx.costs import GRADIENT_BUCKET_BYTES, ring_s
from pd2bw_fx.problem import Problem

from .instance import Floats
from .reader import topological_order


@dataclass(frozen=True, slots=True, eq=False)
class GradientSums:
    """The bytes of each node's gradients, and the slowest link of the cluster, which limits their sums."""

    num_bytes: Floats
    bytes_per_s: float
    latency_s: float

    @classmethod
    def of(cls, problem: Problem, cluster: Cluster) -> GradientSums:
        """Reads a problem. A parameter of several blocks counts at the first of them."""
        pairs = [(a, b) for a in range(len(cluster)) for b in range(len(cluster)) if a != b]
        counted: set[str] = set()
        num_bytes = []
        for at in topological_order(problem):
            names = dict.fromkeys(problem.blocks[at].parameters)
            sizes = [problem.parameters[name].trainable_bytes for name in names if name not in counted]
            counted.update(names)
            num_bytes.append(sum(sizes))
        return cls(
            np.array(num_bytes, dtype=float),
            min((cluster.bytes_per_s[a][b] for a, b in pairs), default=np.inf),
            max((cluster.latency_s[a][b] for a, b in pairs), default=0.0),
        )

    def once_s(self, num_copies: int) -> float:
        """Returns the part that a stage has whatever it holds: the latencies of its first bucket."""
        if not self.num_bytes.any():
            return 0.0
        return ring_s(0.0, num_copies, step_s=self.latency_s, bytes_per_s=self.bytes_per_s)

    def per_byte_s(self, num_copies: int) -> float:
        """Returns the time for each byte of gradients, with its share of the latency of further buckets."""
        in_one = self.num_bytes.sum() <= GRADIENT_BUCKET_BYTES
        more_s = 0.0 if in_one else self.latency_s / GRADIENT_BUCKET_BYTES
        return ring_s(1.0, num_copies, step_s=more_s, bytes_per_s=self.bytes_per_s)

    def of_stages_s(self, num_copies: Sequence[int]) -> Floats:
        """Returns `once_s` for stages with so many copies each."""
        return np.array([self.once_s(copies) for copies in num_copies])

    def of_nodes_s(self, num_copies: Sequence[int]) -> Floats:
        """Returns what each node adds on each stage, with so many copies: (stages, nodes)."""
        each = [self.per_byte_s(copies) for copies in num_copies]
        return np.array(each)[:, None] * self.num_bytes[None, :]
