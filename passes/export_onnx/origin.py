"""Notes where each node comes from, as metadata that Netron shows.

pd2bw_fx.module      the module's path in the original model: "transformer.h.0.attn"
pd2bw_fx.source      the line of the model's own code, where it is known: "modeling_gpt2.py:196"
pd2bw_fx.generated   the line of the generated stage: "stage_0.py:31"
pd2bw_fx.stage       the node's stage, in a file that holds several
"""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from pd2bw_fx.graph import OperatorGraph
from pd2bw_fx.stage import StageProgram
from pd2bw_fx.stage_errors import origins

from .assertions import Asserted

if TYPE_CHECKING:
    import onnx_ir as ir

MODULE, SOURCE, GENERATED, STAGE = (f"pd2bw_fx.{key}" for key in ("module", "source", "generated", "stage"))

WRAPPED_PREFIX = "wrapped."
_TORCH = "pkg.torch.onnx."


class Wrapped(nn.Module):
    """Holds a stage one level down.

    The exporter makes its module a torch.fx.GraphModule, whose `graph`, `code` and `meta` could clash with
    parameters or layers of the stage. It returns the asserted conditions after the results."""

    def __init__(self, stage: nn.Module, asserted: Asserted) -> None:
        super().__init__()
        self.wrapped = stage
        self.asserted = asserted
        self.training = stage.training  # its layers keep their own modes

    def forward(self, *inputs: Tensor) -> Any:
        self.asserted.start()
        return self.asserted.returned_with(self.wrapped(*inputs))


def describe_nodes(model: ir.Model, program: StageProgram, graph: OperatorGraph | None) -> None:
    """Replaces what the exporter notes about a node, such as local paths, by what a reader wants.

    A node whose generated line names no source line gets the one that all operators of its kind in its module
    share in the operator graph, if they do.
    """
    frame = re.compile(rf'File "<stage_{program.stage}\.py [0-9a-f]+>", line (\d+)')
    source_of_line = origins(program.source)
    source_of_kind = _lines_by_kind(graph)
    for node in model.graph.all_nodes():
        notes = node.metadata_props
        # What the exporter adds by itself, the sizes of inputs, it puts into a scope of that name.
        scopes = [
            "" if scope.startswith("_empty_nn_module") else _unwrapped(scope)
            for scope in _listed(notes.get(_TORCH + "name_scopes"))
        ]
        kinds = _listed(notes.get(_TORCH + "class_hierarchy"))
        lines = [int(line) for line in frame.findall(notes.get(_TORCH + "stack_trace", ""))]
        for key in [key for key in notes if key.startswith(_TORCH) or key == "namespace"]:
            del notes[key]
        if not scopes:
            _inherit(node)
            continue
        module = scopes[-2] if len(scopes) > 1 else None
        source = source_of_line.get(lines[-1]) if lines else None
        if source is None and module is not None and kinds:
            source = source_of_kind.get((module, kinds[-1]))
        generated = f"stage_{program.stage}.py:{lines[-1]}" if lines else None
        for key, value in ((MODULE, module), (SOURCE, source), (GENERATED, generated)):
            if value is not None:
                notes[key] = value


def _unwrapped(scope: str) -> str:
    return "" if scope == WRAPPED_PREFIX[:-1] else scope.removeprefix(WRAPPED_PREFIX)


def _inherit(node: ir.Node) -> None:
    """Gives nodes that tidying made the notes of their operand."""
    makers = [value.producer() for value in node.inputs if value is not None]
    for maker in makers:
        if maker is not None and MODULE in maker.metadata_props:
            node.metadata_props.update(maker.metadata_props)
            return


def _listed(text: str | None) -> list[str]:
    """Reads a list that the exporter wrote as a Python repr."""
    try:
        value = ast.literal_eval(text) if text else []
    except (ValueError, SyntaxError):
        return []
    return [str(entry) for entry in value] if isinstance(value, list) else []


def _lines_by_kind(graph: OperatorGraph | None) -> dict[tuple[str, str], str]:
    lines: dict[tuple[str, str], set[str | None]] = defaultdict(set)
    for operator in () if graph is None else graph.operators.values():
        lines[operator.module_path, operator.target].add(operator.source_line)
    return {kind: line for kind, (line, *others) in lines.items() if line is not None and not others}
