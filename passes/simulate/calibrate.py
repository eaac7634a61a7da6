"""Reads from records of a run what the simulator needs besides the operators' times."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean, median

from pd2bw_fx.actions import Kind
from pd2bw_fx.arguments import require_kind
from pd2bw_fx.costs import Calibration, ring_bytes
from pd2bw_fx.errors import InputError
from pd2bw_fx.plan import Plan
from pd2bw_fx.timeline import RECEIVES, SENDS, Timeline

_WHOLE = (Kind.FORWARD, Kind.BACKWARD, Kind.UPDATE)
_HALVES = (Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT)


def calibrate(plan: Plan, timelines: Sequence[Timeline]) -> Calibration:
    """Compares measured timelines of this plan's stages, with one stage on a rank, with the plan's times.

    At least one timeline needs whole backwards and an update; one of a zero-bubble method is needed for the
    halves of a backward. An action counts as the median of its kind at its stage. A receive counts as the
    quickest tenth of all, which waited for nothing.

    Raises InputError where an action is missing.
    """
    for timeline in timelines:
        require_kind("one of the timelines", timeline, Timeline, "a Timeline (of Metrics or Engine.records)")
    whole = [t for t in timelines if {e.kind for e in t.events}.issuperset(_WHOLE)]
    split = [t for t in timelines if {e.kind for e in t.events}.issuperset(_HALVES)]
    if not whole:
        raise InputError(
            "none of the timelines has forwards, whole backwards and updates; record an update of 1f1b"
        )
    stages = plan.stages
    alone = [timeline for timeline in whole if not _shares(timeline)]
    sharing = [timeline for timeline in whole if _shares(timeline)]
    took = {kind: [_typical_s(alone or whole, kind, stage.stage) for stage in stages] for kind in _WHOLE}
    shared_s = [_typical_s(sharing or whole, Kind.BACKWARD, stage.stage) for stage in stages]
    weights = sum(stage.memory.gradient_bytes for stage in stages)
    halves, share = _halves(plan, split, took[Kind.BACKWARD])
    again_s = sum(stage.forward_s for stage in stages if stage.recompute)
    forward = _ratio(sum(took[Kind.FORWARD]), sum(stage.forward_s for stage in stages))
    return Calibration(
        forward=forward,
        backward=_ratio(
            sum(took[Kind.BACKWARD]) - forward * again_s, sum(stage.backward_s for stage in stages)
        ),
        halves=halves,
        weight_share=share,
        shared=_ratio(sum(shared_s), sum(took[Kind.BACKWARD])) if alone else 1.0,
        update_s_per_byte=_ratio(sum(took[Kind.UPDATE]), weights) if weights else 0.0,
        send_s=_message_s(whole, SENDS, 0.5),
        receive_s=_message_s(whole, RECEIVES, 0.1),
        between_s=fmean(_between_s(timeline) for timeline in whole),
        ring_s_per_byte=_ring_s_per_byte(plan, whole),
    )


def _halves(plan: Plan, split: Sequence[Timeline], backward_s: Sequence[float]) -> tuple[float | None, float]:
    """Returns the time of both halves over that of a whole backward, and the share of the second half.

    Only stages that send gradients on count; others have nothing to do in the first half.
    """
    sending = {transfer.target for transfer in plan.transfers if transfer.gradient_bytes}
    if not split or not sending:
        return None, 0.5
    inputs_s, weights_s = (sum(_typical_s(split, kind, stage) for stage in sending) for kind in _HALVES)
    together_s = inputs_s + weights_s
    return _ratio(together_s, sum(backward_s[stage] for stage in sending)), _ratio(weights_s, together_s)


def _shares(timeline: Timeline) -> bool:
    """Returns whether several ranks hold the same stage."""
    holders = {(event.stage, event.rank) for event in timeline.events}
    return len(holders) > len({stage for stage, _ in holders})


def _typical_s(timelines: Sequence[Timeline], kind: Kind, stage: int) -> float:
    """Returns the median over updates of the mean time of an action.

    The mean is taken over an update because its first microbatch accumulates less.
    """
    means = []
    for timeline in timelines:
        by_update: dict[int, list[float]] = {}
        for event in timeline.events:
            if (event.kind, event.stage) == (kind, stage):
                update = (
                    event.version
                    if kind is Kind.UPDATE
                    else event.microbatch // timeline.microbatches_per_update
                )
                by_update.setdefault(update, []).append(event.duration_s)
        means += [fmean(own) for own in by_update.values()]
    if not means:
        raise InputError(f"the timelines have no {kind.value} of stage {stage}; record a run of this plan")
    return median(means)


def _message_s(timelines: Sequence[Timeline], kinds: frozenset[Kind], quantile: float) -> float:
    seconds = sorted(e.duration_s for t in timelines for e in t.events if e.kind in kinds)
    return seconds[int(quantile * (len(seconds) - 1))] if seconds else 0.0


def _between_s(timeline: Timeline) -> float:
    """Returns the seconds of an update in which a rank is between two actions."""
    found: list[float] = []
    for rank in range(timeline.num_ranks):
        ended_s, gaps_s = None, 0.0
        for event in timeline.of_rank(rank):
            gaps_s += 0.0 if ended_s is None else max(0.0, event.start_s - ended_s)
            ended_s = event.end_s
            if event.kind is Kind.UPDATE:
                found.append(gaps_s)
                gaps_s = 0.0
    return median(found[timeline.num_ranks :] or found)


def _ring_s_per_byte(plan: Plan, timelines: Sequence[Timeline]) -> float | None:
    """Returns the seconds of an all-reduce for each byte that its ring sends, or None where no rank waited.

    For each update it takes the rank that waited least, because that rank came last and waited for the
    all-reduce alone.
    """
    found: list[float] = []
    for timeline in timelines:
        holders = [{e.rank for e in timeline.events if e.stage == s.stage} for s in plan.stages]
        waits: dict[int, dict[int, float]] = {}
        for event in timeline.events:
            if event.kind is Kind.ALL_REDUCE:
                of_ranks = waits.setdefault(event.version, {})
                of_ranks[event.rank] = of_ranks.get(event.rank, 0.0) + event.duration_s
        for of_ranks in waits.values():
            rank, waited_s = min(of_ranks.items(), key=lambda item: item[1])
            sent = sum(
                ring_bytes(stage.memory.gradient_bytes, len(own))
                for stage, own in zip(plan.stages, holders, strict=True)
                if rank in own
            )
            if sent:  # else the rank waited only for the norm of the gradient
                found.append(waited_s / sent)
    return median(found) if found else None


def _ratio(found: float, planned: float) -> float:
    return found / planned if planned > 0 else 1.0
