"""The operator graph as a still picture: a region for each stage, with edges across cuts in front."""

from __future__ import annotations

from collections.abc import Iterable

from pd2bw_fx.graph import OperatorGraph
from pd2bw_fx.plan import Plan
from pd2bw_fx.report import svg
from pd2bw_fx.report.graph import label_of, title_of
from pd2bw_fx.report.layout import BOX_HEIGHT, BOX_WIDTH, EVERYWHERE, layout
from pd2bw_fx.units import format_bytes

_MARGIN, _TOP, _HEAD = 16.0, 64.0, 22.0
_LABEL_FONT = 11.0


def graph_svg(graph: OperatorGraph, plan: Plan) -> str:
    """Returns an SVG of every operator, coloured by stage; hovering over one shows its name and module."""
    made = layout(graph, plan)
    stage_of = plan.stage_of
    cut = {(transfer.value, transfer.target) for transfer in plan.transfers}
    fills = {f"s{i}": (svg.mix(h, svg.SURFACE[0], 0.5), svg.mix(h, svg.SURFACE[1], 0.55)) for i, h in _hues()}
    fills |= {f"t{i}": tuple(map(svg.readable_on, fills[f"s{i}"])) for i, _ in _hues()}  # type: ignore[misc]
    head = f"{graph.model_name}: {len(graph.operators)} operators on {plan.num_stages} stages"
    parts = [
        svg.style({**svg.BASE_STYLE, **fills}),
        svg.text("ink", _MARGIN, 26, head, size=15, bold=True),
        svg.text("muted", _MARGIN, 45, _subtitle(plan)),
    ]
    for region in made.regions:
        x, y = region.x + _MARGIN, region.y + _TOP
        parts.append(svg.rect("track", x, y, region.width, region.height + _HEAD, radius=8))
        parts.append(svg.text("muted", x + 12, y + 18, title_of(region.stage, plan), size=12))
    edges: dict[bool, list[str]] = {False: [], True: []}
    for name, operator in graph.operators.items():
        for read in operator.reads:
            if read in made.places:
                is_cut = (read, stage_of.get(name, EVERYWHERE)) in cut
                edges[is_cut].append(_edge(made.places[read], made.places[name]))
    parts += [_lines(edges[False], svg.MUTED[0], 0.8, 0.45), _lines(edges[True], svg.ALARM[0], 1.6, 0.9)]
    for name in (*graph.inputs, *graph.operators):
        parts += _box(name, graph, stage_of.get(name, EVERYWHERE), made.places[name])
    width, height = made.width + 2 * _MARGIN, made.height + _TOP + _HEAD + _MARGIN
    return svg.picture(max(width, 320.0), height, f"Operator graph. {head}", parts)


def _hues() -> Iterable[tuple[int, str]]:
    return enumerate(svg.HUES)


def _subtitle(plan: Plan) -> str:
    crossing = sum(transfer.bytes for transfer in plan.transfers)
    return f"red: what crosses a cut, {format_bytes(crossing)} a microbatch"


def _edge(source: tuple[float, float], target: tuple[float, float]) -> str:
    x, y = source[0] + BOX_WIDTH / 2 + _MARGIN, source[1] + BOX_HEIGHT + _TOP + _HEAD
    to_x, to_y = target[0] + BOX_WIDTH / 2 + _MARGIN, target[1] + _TOP + _HEAD
    return f"M{svg.number(x)} {svg.number(y)}L{svg.number(to_x)} {svg.number(to_y)}"


def _lines(edges: Iterable[str], colour: str, width: float, opacity: float) -> str:
    drawn = "".join(edges)
    return (
        f'<path d="{drawn}" fill="none" stroke="{colour}" stroke-width="{width}" stroke-opacity="{opacity}"/>'
        if drawn
        else ""
    )


def _box(name: str, graph: OperatorGraph, stage: int, place: tuple[float, float]) -> Iterable[str]:
    operator = graph.operators.get(name)
    label, facts = name, [name]
    if operator is not None:
        label = label_of(operator)
        facts += [fact for fact in (operator.module_path, operator.source_line) if fact]
    while svg.text_width(label, _LABEL_FONT) > BOX_WIDTH - 10:
        label = f"{label[:-2]}…"
    x, y = place[0] + _MARGIN, place[1] + _TOP + _HEAD
    hue = "" if stage == EVERYWHERE else str(stage % len(svg.HUES))
    fill, ink = (f"s{hue}", f"t{hue}") if hue else ("rule", "ink")
    yield svg.rect(fill, x, y, BOX_WIDTH, BOX_HEIGHT, radius=4, tooltip=", ".join(facts))
    yield svg.text(ink, x + BOX_WIDTH / 2, y + 16, label, size=_LABEL_FONT, anchor="middle")
