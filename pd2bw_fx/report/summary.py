"""The head of the page: a few figures that say how good the plan is, and links to its parts."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from pd2bw_fx.metrics import Metrics
from pd2bw_fx.plan import Plan
from pd2bw_fx.report import svg
from pd2bw_fx.report.devices import fullest_device, is_on_every_device
from pd2bw_fx.timeline import Timeline
from pd2bw_fx.units import format_bytes, format_seconds


def tiles_html(plan: Plan, timeline: Timeline | None, metrics: Metrics | None) -> str:
    """Returns the figures: each one large, with its name above and its origin below."""
    shown = "".join(
        f'<div class="pd-tile"><span>{escape(what)}</span><b>{escape(figure)}</b>'
        f"<i>{escape(whence)}</i></div>"
        for what, figure, whence in _figures(plan, timeline, metrics)
    )
    return f'<div class="pd-tiles">{shown}</div>'


def nav_html(parts: Sequence[tuple[str, str]]) -> str:
    """Returns links to the sections with these ids and heads."""
    links = "".join(f'<a href="#{name}">{escape(head)}</a>' for name, head in parts)
    return f'<nav class="pd-nav" aria-label="Parts of this page">{links}</nav>'


def _figures(
    plan: Plan, timeline: Timeline | None, metrics: Metrics | None
) -> Iterable[tuple[str, str, str]]:
    if metrics is not None and metrics.throughput > 0:
        yield "Measured", f"{metrics.throughput:.4g}/s", "microbatches, median update"
    if timeline is not None:
        yield "Predicted", f"{timeline.throughput:.4g}/s", f"microbatches, {timeline.method} simulated"
    each = "each device, of its own microbatches" if is_on_every_device(plan) else plan.slowest_place
    where = f"a microbatch, {each}"
    yield "Bottleneck", format_seconds(plan.bottleneck_s), where
    gap = "0%" if plan.gap <= 1e-9 else f"≤ {plan.gap:.2%}"
    if plan.bound_s > 0:
        yield "From the optimum", gap, f"proven by {plan.solver} in {format_seconds(plan.planning_s)}"
    fullest = fullest_device(plan)
    held = f"{format_bytes(fullest.num_bytes)} of {format_bytes(fullest.limit_bytes)}"
    share = f"{fullest.share:.1%}" if fullest.share < 0.1 else f"{fullest.share:.0%}"
    yield "Fullest device", share, f"{fullest.place}: {held}"
    if plan.transfers:
        crossing = sum(transfer.bytes + transfer.gradient_bytes for transfer in plan.transfers)
        values = len({transfer.value for transfer in plan.transfers})
        told = f"a microbatch, {values} {'value' if values == 1 else 'values'} and gradients"
        yield "Crosses the cuts", format_bytes(crossing), told


def summary_style() -> str:
    """Returns the rules for `tiles_html` and `nav_html`, once in a page."""

    def colours(scheme: int) -> str:
        surface, muted = svg.SURFACE[scheme], svg.MUTED[scheme]
        return (
            f".pd-tile{{background:{surface}}}.pd-tile span,.pd-tile i,.pd-nav a{{color:{muted}}}"
            f".pd-nav{{background:{svg.PAGE[scheme]};border-color:{svg.RULE[scheme]}}}"
            f".pd-nav a:hover{{color:{svg.INK[scheme]}}}"
        )

    return (
        ".pd-tiles{display:grid;grid-template-columns:repeat(auto-fit,minmax(165px,1fr));gap:12px}"
        ".pd-tile{border-radius:8px;padding:12px 14px;display:flex;flex-direction:column;gap:2px;min-width:0}"
        ".pd-tile span{font-size:12px}.pd-tile i{font-style:normal;font-size:11.5px;line-height:1.35}"
        ".pd-tile b{font-size:21px;font-weight:600;font-variant-numeric:tabular-nums}"
        ".pd-nav{position:sticky;top:0;z-index:2;display:flex;flex-wrap:wrap;gap:4px 20px;"
        "margin:16px -16px 0;padding:10px 16px;border-bottom:1px solid;font-size:13px}"
        ".pd-nav a{text-decoration:none}"
        "section{scroll-margin-top:48px}details{scroll-margin-top:56px}"
        f"{colours(0)}@media (prefers-color-scheme:dark){{{colours(1)}}}"
    )
