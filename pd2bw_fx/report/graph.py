"""The operator graph as a picture to move around in: its data, and the script that draws it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

from pd2bw_fx.costs import Costs, OperatorCost
from pd2bw_fx.graph import Operator, OperatorGraph, TensorSpec
from pd2bw_fx.plan import Plan, StagePlan
from pd2bw_fx.report import svg
from pd2bw_fx.report.layout import BOX_HEIGHT, BOX_WIDTH, EVERYWHERE, layout
from pd2bw_fx.report.links import code_lines
from pd2bw_fx.report.table import module_ranges
from pd2bw_fx.stage import StageProgram
from pd2bw_fx.units import format_bytes, format_seconds


def graph_html(graph: OperatorGraph, costs: Costs, plan: Plan, programs: Sequence[StageProgram]) -> str:
    """Returns a canvas with zoom, search and a panel on the operator that was clicked.

    The page needs `graph_style()` once. The piece contains everything: data as JSON, and one script.
    """
    data = graph_data(graph, costs, plan, programs)
    return (
        '<section class="pd-graph" id="pd-graph">'
        '<div class="pd-tools">'
        '<input id="pd-search" type="search" placeholder="Search operators, modules, source lines" '
        'aria-label="Search operators"/><span id="pd-found" aria-live="polite"></span>'
        '<label>colour by <select id="pd-colour"><option value="stage">stage</option>'
        '<option value="time">time</option><option value="memory">memory</option></select></label>'
        '<button id="pd-out" type="button" aria-label="Zoom out">&#8722;</button>'
        '<button id="pd-in" type="button" aria-label="Zoom in">+</button>'
        '<button id="pd-fit" type="button">whole graph</button></div>'
        '<div class="pd-view"><canvas id="pd-canvas" tabindex="0" role="img" '
        'aria-label="The operator graph, a region for each stage. Arrow keys move, plus and minus zoom.">'
        "</canvas>"
        '<aside id="pd-panel" aria-live="polite"></aside></div>'
        f'<script type="application/json" id="pd-data">{_embedded(data)}</script>'
        f"<script>{_file('panel.js')}{_file('graph.js')}</script></section>"
    )


def graph_data(
    graph: OperatorGraph, costs: Costs, plan: Plan, programs: Sequence[StageProgram]
) -> dict[str, Any]:
    """Returns what the script draws.

    Seconds and bytes are as in the costs; boxes are in the layout's units.
    """
    made = layout(graph, plan)
    lines = code_lines(graph, plan, programs)
    index = {name: number for number, name in enumerate((*graph.inputs, *graph.operators))}
    stage_of = plan.stage_of
    nodes = [_input(name, spec, made.places[name]) for name, spec in graph.inputs.items()]
    nodes += [
        _operator(
            operator,
            costs.operators.get(name),
            at=made.places[name],
            stage=stage_of.get(name, EVERYWHERE),
            line=lines.get(name),
            plan=plan,
        )
        for name, operator in graph.operators.items()
    ]
    edges = [
        [index[read], index[name]]
        for name, operator in graph.operators.items()
        for read in operator.reads
        if read in index
    ]
    return {
        "box": [BOX_WIDTH, BOX_HEIGHT],
        "size": [made.width, made.height],
        "regions": [
            {
                "stage": r.stage,
                "at": [r.x, r.y, r.width, r.height],
                "title": title_of(r.stage, plan),
                "short": "each" if r.stage == EVERYWHERE else str(r.stage),
            }
            for r in made.regions
        ],
        "nodes": nodes,
        "edges": edges,
        "stages": [_stage(graph, plan, stage) for stage in plan.stages],
        "transfers": [
            {
                "node": index[t.value],
                "source": t.source,
                "target": t.target,
                "bytes": format_bytes(t.bytes),
                "back": format_bytes(t.gradient_bytes) if t.gradient_bytes else "",
            }
            for t in plan.transfers
        ],
        "hues": svg.HUES,
        "colours": {
            name: getattr(svg, name.upper()) for name in ("surface", "ink", "muted", "track", "rule", "alarm")
        },
    }


def _operator(
    operator: Operator,
    cost: OperatorCost | None,
    *,
    at: tuple[float, float],
    stage: int,
    line: tuple[int, int] | None,
    plan: Plan,
) -> dict[str, Any]:
    """Returns the box of an operator, and what the panel says of it; without a cost it takes nothing."""
    output_bytes, saved_bytes = (cost.output_bytes, cost.saved_bytes) if cost else (0, 0)
    return {
        "name": operator.name,
        "label": label_of(operator),
        "at": at,
        "stage": stage,
        "target": operator.target,
        "module": operator.module_path,
        "kind": operator.module_type,
        "source": operator.source_line or "",
        "shapes": [str(spec) for spec in operator.outputs],
        "parameters": [*operator.parameters, *operator.buffers],
        "forward_s": cost.forward_s if cost else 0.0,
        "backward_s": cost.backward_s if cost else 0.0,
        "output_bytes": output_bytes,
        "output": format_bytes(output_bytes),
        "saved_bytes": saved_bytes,
        "saved": format_bytes(saved_bytes),
        "line": line,
        "why": _why(operator, plan, stage),
    }


def _stage(graph: OperatorGraph, plan: Plan, own: StagePlan) -> dict[str, Any]:
    """Returns what the panel says of a stage."""
    slowest = max(plan.stages, key=lambda stage: stage.load_s)
    share = own.load_s / slowest.load_s if slowest.load_s > 0 else 1.0
    return {
        "stage": own.stage,
        "device": own.device_name,
        "operators": len(own.operators),
        "modules": module_ranges(graph, own.operators),
        "load_s": own.load_s,
        "forward": format_seconds(own.forward_s) + (" twice" if own.recompute else ""),
        "backward": format_seconds(own.backward_s),
        "links": format_seconds(own.send_s + own.receive_s) if own.send_s + own.receive_s > 0 else "",
        "memory": f"{format_bytes(own.memory.total_bytes)} of {format_bytes(own.memory_limit_bytes)}",
        "why": "The slowest stage: it sets the pace."
        if own is slowest
        else f"Needs {share:.0%} of the time of stage {slowest.stage}, which sets the pace.",
    }


def _input(name: str, spec: TensorSpec, place: tuple[float, float]) -> dict[str, Any]:
    return {
        "name": name,
        "label": name,
        "at": place,
        "stage": EVERYWHERE,
        "target": "input of the model",
        "module": "",
        "kind": "",
        "source": "",
        "shapes": [str(spec)],
        "parameters": [],
        "forward_s": 0.0,
        "backward_s": 0.0,
        "output_bytes": spec.num_bytes,
        "output": format_bytes(spec.num_bytes),
        "saved_bytes": 0,
        "line": None,
        "why": "Every stage that reads an input of the model loads it by itself.",
    }


def title_of(stage: int, plan: Plan) -> str:
    return "in each stage" if stage == EVERYWHERE else f"stage {stage} · {plan.stages[stage].place}"


def label_of(operator: Operator) -> str:
    """Returns linear for aten.linear.default."""
    parts = operator.target.split(".")
    return parts[1] if len(parts) > 1 else parts[0]


def _why(operator: Operator, plan: Plan, stage: int) -> str:
    """Returns why the operator is on its stage, in a sentence or two."""
    if stage == EVERYWHERE:
        return "Depends on inputs and sizes alone: each stage that reads it computes it by itself."
    told = []
    if operator.is_view or operator.target.endswith("getitem"):
        told.append("Shares memory with its operand, so it stays in that operand's stage.")
    if operator.memory_group is not None:
        told.append("Writes memory that its whole group reads, so the group stays in one stage.")
    slowest = max(plan.stages, key=lambda own: own.load_s)
    if stage == slowest.stage:
        told.append("Its stage is the slowest: the plan makes this one as fast as it can be.")
    else:
        told.append(f"Its stage takes less time than stage {slowest.stage}, which limits the pipeline.")
    crossing = [t for t in plan.transfers if t.value == operator.name]
    if crossing:
        told.append(f"Its value is sent to stage {', '.join(str(t.target) for t in crossing)}.")
    return " ".join(told)


def _embedded(data: Mapping[str, Any]) -> str:
    """Returns JSON in which no name can end the script element."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=True)
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def graph_style() -> str:
    def colours(scheme: int) -> str:
        surface, ink, muted, rule, track = (
            pair[scheme] for pair in (svg.SURFACE, svg.INK, svg.MUTED, svg.RULE, svg.TRACK)
        )
        return (
            f".pd-graph{{background:{surface};color:{ink}}}.pd-view,.pd-graph aside{{border-color:{rule}}}"
            f".pd-tools,.pd-graph dt,.pd-graph aside p{{color:{muted}}}"
            f".pd-tools input,.pd-tools select,.pd-tools button{{background:{track};color:{ink}}}"
            f".pd-graph a{{color:{('#1f5fb0', '#7db7ff')[scheme]}}}.pd-pick{{color:{ink}}}"
            f".pd-pick:hover{{background:{track}}}"
        )

    return f"{_file('graph.css')}{colours(0)}@media (prefers-color-scheme:dark){{{colours(1)}}}"


def _file(name: str) -> str:
    return files("pd2bw_fx.report").joinpath(name).read_text(encoding="utf-8")
