"""Predictions beside what a training run measured, as a table."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from html import escape

from pd2bw_fx.actions import Kind
from pd2bw_fx.costs import Costs
from pd2bw_fx.metrics import Metrics
from pd2bw_fx.timeline import Timeline
from pd2bw_fx.units import counted, format_seconds

_COLUMNS = ("", "predicted", "measured", "measured / predicted")


def measured_html(predicted: Timeline, metrics: Metrics, costs: Costs) -> str:
    """Returns a row for each figure that both have. `plan_style` of the notebook is its style."""
    head = "".join(f"<th>{name}</th>" for name in _COLUMNS)
    rows = "".join(
        "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>"
        for row in comparison(predicted, metrics)
    )
    told = (
        f"{metrics.method}, {counted(metrics.microbatches_per_update, 'microbatch')} an update, "
        f"{counted(len(metrics.losses), 'update')} measured: the median of them"
    )
    if costs.origin == "analytic":
        told += '; predicted from estimates (costs="measured" is for figures to compare)'
    return (
        f'<div class="pd-pipeline"><p class="pd-head">{escape(told)}</p><div class="pd-scroll">'
        f'<table class="pd-plan"><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div></div>'
    )


def comparison(predicted: Timeline, metrics: Metrics) -> Iterable[tuple[str, str, str, str]]:
    """Returns what is compared, both figures, and their ratio."""
    m = metrics.microbatches_per_update
    yield _row("microbatches/s", predicted.throughput, metrics.throughput, "{:.4g}".format)
    if predicted.throughput > 0 and metrics.throughput > 0:
        yield _row("an update", m / predicted.throughput, m / metrics.throughput, format_seconds)
    measured = metrics.timeline
    if measured is None or measured.num_ranks != predicted.num_ranks:
        return
    idle, measured_idle = _idle_share(predicted), _idle_share(measured)
    if idle is not None and measured_idle is not None:
        yield _row("idle share between updates", idle, measured_idle, "{:.1%}".format)
    for rank in range(predicted.num_ranks):
        work_s = (_work_s(predicted, rank), _work_s(measured, rank))
        yield _row(f"work of rank {rank} on a microbatch", *work_s, format_seconds)


def _idle_share(timeline: Timeline) -> float | None:
    """Returns all ranks' idle share, from each rank's first update in the timeline until one makes its last.

    Filling and draining, which may be in one timeline and not in the other, are left out in this way. None
    where nothing remains.
    """
    updates: list[list[float]] = [[] for _ in range(timeline.num_ranks)]
    for event in timeline.compute():
        if event.kind is Kind.UPDATE:
            updates[event.rank].append(event.end_s)
    if not all(updates):
        return None
    start_s, end_s = max(map(min, updates)), min(map(max, updates))
    if end_s <= start_s:
        return None
    busy_s = sum(max(0.0, min(e.end_s, end_s) - max(e.start_s, start_s)) for e in timeline.compute())
    return 1.0 - busy_s / (timeline.num_ranks * (end_s - start_s))


def _row(
    name: str, predicted: float, measured: float, shown: Callable[[float], str]
) -> tuple[str, str, str, str]:
    ratio = f"{measured / predicted:.2f}" if predicted > 0 else "-"
    return name, shown(predicted), shown(measured), ratio


def _work_s(timeline: Timeline, rank: int) -> float:
    """Returns a rank's seconds of computation for each microbatch that it worked on."""
    microbatches = {event.microbatch for event in timeline.compute() if event.rank == rank} - {-1}
    return timeline.busy_s[rank] / max(1, len(microbatches))
