"""The model of time: seconds for one microbatch at each stage and on each link, and for an update."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from pd2bw_fx.cluster import Cluster
from pd2bw_fx.errors import InputError
from pd2bw_fx.plan import Plan, StagePlan


@dataclass(frozen=True, slots=True)
class LinkTimes:
    """What one microbatch takes from stage `source` to stage `target`, and its gradient on the way back.

    `activation_s` and `gradient_s` are bytes / bandwidth, for which the link is busy; the latency comes on
    top of it. `gradient_s` is None where no gradient flows back, and the source waits for none.
    """

    source: int
    target: int
    latency_s: float = 0.0
    activation_s: float = 0.0
    gradient_s: float | None = 0.0
    gradient_latency_s: float | None = None  # None: the same as `latency_s`


@dataclass(frozen=True, slots=True)
class Durations:
    """The model of time, by stage.

    A backward takes `backward_s + weight_backward_s`, and its halves one of them each: the gradients of the
    inputs, with the recomputation of the forward, and those of the weights. Without `weight_backward_s`
    everything is in `backward_s`. `all_reduce_s` is what the ranks of a stage that has several need to add up
    the gradients of an update, once all of them have theirs.
    """

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    update_s: tuple[float, ...]
    links: tuple[LinkTimes, ...]
    weight_backward_s: tuple[float, ...] | None = None
    all_reduce_s: tuple[float, ...] | None = None

    @property
    def num_stages(self) -> int:
        return len(self.forward_s)

    def whole_backward_s(self, stage: int) -> float:
        weight_s = 0.0 if self.weight_backward_s is None else self.weight_backward_s[stage]
        return self.backward_s[stage] + weight_s

    @classmethod
    def chain(
        cls,
        forward_s: Sequence[float],
        backward_s: Sequence[float],
        *,
        weight_backward_s: Sequence[float] | None = None,
        update_s: float = 0.0,
        latency_s: float = 0.0,
        all_reduce_s: float = 0.0,
    ) -> Self:
        """Stages in a row, each linked to the next with a pure latency: the setting of published numbers."""
        d = len(forward_s)
        return cls(
            forward_s=tuple(forward_s),
            backward_s=tuple(backward_s),
            update_s=(update_s,) * d,
            links=tuple(LinkTimes(stage, stage + 1, latency_s) for stage in range(d - 1)),
            weight_backward_s=None if weight_backward_s is None else tuple(weight_backward_s),
            all_reduce_s=(all_reduce_s,) * d,
        )

    @classmethod
    def of(
        cls, plan: Plan, cluster: Cluster, *, update_s: float = 0.0, num_holders: Sequence[int] | None = None
    ) -> Self:
        """Compute times from the plan, link times from its transfers on the cluster's links.

        All values that a stage sends another for one microbatch travel as one message. Half of a backward is
        that of the weights, as in a matrix product. `num_holders` are the ranks of each stage: r of them add
        up their gradients in a ring, 2 (r - 1) / r times its bytes over the slowest of the cluster's links.
        """
        beyond = [stage for stage in plan.stages if stage.device >= len(cluster)]
        if beyond:
            raise InputError(
                f"stage {beyond[0].stage} is on device {beyond[0].device}, and the cluster has "
                f"{len(cluster)}; simulate on the cluster that the plan was made for"
            )
        holders = num_holders or (1,) * plan.num_stages
        return cls(
            forward_s=tuple(stage.forward_s for stage in plan.stages),
            backward_s=tuple(
                stage.backward_s / 2 + (stage.forward_s if stage.recompute else 0.0) for stage in plan.stages
            ),
            update_s=(update_s,) * plan.num_stages,
            links=_links(plan, cluster),
            weight_backward_s=tuple(stage.backward_s / 2 for stage in plan.stages),
            all_reduce_s=tuple(
                _all_reduce_s(stage, count, cluster)
                for stage, count in zip(plan.stages, holders, strict=True)
            ),
        )


def _all_reduce_s(stage: StagePlan, num_ranks: int, cluster: Cluster) -> float:
    others = range(len(cluster))
    rates = [cluster.bytes_per_s[a][b] for a in others for b in others if a != b]
    if num_ranks == 1 or not rates:
        return 0.0
    return 2 * (num_ranks - 1) / num_ranks * stage.memory.gradient_bytes / min(rates)


def _links(plan: Plan, cluster: Cluster) -> tuple[LinkTimes, ...]:
    sizes: dict[tuple[int, int], tuple[int, int]] = {}
    for transfer in plan.transfers:
        pair = (transfer.source, transfer.target)
        there, back = sizes.get(pair, (0, 0))
        sizes[pair] = (there + transfer.bytes, back + transfer.gradient_bytes)
    links = []
    for (source, target), (num_bytes, gradient_bytes) in sorted(sizes.items()):
        a, b = plan.stages[source].device, plan.stages[target].device
        local = a == b
        links.append(
            LinkTimes(
                source,
                target,
                latency_s=0.0 if local else cluster.latency_s[a][b],
                activation_s=0.0 if local else num_bytes / cluster.bytes_per_s[a][b],
                gradient_s=_gradient_s(cluster, b, a, gradient_bytes),
                gradient_latency_s=0.0 if local else cluster.latency_s[b][a],
            )
        )
    return tuple(links)


def _gradient_s(cluster: Cluster, source: int, target: int, num_bytes: int) -> float | None:
    if num_bytes == 0:
        return None
    return 0.0 if source == target else num_bytes / cluster.bytes_per_s[source][target]
