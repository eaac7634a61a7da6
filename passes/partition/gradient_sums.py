"""What adding up the gradients of copies takes: once an update, in a ring for each bucket of a stage's own.

    r copies, |w| bytes, links of latency L and bandwidth B     2 (r - 1) (buckets L + |w| / (r B))

There are ceil(|w| / bucket) buckets, which is no sum over nodes. 1 + |w| / bucket is one, and never below it;
and 1 is enough where all gradients that there are fill no more than one bucket.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from pd2bw_fx.cluster import Cluster
from pd2bw_fx.costs import GRADIENT_BUCKET_BYTES, ring_bytes
from pd2bw_fx.problem import Problem

from .instance import Floats
from .reader import topological_order


@dataclass(frozen=True, slots=True, eq=False)
class GradientSums:
    """Each node's gradients, and the links that copies add them up over: the slowest of the cluster's."""

    num_bytes: Floats
    bytes_per_s: float
    latency_s: float

    @classmethod
    def of(cls, problem: Problem, cluster: Cluster) -> GradientSums:
        """A parameter of several blocks counts at the first."""
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
        """Of a stage, whatever it holds: the latencies of its first bucket."""
        return 2 * (num_copies - 1) * self.latency_s if self.num_bytes.any() else 0.0

    def per_byte_s(self, num_copies: int) -> float:
        in_one = self.num_bytes.sum() <= GRADIENT_BUCKET_BYTES
        more_s = 0.0 if in_one else self.latency_s / GRADIENT_BUCKET_BYTES
        return 2 * (num_copies - 1) * more_s + ring_bytes(1.0, num_copies) / self.bytes_per_s

    def of_stages_s(self, num_copies: Sequence[int]) -> Floats:
        """For each stage, with so many copies."""
        return np.array([self.once_s(copies) for copies in num_copies])

    def of_nodes_s(self, num_copies: Sequence[int]) -> Floats:
        """What comes to that for each stage, with so many copies, and each node that it has."""
        each = [self.per_byte_s(copies) for copies in num_copies]
        return np.array(each)[:, None] * self.num_bytes[None, :]
