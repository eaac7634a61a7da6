"""One self-contained page about a pipeline: the plan, its graph, its time, its memory, and its code."""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from pd2bw_fx.costs import Costs
from pd2bw_fx.graph import OperatorGraph
from pd2bw_fx.metrics import Metrics
from pd2bw_fx.plan import Plan
from pd2bw_fx.report import svg
from pd2bw_fx.report.code import code_html
from pd2bw_fx.report.graph import graph_html, graph_style
from pd2bw_fx.report.loads import loads_svg
from pd2bw_fx.report.losses import losses_svg
from pd2bw_fx.report.measured import measured_html
from pd2bw_fx.report.memory import memory_svg
from pd2bw_fx.report.notebook import plan_html, plan_style
from pd2bw_fx.report.summary import nav_html, summary_style, tiles_html
from pd2bw_fx.report.timeline import timeline_svg
from pd2bw_fx.stage import Port, StageProgram
from pd2bw_fx.timeline import Timeline

# Classes of code.py, with their (light, dark) colours.
_CODE = {
    "keyword": ("#8a3ffc", "#be95ff"),
    "string": ("#0b7a53", "#6fdcab"),
    "number": ("#a8480f", "#ffb27a"),
    "comment": svg.MUTED,
    "line": svg.MUTED,
    "name": ("#1f5fb0", "#7db7ff"),
}


def page_html(
    graph: OperatorGraph,
    costs: Costs,
    plan: Plan,
    programs: Sequence[StageProgram],
    timeline: Timeline | None = None,
    *,
    metrics: Metrics | None = None,
) -> str:
    """Returns a whole HTML document without fonts, scripts or links from anywhere else.

    `timeline` is the simulated one; what a real run measured is shown beside it.
    """
    title = f"{graph.model_name} in {plan.num_stages} {'stage' if plan.num_stages == 1 else 'stages'}"
    parts = [
        ("plan", "The plan", f'<div class="pd-pipeline">{plan_html(graph, costs, plan)}</div>'),
        ("graph", "The graph", graph_html(graph, costs, plan, programs)),
        ("time", "Time", _pictures([loads_svg(plan), *_timelines(timeline, metrics)])),
        ("memory", "Memory", _pictures([memory_svg(plan)])),
    ]
    if metrics is not None and timeline is not None:
        parts.insert(1, ("measured", "Predicted and measured", measured_html(timeline, metrics, costs)))
    if metrics is not None and any(map(math.isfinite, metrics.losses)):
        curve = {metrics.method: metrics.losses}
        parts.append(("loss", "Loss", _pictures([losses_svg(curve, first=metrics.first_update + 1)])))
    if programs:
        stages = "".join(_stage_html(graph, program) for program in programs)
        parts.append(("code", "The code of each stage", stages))
    nav = nav_html([(name, head) for name, head, _ in parts])
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"/>'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"/>'
        f'<link rel="icon" href="data:,"/><title>{escape(title)}</title>'
        f"<style>{plan_style()}{graph_style()}{summary_style()}{_style()}</style></head>"
        f"<body><main><h1>{escape(title)}</h1>{tiles_html(plan, timeline, metrics)}{nav}"
        f"{''.join(_part(*part) for part in parts)}</main></body></html>\n"
    )


def _part(name: str, head: str, content: str) -> str:
    return f'<section id="{name}"><h2>{escape(head)}</h2>{content}</section>'


def _pictures(pictures: Sequence[str]) -> str:
    return "".join(f'<div class="pd-picture-box">{picture}</div>' for picture in pictures)


def _timelines(timeline: Timeline | None, metrics: Metrics | None) -> list[str]:
    measured = None if metrics is None else metrics.timeline
    return [timeline_svg(shown) for shown in (timeline, measured) if shown is not None]


def _stage_html(graph: OperatorGraph, program: StageProgram) -> str:
    opened = ' open="open"' if program.stage == 0 else ""
    incoming = "".join(_port_html(graph, port) for port in program.inputs)
    outgoing = "".join(_port_html(graph, port) for port in program.outputs)
    lines = len(program.source.splitlines())
    return (
        f'<details class="pd-stage" id="stage-{program.stage}"{opened}>'
        f"<summary>Stage {program.stage}: {escape(program.class_name)}, {lines} lines</summary>"
        f'<div class="pd-ports"><div><h3>in</h3><ul>{incoming}</ul></div>'
        f"<div><h3>out</h3><ul>{outgoing}</ul></div></div>"
        f"{code_html(program.source, anchor=f'code-{program.stage}')}</details>"
    )


def _port_html(graph: OperatorGraph, port: Port) -> str:
    facts = [str(port.spec)]
    if port.source is not None:
        facts.append(f"from stage {port.source}")
    elif port.value in graph.inputs:
        facts.append("input of the model")
    if port.targets:
        facts.append(f"to stage {', '.join(map(str, port.targets))}")
    if port.model_output is not None:
        facts.append(f"the model's {port.model_output}")
    operator = graph.operators.get(port.value)
    if operator is not None and operator.source_line:
        facts.append(f"made in {operator.source_line}")
    return f"<li><code>{escape(port.name)}</code> {escape(', '.join(facts))}</li>"


def _style() -> str:
    def colours(scheme: int) -> str:
        code = "".join(f".pd-code .pd-{name}{{color:{pair[scheme]}}}" for name, pair in _CODE.items())
        return (
            f"body{{background:{svg.PAGE[scheme]};color:{svg.INK[scheme]}}}"
            f".pd-stage{{background:{svg.SURFACE[scheme]}}}"
            f".pd-stage summary,.pd-code{{border-color:{svg.RULE[scheme]}}}"
            f".pd-row.pd-shown{{background:{('#fff1b8', '#4a3f12')[scheme]}}}"
            f".pd-ports{{color:{svg.MUTED[scheme]}}}.pd-ports code{{color:{svg.INK[scheme]}}}{code}"
        )

    return (
        ":root{color-scheme:light dark}"
        f"body{{margin:0;font:14px/1.5 {svg.FONT}}}"
        "main{max-width:1132px;margin:0 auto;padding:24px 16px 64px}"
        "h1{font-size:24px;margin:0 0 16px}h2{font-size:18px;margin:32px 0 12px}h3{font-size:13px;margin:0}"
        ".pd-picture-box{margin:0 0 12px;overflow-x:auto}"
        ".pd-picture-box svg{display:block;width:100%;min-width:760px}"
        ".pd-row.pd-shown{display:inline-block;min-width:100%}"
        ".pd-stage{border-radius:8px;margin:0 0 12px;padding:0 16px}"
        ".pd-stage summary{cursor:pointer;font-weight:600;padding:12px 0}"
        ".pd-ports{display:flex;flex-wrap:wrap;gap:8px 48px;padding:0 0 12px}"
        ".pd-ports ul{margin:0;padding-left:18px}"
        ".pd-code{margin:0;padding:12px 0;border-top:1px solid;overflow-x:auto;tab-size:4;"
        "font:12.5px/1.5 ui-monospace,SFMono-Regular,Menlo,Consolas,monospace}"
        ".pd-code .pd-line{user-select:none;opacity:.6}.pd-code .pd-comment{font-style:italic}"
        f"{colours(0)}@media (prefers-color-scheme:dark){{{colours(1)}}}"
    )
