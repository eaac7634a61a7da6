"""Why a stage ends where it does, as far as the plan itself tells."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from pd2bw_fx.plan import Plan, StagePlan, Transfer
from pd2bw_fx.units import format_bytes, format_seconds

from .literals import plain

_TIGHT = 0.01  # this near to a limit or the bottleneck, as a share of it, counts as at it
_SHOWN = 3


def cut_reason(plan: Plan, stage: int, names: Mapping[str, str]) -> Iterator[str]:
    """Yields what crosses the stage's borders, what binds the stage, and what is proven.

    There is nothing to say of a plan without costs. `names` are the stages' names of the values that cross.
    """
    if plan.num_stages == 1 or plan.bottleneck_s <= 0:
        return
    for side, other in ((stage - 1, "before"), (stage, "behind")):
        if 0 <= side < plan.num_stages - 1:
            crossing = [t for t in plan.transfers if t.source <= side < t.target]
            yield f"{other} it {_crossing(crossing, names)}"
    planned = plan.stages[stage]
    yield _load(plan, planned)
    if planned.memory.total_bytes >= (1 - _TIGHT) * planned.memory_limit_bytes:
        yield "its memory is used up: it can take on no more"
    yield _proof(plan)


def _crossing(sent: Sequence[Transfer], names: Mapping[str, str]) -> str:
    """Describes what crosses a border; each value is named once, however many stages it is sent to."""
    if not sent:
        return "nothing crosses"
    crossing = dict.fromkeys(transfer.value for transfer in sent)
    shown_as = [names.get(value, plain(value)) for value in crossing]
    more = f" and {len(shown_as) - _SHOWN} more" if len(shown_as) > _SHOWN else ""
    shown = " and ".join(shown_as) if len(shown_as) == 2 else ", ".join(shown_as[:_SHOWN])
    num_bytes = sum(transfer.bytes + transfer.gradient_bytes for transfer in sent)
    verb = "crosses" if len(shown_as) == 1 else "cross"
    with_gradient = ", gradient included" if any(transfer.gradient_bytes for transfer in sent) else ""
    return f"{shown}{more} {verb}, {format_bytes(num_bytes)}{with_gradient}"


def _load(plan: Plan, planned: StagePlan) -> str:
    """Compares the load of the stage with that of the slowest one."""
    links_s = planned.send_s + planned.receive_s
    links = f", {format_seconds(links_s)} of it on its links" if links_s > 0 else ""
    load = f"its load is {format_seconds(planned.load_s)}{links}"
    slowest = max(plan.stages, key=lambda other: other.load_s)
    if planned.load_s >= (1 - _TIGHT) * slowest.load_s:
        return f"{load}: the bottleneck"
    return f"{load}; the bottleneck is stage {slowest.stage} with {format_seconds(slowest.load_s)}"


def _proof(plan: Plan) -> str:
    if plan.bound_s <= 0:
        return plan.proof
    bound, found = format_seconds(plan.bound_s), format_seconds(plan.bottleneck_s)
    lower = "a lower one" if bound == found else f"a bottleneck under {bound}"
    return f"no other {plan.num_stages} stages that fit have {lower}"
