"""What a notebook shows of a pipeline: the plan as a table, its timeline and its memory. No scripts."""

from __future__ import annotations

from html import escape

from pd2bw_fx.costs import Costs
from pd2bw_fx.graph import OperatorGraph
from pd2bw_fx.plan import Plan
from pd2bw_fx.report import svg
from pd2bw_fx.report.memory import memory_svg
from pd2bw_fx.report.table import COLUMNS, cut_lines, headline, stage_row, verdict
from pd2bw_fx.report.timeline import timeline_svg
from pd2bw_fx.timeline import Timeline

_MOST_ROWS = 12  # stages; a table with more scrolls in a box of its own


def pipeline_html(graph: OperatorGraph, costs: Costs, plan: Plan, timeline: Timeline | None = None) -> str:
    """Returns a piece of HTML for another page: for `_repr_html_` and for reports."""
    pictures = [memory_svg(plan)] if timeline is None else [timeline_svg(timeline), memory_svg(plan)]
    shown = "".join(f'<div class="pd-part">{picture}</div>' for picture in pictures)
    return (
        f'<div class="pd-pipeline"><style>{plan_style()}</style>{plan_html(graph, costs, plan)}{shown}</div>'
    )


def plan_html(graph: OperatorGraph, costs: Costs, plan: Plan) -> str:
    """Returns the plan's table: a row for each stage, and below it what crosses the cut from that stage."""
    rows = []
    for stage in plan.stages:
        rows.append(_row("td", stage_row(graph, stage)))
        rows += [
            f'<tr class="pd-cut"><td></td><td colspan="{len(COLUMNS) - 1}">{escape(line)}</td></tr>'
            for line in cut_lines(graph, plan, stage.stage)
        ]
    tall = " pd-tall" if plan.num_stages > _MOST_ROWS else ""
    return (
        f'<p class="pd-head">{escape(headline(graph, plan))}</p>'
        f'<div class="pd-scroll{tall}"><table class="pd-plan"><thead>{_row("th", COLUMNS)}</thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
        f'<p class="pd-verdict">{"<br>".join(escape(line) for line in verdict(costs, plan))}</p>'
    )


def _row(cell: str, texts: tuple[str, ...]) -> str:
    return "<tr>" + "".join(f"<{cell}>{escape(text)}</{cell}>" for text in texts) + "</tr>"


def plan_style() -> str:
    """Returns the rules that `plan_html` and `pipeline_html` need in a style element, once in a page."""

    def colours(scheme: int) -> str:
        return (
            f".pd-pipeline{{background:{svg.SURFACE[scheme]};color:{svg.INK[scheme]}}}"
            f".pd-pipeline .pd-cut td,.pd-pipeline th,.pd-verdict{{color:{svg.MUTED[scheme]}}}"
            f".pd-pipeline td,.pd-pipeline th{{border-color:{svg.RULE[scheme]}}}"
            f".pd-pipeline .pd-tall th{{background:{svg.SURFACE[scheme]}}}"
        )

    return (
        f".pd-pipeline{{font:13px/1.45 {svg.FONT};padding:14px 16px;border-radius:8px;max-width:1132px}}"
        ".pd-pipeline .pd-head{font-size:15px;font-weight:600;margin:0 0 10px}"
        ".pd-pipeline .pd-scroll{overflow-x:auto}.pd-pipeline .pd-tall{overflow:auto;max-height:430px}"
        ".pd-pipeline .pd-tall th{position:sticky;top:0}"
        ".pd-pipeline .pd-plan{border-collapse:collapse;width:100%;margin:0;font-size:13px}"
        ".pd-pipeline .pd-plan tr{background:none}"
        ".pd-pipeline .pd-plan td,.pd-pipeline .pd-plan th{text-align:left;vertical-align:top;"
        "padding:5px 14px 5px 0;border-style:solid;border-width:1px 0 0;white-space:nowrap}"
        ".pd-pipeline .pd-plan td:nth-child(3){white-space:normal;min-width:200px}"
        ".pd-pipeline .pd-plan th{font-weight:500;border-top:0}"
        ".pd-pipeline .pd-plan .pd-cut td{border-top:0;padding-top:0;font-size:12px;white-space:normal}"
        ".pd-pipeline .pd-verdict{margin:10px 0 14px}"
        ".pd-pipeline .pd-part{margin:8px -16px 0}"
        f"{colours(0)}@media (prefers-color-scheme:dark){{{colours(1)}}}"
    )
