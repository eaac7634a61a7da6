"""The plan as a table in plain text: what `print(pipe)` shows."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Iterator, Sequence

from pd2bw_fx.costs import Costs
from pd2bw_fx.graph import OperatorGraph
from pd2bw_fx.plan import Plan, StagePlan, Transfer
from pd2bw_fx.report.devices import fullest_device, is_on_every_device
from pd2bw_fx.units import counted, format_bytes, format_seconds

COLUMNS = ("stage", "device", "operators", "parameters", "forward", "backward", "memory / limit")
_OPERATORS = COLUMNS.index("operators")
_MOST_NAMED = 3  # parts of a block that are named; of more it is "part of blocks.4"
_OPERATORS_WIDTH = 60  # characters; a longer list of modules continues on the next line


def plan_table(graph: OperatorGraph, costs: Costs, plan: Plan) -> str:
    """Returns a row for each stage, below it what crosses its cut, and at the end what binds."""
    rows = [_wrapped(stage_row(graph, stage)) for stage in plan.stages]
    cells = [COLUMNS, *(line for row in rows for line in row)]
    widths = [max(len(line[column]) for line in cells) for column in range(len(COLUMNS))]
    lines = [headline(graph, plan), "", _line(COLUMNS, widths)]
    lines.append("  ".join("-" * width for width in widths))
    for stage, row in zip(plan.stages, rows, strict=True):
        lines += [_line(line, widths) for line in row]
        lines += [f"{'':{widths[0]}}  {line}" for line in cut_lines(graph, plan, stage.stage)]
    return "\n".join([*lines, "", *verdict(costs, plan), *_views_that_cross(graph, plan)])


def headline(graph: OperatorGraph, plan: Plan) -> str:
    placed = sum(
        len(stage.operators) for stage in plan.stages
    )  # sizes of inputs are read wherever they are used
    operators, stages = counted(placed, "operator"), counted(plan.num_stages, "stage")
    return f"{graph.model_name}: {operators} on {stages}, {plan.purpose}"


def stage_row(graph: OperatorGraph, stage: StagePlan) -> tuple[str, ...]:
    elements = 0
    for name in stage.parameters:
        if name in graph.parameters:
            spec = graph.parameters[name].spec
            elements += spec.num_bytes // spec.dtype.itemsize
    forward = format_seconds(stage.forward_s) + (" twice" if stage.recompute else "")
    return (
        str(stage.stage),
        stage.place,
        f"{module_ranges(graph, stage.operators)} ({len(stage.operators)})",
        _count(elements),
        forward,
        format_seconds(stage.backward_s),
        f"{format_bytes(stage.memory.total_bytes)} / {format_bytes(stage.memory_limit_bytes)}",
    )


def _wrapped(row: Sequence[str]) -> list[Sequence[str]]:
    """Returns the row in as many lines as its operators need."""
    first, *others = textwrap.wrap(row[_OPERATORS], _OPERATORS_WIDTH, break_on_hyphens=False)
    below = [["" if column != _OPERATORS else more for column in range(len(row))] for more in others]
    return [[*row[:_OPERATORS], first, *row[_OPERATORS + 1 :]], *below]


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    return "  ".join(f"{cell:<{width}}" for cell, width in zip(cells, widths, strict=True)).rstrip()


def cut_lines(graph: OperatorGraph, plan: Plan, stage: int) -> list[str]:
    lines = []
    targets = sorted({transfer.target for transfer in plan.transfers if transfer.source == stage})
    for target in targets:
        crossing = [t for t in plan.transfers if (t.source, t.target) == (stage, target)]
        lines.append(f"-> stage {target}: {_crossing(graph, crossing)}")
    return lines


def _crossing(graph: OperatorGraph, transfers: Sequence[Transfer]) -> str:
    named = [f"{_value_name(graph, transfer.value)}" for transfer in transfers[:3]]
    if len(transfers) > 3:
        named.append(f"{len(transfers) - 3} more")
    forward = format_bytes(sum(t.bytes for t in transfers))
    backward = sum(t.gradient_bytes for t in transfers)
    back = f", {format_bytes(backward)} of gradients back" if backward else ""
    return f"{', '.join(named)}: {forward}{back}, {format_seconds(sum(t.seconds for t in transfers))}"


def _value_name(graph: OperatorGraph, value: str) -> str:
    operator = graph.operators.get(value)
    if operator is None or not operator.module_path:
        return value
    return f"{operator.module_path}:{value}"


def verdict(costs: Costs, plan: Plan) -> list[str]:
    rate = 1.0 / plan.bottleneck_s if plan.bottleneck_s > 0 else float("inf")
    each = " on each device" if is_on_every_device(plan) else ""
    lines = [
        f"bottleneck: {plan.slowest_place}, {format_seconds(plan.bottleneck_s)} a "
        f"microbatch, {rate:.4g} microbatches/s{each} where no transfer runs beside work",
        plan.proof + (f" ({plan.solver}, {format_seconds(plan.planning_s)})" if plan.bound_s > 0 else ""),
    ]
    if (fullest := fullest_device(plan)).num_stages > 1:
        lines.append(
            f"fullest device: {fullest.place}, {format_bytes(fullest.num_bytes)} of "
            f"{format_bytes(fullest.limit_bytes)} with its {fullest.num_stages} stages, each of which has "
            "its share of the limit"
        )
    size = "" if costs.microbatch_size is None else f" at microbatch size {costs.microbatch_size}"
    lines.append(f"costs: {costs.origin}, {costs.device}{size}")
    if costs.note:
        lines.append(f"note: {costs.note}")
    return lines


def _views_that_cross(graph: OperatorGraph, plan: Plan) -> Iterator[str]:
    """Yields where a view is sent beside the value that it views, as the rules for cuts require."""
    sent = {(transfer.source, transfer.target, transfer.value) for transfer in plan.transfers}
    for source, target, value in sorted(sent):
        viewed = value
        while viewed in graph.operators and graph.operators[viewed].is_view and graph.operators[viewed].reads:
            viewed = graph.operators[viewed].reads[0]
            if (source, target, viewed) in sent:
                yield (
                    f"note: {value} is a view of {viewed}, and stage {target} is sent both: a view stays "
                    "with what it views, and plans that cut between them were not looked at"
                )
                break


def module_ranges(graph: OperatorGraph, names: Iterable[str]) -> str:
    """Returns the modules that these operators make up: "embed, blocks.0-3, part of blocks.4"."""
    here = {name for name in names if name in graph.operators}
    everywhere = {name for name, operator in graph.operators.items() if not operator.is_replicable}
    paths = _covered("", here, everywhere | here, graph)
    return ", ".join(_joined(paths)) or "-"


def _covered(path: str, here: set[str], everywhere: set[str], graph: OperatorGraph) -> list[str]:
    inside = [
        name
        for name in graph.operators
        if name in everywhere and _is_inside(graph.operators[name].module_path, path)
    ]
    mine = [name for name in inside if name in here]
    if not mine:
        return []
    if len(mine) == len(inside):
        return [path or graph.model_name]
    found: list[str] = []
    for name in mine:
        below = graph.operators[name].module_path
        child = _child(path, below)
        entry = f"part of {path or graph.model_name}" if child is None else child
        if entry not in found:
            found.append(entry)
    result: list[str] = []
    for entry in found:
        result += [entry] if entry.startswith("part of ") else _covered(entry, here, everywhere, graph)
    # "part of blocks.4" says nothing more where children of blocks.4 are named and it owns no operator.
    result = list(dict.fromkeys(result))
    return [f"part of {path}"] if len(result) > _MOST_NAMED and _is_block(path, result) else result


def _is_block(path: str, parts: Sequence[str]) -> bool:
    """Whether the module is one of a stack (blocks.4), and none of these parts is of a stack within it."""
    is_numbered = re.search(r"(^|\.)\d+$", path) is not None
    return is_numbered and not any(re.search(r"\.\d+(\.|$)", part.partition(path)[2]) for part in parts)


def _is_inside(path: str, ancestor: str) -> bool:
    return not ancestor or path == ancestor or path.startswith(ancestor + ".")


def _child(path: str, below: str) -> str | None:
    """Returns the child of module `path` that holds module `below`; None where they are the same."""
    if below == path:
        return None
    rest = below[len(path) + 1 :] if path else below
    return f"{path}.{rest.split('.')[0]}" if path else rest.split(".")[0]


def _joined(paths: Sequence[str]) -> list[str]:
    """Returns runs of numbered neighbours as one: blocks.0-2 for blocks.0, blocks.1, blocks.2."""
    joined: list[str] = []
    run: list[int] = []
    stem = ""
    for path in [*paths, ""]:
        match = re.fullmatch(r"(.*?)(\d+)", path)
        if match and run and match[1] == stem and int(match[2]) == run[-1] + 1:
            run.append(int(match[2]))
            continue
        if run:
            joined.append(f"{stem}{run[0]}" if len(run) == 1 else f"{stem}{run[0]}-{run[-1]}")
            run = []
        if match:
            stem, run = match[1], [int(match[2])]
        elif path:
            joined.append(path)
    return joined


def _count(elements: int) -> str:
    for scale, unit in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if elements >= scale:
            return f"{elements / scale:.3g} {unit}"
    return str(elements)
