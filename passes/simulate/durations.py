"""The model of time: the seconds of one microbatch at each stage and on each link, and of an update."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

from pd2bw_fx.cluster import Cluster
from pd2bw_fx.costs import GRADIENT_BUCKET_BYTES, Calibration, ring_bytes, ring_s
from pd2bw_fx.errors import InputError
from pd2bw_fx.plan import Plan, StagePlan

from .sums import Tied


@dataclass(frozen=True, slots=True)
class LinkTimes:
    """The times of a message from stage `source` to stage `target` for one microbatch, and of its gradient.

    `activation_s` and `gradient_s` are bytes / bandwidth, for which the link is busy; the latency comes on
    top. `gradient_s` is None where no gradient flows back, and the source then waits for none. `send_s` and
    `receive_s` are the time that the rank itself is busy with a message, at either end. `elsewhere` has the
    times between pairs of ranks (one of the source, one of the target) that are on other devices than the
    plan names for the stages.
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

    A backward has two halves. `backward_s` is that of the gradients of the inputs, with the recomputation of
    the forward, and `weight_backward_s` that of the gradients of the weights; without the latter all of it is
    in `backward_s`. `undivided_s` is the time of a backward that is not divided, where that is not the sum of
    both. `all_reduce_s` is the time that several ranks of one stage need to sum the gradients of an update,
    once all of them have theirs. `tied` has the same for parameters that several stages hold.
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
    ) -> Self:
        """Makes the times of stages in a row, each linked to the next with a latency alone.

        Papers give their numbers for such pipelines.
        """
        d = len(forward_s)
        return cls(
            forward_s=tuple(forward_s),
            backward_s=tuple(backward_s),
            update_s=(update_s,) * d,
            links=tuple(LinkTimes(stage, stage + 1, latency_s) for stage in range(d - 1)),
            weight_backward_s=None if weight_backward_s is None else tuple(weight_backward_s),
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
        """Makes compute times from the plan, and link times from its transfers and the cluster's links.

        All values that a stage sends to another one for a microbatch travel as one message. Half of a
        backward is for the weights, as in a matrix product. `holders` are the ranks of each stage, which sum
        their gradients in a ring (`costs.ring_s`) over the slowest of the cluster's links. A rank with the
        number of one of its stages is on the device that the plan has for that stage, so two ranks with the
        same two stages (chimera) use links of their own. Parameters that several stages hold are summed over
        all ranks that hold them, if `trainable_bytes` has their size. `calibration` is what a run on this
        machine took besides; without it the engine itself takes no time.
        """
        beyond = [stage for stage in plan.stages if stage.device >= len(cluster)]
        if beyond:
            raise InputError(
                f"stage {beyond[0].stage} is on device {beyond[0].device}, and the cluster has "
                f"{len(cluster)}; simulate on the cluster that the plan was made for"
            )
        holders = holders or [(stage,) for stage in range(plan.num_stages)]
        known = calibration or Calibration()
        shared = _shared_parameters(plan, holders, trainable_bytes or {})
        # The time that a rank is between two actions does not depend on how many stages share the rank.
        num_ranks = len({rank for ranks in holders for rank in ranks})
        between_s = known.between_s * num_ranks / sum(len(ranks) for ranks in holders)
        times = [
            _stage_times(plan, stage, len(ranks), known)
            for stage, ranks in zip(plan.stages, holders, strict=True)
        ]
        sums_s = [
            _all_reduce_s(_own_bytes(stage, shared), len(ranks), cluster, known)
            for stage, ranks in zip(plan.stages, holders, strict=True)
        ]
        return cls(
            forward_s=tuple(each.forward_s for each in times),
            backward_s=tuple(each.input_gradient_s for each in times),
            update_s=tuple(update_s + each.update_s + between_s for each in times),
            links=tuple(_links(plan, cluster, known, holders)),
            weight_backward_s=tuple(each.weight_gradient_s for each in times),
            all_reduce_s=tuple(sums_s),
            undivided_s=tuple(each.undivided_s for each in times),
            tied=tuple(
                Tied(stages, ranks, _all_reduce_s(num_bytes, len(ranks), cluster, known))
                for (stages, ranks), num_bytes in shared.items()
            ),
        )


@dataclass(frozen=True, slots=True)
class _StageTimes:
    """The compute times of one stage."""

    forward_s: float
    input_gradient_s: float  # the first half of a backward, with the recomputation
    weight_gradient_s: float  # the second half
    undivided_s: float  # a backward that is not divided
    update_s: float


def _stage_times(plan: Plan, stage: StagePlan, num_holders: int, known: Calibration) -> _StageTimes:
    again_s = known.forward * stage.forward_s if stage.recompute else 0.0
    backward_s = known.backward * (known.shared if num_holders > 1 else 1.0) * stage.backward_s
    inputs_s, weights_s = _halves_s(plan, stage, backward_s, again_s, known)
    return _StageTimes(
        forward_s=known.forward * stage.forward_s,
        input_gradient_s=inputs_s,
        weight_gradient_s=weights_s,
        undivided_s=backward_s + again_s,
        update_s=known.update_s_per_byte * stage.memory.gradient_bytes,
    )


def _halves_s(
    plan: Plan, stage: StagePlan, backward_s: float, again_s: float, known: Calibration
) -> tuple[float, float]:
    """Returns the times of a backward's halves. The first one has the recomputation, `again_s`."""
    if known.halves is None:
        return backward_s / 2 + again_s, backward_s / 2
    if not any(transfer.target == stage.stage and transfer.gradient_bytes for transfer in plan.transfers):
        return again_s, backward_s
    backward_s *= known.halves
    return backward_s * (1 - known.weight_share) + again_s, backward_s * known.weight_share


_Shared = Mapping[tuple[frozenset[int], frozenset[int]], int]  # bytes, by (stages, ranks)


def _shared_parameters(
    plan: Plan, holders: Sequence[Collection[int]], trainable_bytes: Mapping[str, int]
) -> _Shared:
    """Returns the bytes of parameters that several stages hold, on several ranks."""
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
    """Returns the bytes of the gradients of parameters that no other stage holds."""
    others = sum(num_bytes for (stages, _), num_bytes in shared.items() if stage.stage in stages)
    return max(0, stage.memory.gradient_bytes - others)


def _all_reduce_s(num_bytes: int, num_ranks: int, cluster: Cluster, known: Calibration) -> float:
    """Returns the time to sum gradients over ranks, with a ring for each bucket as in the runtime."""
    pairs = [(a, b) for a in range(len(cluster)) for b in range(len(cluster)) if a != b]
    if num_ranks == 1 or not pairs:
        return 0.0
    if known.ring_s_per_byte is not None:
        return known.ring_s_per_byte * ring_bytes(num_bytes, num_ranks)
    num_buckets = math.ceil(num_bytes / GRADIENT_BUCKET_BYTES)
    return ring_s(
        num_bytes,
        num_ranks,
        step_s=max(cluster.latency_s[a][b] for a, b in pairs) * num_buckets,
        bytes_per_s=min(cluster.bytes_per_s[a][b] for a, b in pairs),
    )


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
        devices = {
            (one, other): (_device_of(one, source, plan, holders), _device_of(other, target, plan, holders))
            for one in holders[source]
            for other in holders[target]
        }
        elsewhere = {
            ranks: _link(pair, own, num_bytes, cluster, known) for ranks, own in devices.items() if own != on
        }
        yield replace(_link(pair, on, num_bytes, cluster, known), elsewhere=elsewhere)


def _device_of(rank: int, stage: int, plan: Plan, holders: Sequence[Collection[int]]) -> int:
    """Returns the device of a rank that holds the stage."""
    is_numbered_so = rank < plan.num_stages and rank in holders[rank]  # by one of its own stages
    return plan.stages[rank if is_numbered_so else stage].device


def _link(
    pair: tuple[int, int],
    on: tuple[int, int],
    num_bytes: tuple[int, int],
    cluster: Cluster,
    known: Calibration,
) -> LinkTimes:
    """Returns the times between two stages on the devices `on`, for (bytes there, bytes back)."""
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
