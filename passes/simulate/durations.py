"""The model of time: seconds for one microbatch at each stage and on each link, and for an update."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

from pd2bw_fx.cluster import Cluster
from pd2bw_fx.costs import GRADIENT_BUCKET_BYTES, Calibration, ring_bytes
from pd2bw_fx.errors import InputError
from pd2bw_fx.plan import Plan, StagePlan

from .sums import Tied


@dataclass(frozen=True, slots=True)
class LinkTimes:
    """What one microbatch takes from stage `source` to stage `target`, and its gradient on the way back.

    `activation_s` and `gradient_s` are bytes / bandwidth, for which the link is busy; the latency comes on
    top of it. `gradient_s` is None where no gradient flows back, and the source waits for none. For `send_s`
    and `receive_s` the rank itself is busy with a message, at either end. `elsewhere`: the same between ranks
    (one of the source, one of the target) that stand on other devices than the plan names for the stages.
    """

    source: int
    target: int
    latency_s: float = 0.0
    activation_s: float = 0.0
    gradient_s: float | None = 0.0
    gradient_latency_s: float | None = None  # None: the same as `latency_s`
    send_s: float = 0.0
    receive_s: float = 0.0
    elsewhere: Mapping[tuple[int, int], LinkTimes] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Durations:
    """The model of time, by stage.

    A backward takes `backward_s + weight_backward_s`, and its halves one of them each: the gradients of the
    inputs, with the recomputation of the forward, and those of the weights. Without `weight_backward_s`
    everything is in `backward_s`. `undivided_s` is what a backward that is not divided takes, where that is
    not their sum. `all_reduce_s` is what the ranks of a stage that has several need to add up
    the gradients of an update, once all of them have theirs, and `tied` the same of parameters that several
    stages hold.
    """

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    update_s: tuple[float, ...]
    links: tuple[LinkTimes, ...]
    weight_backward_s: tuple[float, ...] | None = None
    all_reduce_s: tuple[float, ...] | None = None
    undivided_s: tuple[float, ...] | None = None
    tied: tuple[Tied, ...] = ()

    @property
    def num_stages(self) -> int:
        return len(self.forward_s)

    def whole_backward_s(self, stage: int) -> float:
        if self.undivided_s is not None:
            return self.undivided_s[stage]
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
        cls,
        plan: Plan,
        cluster: Cluster,
        *,
        update_s: float = 0.0,
        holders: Sequence[Collection[int]] | None = None,
        calibration: Calibration | None = None,
        trainable_bytes: Mapping[str, int] | None = None,
    ) -> Self:
        """Compute times from the plan, link times from its transfers on the cluster's links.

        All values that a stage sends another for one microbatch travel as one message. Half of a backward is
        that of the weights, as in a matrix product. `holders` are the ranks of each stage: r of them add
        up their gradients in a ring, 2 (r - 1) steps of 1 / r of the bytes each, over the slowest of the
        cluster's links. A rank with the number of one of its stages is on the device that the plan has for
        that stage: of two ranks with the same two stages (chimera) each uses its own links. Parameters that
        several stages hold are added up over all ranks that do, by their `trainable_bytes` where those are
        given.
        `calibration`: what a run on this machine took besides; without it the engine itself takes no time.
        """
        beyond = [stage for stage in plan.stages if stage.device >= len(cluster)]
        if beyond:
            raise InputError(
                f"stage {beyond[0].stage} is on device {beyond[0].device}, and the cluster has "
                f"{len(cluster)}; simulate on the cluster that the plan was made for"
            )
        holders = holders or [(stage,) for stage in range(plan.num_stages)]
        num_holders = [len(ranks) for ranks in holders]
        num_ranks = len({rank for ranks in holders for rank in ranks})
        known = calibration or Calibration()
        backward = [known.backward * (known.shared if count > 1 else 1.0) for count in num_holders]
        halves = [
            _halves_s(plan, stage, replace(known, backward=factor))
            for stage, factor in zip(plan.stages, backward, strict=True)
        ]
        shared = _shared_parameters(plan, holders, trainable_bytes or {})
        # A rank is between two actions as long as ever, however many stages share it.
        between_s = known.between_s * num_ranks / sum(num_holders)
        return cls(
            forward_s=tuple(known.forward * stage.forward_s for stage in plan.stages),
            backward_s=tuple(inputs_s for inputs_s, _ in halves),
            update_s=tuple(
                update_s + known.update_s_per_byte * stage.memory.gradient_bytes + between_s
                for stage in plan.stages
            ),
            links=tuple(_links(plan, cluster, known, holders)),
            weight_backward_s=tuple(weights_s for _, weights_s in halves),
            all_reduce_s=tuple(
                _all_reduce_s(_own_bytes(stage, shared), count, cluster, known)
                for stage, count in zip(plan.stages, num_holders, strict=True)
            ),
            undivided_s=tuple(
                factor * stage.backward_s + (known.forward * stage.forward_s if stage.recompute else 0.0)
                for stage, factor in zip(plan.stages, backward, strict=True)
            ),
            tied=tuple(
                Tied(stages, ranks, _all_reduce_s(num_bytes, len(ranks), cluster, known))
                for (stages, ranks), num_bytes in shared.items()
            ),
        )


def _halves_s(plan: Plan, stage: StagePlan, known: Calibration) -> tuple[float, float]:
    """Of a backward, where it runs in halves. What is recomputed is so in the first one."""
    again_s = known.forward * stage.forward_s if stage.recompute else 0.0
    backward_s = known.backward * stage.backward_s
    if known.halves is None:
        return backward_s / 2 + again_s, backward_s / 2
    if not any(transfer.target == stage.stage and transfer.gradient_bytes for transfer in plan.transfers):
        return again_s, backward_s
    backward_s *= known.halves
    return backward_s * (1 - known.weight_share) + again_s, backward_s * known.weight_share


_Shared = Mapping[tuple[frozenset[int], frozenset[int]], int]  # bytes, by stages and ranks


def _shared_parameters(
    plan: Plan, holders: Sequence[Collection[int]], trainable_bytes: Mapping[str, int]
) -> _Shared:
    """Those that several stages hold on several ranks."""
    stages_of: dict[str, set[int]] = {}
    for stage in plan.stages:
        for name in stage.parameters:
            stages_of.setdefault(name, set()).add(stage.stage)
    shared: dict[tuple[frozenset[int], frozenset[int]], int] = {}
    for name, stages in stages_of.items():
        ranks = frozenset(rank for stage in stages for rank in holders[stage])
        if len(stages) > 1 and len(ranks) > 1 and trainable_bytes.get(name):
            key = frozenset(stages), ranks
            shared[key] = shared.get(key, 0) + trainable_bytes[name]
    return shared


def _own_bytes(stage: StagePlan, shared: _Shared) -> int:
    """Gradients of parameters that no other stage holds."""
    others = sum(num_bytes for (stages, _), num_bytes in shared.items() if stage.stage in stages)
    return max(0, stage.memory.gradient_bytes - others)


def _all_reduce_s(num_bytes: int, num_ranks: int, cluster: Cluster, known: Calibration) -> float:
    """Bucket by bucket, as the runtime adds them up: each of a ring's steps has a latency for each."""
    pairs = [(a, b) for a in range(len(cluster)) for b in range(len(cluster)) if a != b]
    if num_ranks == 1 or not pairs:
        return 0.0
    if known.ring_s_per_byte is not None:
        return known.ring_s_per_byte * ring_bytes(num_bytes, num_ranks)
    latency_s = max(cluster.latency_s[a][b] for a, b in pairs) * math.ceil(num_bytes / GRADIENT_BUCKET_BYTES)
    bytes_per_s = min(cluster.bytes_per_s[a][b] for a, b in pairs)
    return 2 * (num_ranks - 1) * latency_s + ring_bytes(num_bytes, num_ranks) / bytes_per_s


def _links(
    plan: Plan, cluster: Cluster, known: Calibration, holders: Sequence[Collection[int]]
) -> Iterator[LinkTimes]:
    sizes: dict[tuple[int, int], tuple[int, int]] = {}
    for transfer in plan.transfers:
        pair = (transfer.source, transfer.target)
        there, back = sizes.get(pair, (0, 0))
        sizes[pair] = (there + transfer.bytes, back + transfer.gradient_bytes)
    for pair, num_bytes in sorted(sizes.items()):
        source, target = pair
        on = plan.stages[source].device, plan.stages[target].device
        places = {
            (one, other): (_device_of(one, source, plan, holders), _device_of(other, target, plan, holders))
            for one in holders[source]
            for other in holders[target]
        }
        elsewhere = {
            ranks: _link(pair, own, num_bytes, cluster, known) for ranks, own in places.items() if own != on
        }
        yield replace(_link(pair, on, num_bytes, cluster, known), elsewhere=elsewhere)


def _device_of(rank: int, stage: int, plan: Plan, holders: Sequence[Collection[int]]) -> int:
    """Where a rank that holds the stage stands."""
    stands_there = rank < plan.num_stages and rank in holders[rank]
    return plan.stages[rank if stands_there else stage].device


def _link(
    pair: tuple[int, int],
    on: tuple[int, int],
    num_bytes: tuple[int, int],
    cluster: Cluster,
    known: Calibration,
) -> LinkTimes:
    """Between two stages on these devices, with so many bytes there and back."""
    (a, b), (there, back) = on, num_bytes
    if a == b:
        return LinkTimes(*pair, gradient_s=0.0 if back else None, gradient_latency_s=0.0)
    return LinkTimes(
        *pair,
        latency_s=cluster.latency_s[a][b],
        activation_s=there / cluster.bytes_per_s[a][b],
        gradient_s=back / cluster.bytes_per_s[b][a] if back else None,
        gradient_latency_s=cluster.latency_s[b][a],
        send_s=known.send_s,
        receive_s=known.receive_s,
    )
