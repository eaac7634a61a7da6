"""The whole file of a stage: what the stage is, its classes, and a main that tries it out."""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterator, Sequence

from pd2bw_fx.graph import OperatorGraph, TensorSpec, dtype_name
from pd2bw_fx.names import free_name
from pd2bw_fx.plan import Plan
from pd2bw_fx.stage import Port
from pd2bw_fx.units import format_bytes, format_seconds

from .classes import ClassText
from .custom import class_of
from .cut_reason import cut_reason
from .layout import WIDTH, laid_out
from .literals import MAIN, NORMS, plain
from .write import StageWriter, docstring

_MOST_NAMED = 4  # what a stage gives; more is gone through in a loop


def document(
    graph: OperatorGraph,
    plan: Plan,
    stage: int,
    writer: StageWriter,
    inputs: Sequence[Port],
    outputs: Sequence[Port],
    parameters: Sequence[str],
) -> str:
    """Writes the source of a stage."""
    parts = [_classes(writer)]
    if all(port.spec.example_shape is not None for port in inputs):
        has_buffers = any("register_buffer(" in line for text in writer.classes for line in text.lines)
        dtypes = {graph.parameters[name].spec.dtype for name in parameters}
        has_whole_numbers = not all(dtype.is_floating_point or dtype.is_complex for dtype in dtypes)
        parts.append(
            _main(
                writer.root_name,
                inputs,
                outputs,
                has_buffers=has_buffers,
                has_whole_numbers=has_whole_numbers,
            )
        )
    body = "\n\n\n".join(part for group in parts for part in group)
    head = "\n".join(_head(graph, plan, stage, writer, inputs, outputs, parameters))
    return f'"""{head}\n"""\n\n{_imports(body)}\n\n\n{body}\n'


def _head(
    graph: OperatorGraph,
    plan: Plan,
    stage: int,
    writer: StageWriter,
    inputs: Sequence[Port],
    outputs: Sequence[Port],
    parameters: Sequence[str],
) -> Iterator[str]:
    planned = plan.stages[stage]
    place = f"{plain(graph.model_name)}, for {plain(planned.device_name)}"
    yield f"Stage {stage} of {plan.num_stages} of {place}."
    yield ""
    yield "Takes"
    for port in inputs:
        yield from _entry(_given(port))
    yield "Gives"
    for port in outputs:
        yield from _entry(_returned(port, inputs))
    yield from _holds(graph, plan, stage, writer, parameters)
    times = f"{format_seconds(planned.forward_s)} forward, {format_seconds(planned.backward_s)} backward"
    memory = f"{format_bytes(planned.memory.total_bytes)} of {format_bytes(planned.memory_limit_bytes)}"
    yield f"Predicted for a microbatch: {times}; memory {memory}."
    passing = {value: f"{name} (passing by)" for value, name in writer.tree.port_names.items()}
    names = passing | {port.value: port.name for port in (*inputs, *outputs)}
    if reasons := list(cut_reason(plan, stage, names)):
        yield "Cut here"
        for reason in reasons:
            yield from _entry(reason)


def _entry(text: str) -> list[str]:
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent="    ",
        subsequent_indent="        ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def _given(port: Port) -> str:
    origin = "an input of the model" if port.source is None else f"from stage {port.source}"
    flow = ", its gradient goes back" if port.needs_gradient else ""
    return f"{port.name}: {plain(str(port.spec))}, {origin}{flow}"


def _returned(port: Port, inputs: Sequence[Port]) -> str:
    """Describes an output.

    A value that another stage sent is passed on: for the links, that is cheaper than sending it once more
    from the stage that made it.
    """
    came = any(given.value == port.value and given.source is not None for given in inputs)
    places = [f"to stage {target}" for target in port.targets]
    if came and places:
        places[0] = f"handed on {places[0]}"
    if port.model_output is not None:
        places.append(f"the {plain(port.model_output)} of the model")
    return f"{port.name}: {plain(str(port.spec))}, {' and '.join(places)}"


def _holds(
    graph: OperatorGraph, plan: Plan, stage: int, writer: StageWriter, parameters: Sequence[str]
) -> Iterator[str]:
    specs = [graph.parameters[name].spec for name in parameters]
    elements = sum(spec.num_bytes // spec.dtype.itemsize for spec in specs)
    yield f"Holds {elements:,} parameters ({format_bytes(sum(spec.num_bytes for spec in specs))})."
    for name, canonical in writer.ties.items():
        first = writer.tied_to.get(name, canonical)
        if first != canonical:  # whose own entry says the same
            yield from _entry(f"{plain(name)} is tied to {plain(first)}.")
            continue
        others = [
            str(other.stage)
            for other in plan.stages
            if other.stage != stage and canonical in other.parameters
        ]
        elsewhere = f", held by stage {' and '.join(others)} too" if others else ""
        yield from _entry(f"{plain(name)} is tied to {plain(canonical)}{elsewhere}.")


def _imports(body: str) -> str:
    used = {node.id for node in ast.walk(ast.parse(body)) if isinstance(node, ast.Name)}
    standard = ["import math"] if "math" in used else []
    standard += ["from collections import OrderedDict"] if "OrderedDict" in used else []
    lines = ["import torch"] if "torch" in used else []
    lines = [*standard, "", *lines] if standard else lines
    lines += ["import torch.nn.functional as F"] if "F" in used else []
    names = [name for name in ("Tensor", "nn") if name in used]
    lines.append(f"from torch import {', '.join(names)}")
    norms = [name for name in NORMS if name in used]
    lines += [f"from torch.nn.utils.parametrizations import {', '.join(norms)}"] if norms else []
    return "\n".join(lines)


def _classes(writer: StageWriter) -> list[str]:
    functions = ["\n".join(lines) for _, lines in writer.functions]
    custom = ["\n".join(class_of(function)) for function in writer.tree.functions]
    return [*custom, *functions, *("\n".join(_class(text)) for text in writer.classes)]


def _class(text: ClassText) -> Iterator[str]:
    yield f"class {text.name}({text.base}):"
    if text.paths != [""]:
        yield from docstring(text)
        yield ""
    yield from text.lines


def _main(
    root_name: str,
    inputs: Sequence[Port],
    outputs: Sequence[Port],
    *,
    has_buffers: bool,
    has_whole_numbers: bool,
) -> list[str]:
    """Writes `main`, which tries the stage out.

    `has_whole_numbers` says whether some parameters are integers or booleans. No normal distribution has such
    values, and as indices, any but 0 may be out of range.
    """
    stage = free_name("stage", {port.name for port in (*inputs, *outputs)})
    fill = ["        nn.init.normal_(parameter, std=0.02)"]
    if has_whole_numbers:
        fill = [
            "        if parameter.is_floating_point():",
            "            nn.init.normal_(parameter, std=0.02)",
            "        else:",
            "            nn.init.zeros_(parameter)",
        ]
    lines = [
        f"def {MAIN}() -> None:",
        '    """Forward and backward once, on random inputs and weights."""',
        f"    {stage} = {root_name}()",
        f"    for parameter in {stage}.parameters():",
        *fill,
    ]
    if has_buffers:  # before weights are loaded they hold anything: an index could be out of range
        lines += [f"    for buffer in {stage}.buffers():", "        buffer.zero_()"]
    taken = {root_name, *(port.name for port in inputs)}
    arguments = [free_name(port.name, taken) if port.name == root_name else port.name for port in inputs]
    for name, port in zip(arguments, inputs, strict=True):
        lines += laid_out(f"{name} = {_random(port.spec)}", 4)
    lines += _run(f"{stage}({', '.join(arguments)})", outputs, taken={stage, root_name})
    return ["\n".join(lines), f'if __name__ == "__main__":\n    {MAIN}()']


def _run(call: str, outputs: Sequence[Port], taken: set[str]) -> Iterator[str]:
    """Yields the lines that run a stage forward and backward, and print what it gives."""
    names = [free_name(port.name, taken) if port.name in taken else port.name for port in outputs]
    joined = ", ".join(names)
    if len(outputs) > _MOST_NAMED:
        names, joined = ["result"], "results"
    yield from laid_out(f"{joined} = {call}", 4)
    # A backward needs a real number.
    real = ".abs()" if any(port.spec.dtype.is_complex for port in outputs) else ""
    if len(outputs) > _MOST_NAMED:
        if any(port.spec.requires_grad for port in outputs):
            yield f"    sum(result{real}.sum() for result in results if result.requires_grad).backward()"
    else:
        trained = [n for n, port in zip(names, outputs, strict=True) if port.spec.requires_grad]
        if trained == names and len(names) == 1 and outputs[0].spec.example_shape == ():
            yield f"    {joined}{real}.backward()"
        elif trained:
            total = " + ".join(f"{name}{real}.sum()" for name in trained)
            yield from laid_out(f"({total}).backward()" if len(trained) > 1 else f"{total}.backward()", 4)
    indent = ""
    if len(outputs) > 1:
        yield from laid_out(f"for result in {joined}:", 4)
        names, indent = ["result"], "    "
    yield f"    {indent}print(tuple({names[0]}.shape), {names[0]}.dtype)"


def _random(spec: TensorSpec) -> str:
    shape = ", ".join(str(size) for size in spec.example_shape or ()) or "()"
    kind = (
        "" if spec.dtype.is_floating_point and dtype_name(spec.dtype) == "float32" else dtype_name(spec.dtype)
    )
    if not (spec.dtype.is_floating_point or spec.requires_grad):  # complex numbers may have gradients too
        return f"torch.ones({shape}, dtype=torch.{kind})"
    dtype = f", dtype=torch.{kind}" if kind else ""
    if spec.requires_grad:
        return f"torch.randn({shape}{dtype}, requires_grad=True)"
    return f"torch.rand({shape}{dtype})"  # in the range of probabilities, masks, images and targets
