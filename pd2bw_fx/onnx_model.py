"""An ONNX file to be split: its operator graph, and what it computes on examples."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from pd2bw_fx.graph import OperatorGraph
from pd2bw_fx.onnx_session import Array

if TYPE_CHECKING:
    import onnx_ir as ir


@dataclass(frozen=True, slots=True)
class OnnxModel:
    """A model that was read from an ONNX file.

    `graph` has an operator for each node, named after the value that it makes.

    An operator with several outputs is named after its ONNX node, and each output is an element of it
    (`operator.getitem`) named after the value, so that each crosses a cut by itself.

    `examples` are inputs by name, one batch or two of different sizes; `results` what the file computes on
    them in onnxruntime. `node_of` gives the operator's ONNX node by name, elements excepted.
    """

    path: Path
    graph: OperatorGraph
    examples: tuple[Mapping[str, Array], ...]
    results: tuple[Mapping[str, Array], ...]
    node_of: Mapping[str, str]
    ir: ir.Model = field(compare=False, repr=False)


def subgraphs(node: ir.Node) -> list[ir.Graph]:
    """Yields the branches and bodies of an If, Loop or Scan."""
    found: list[ir.Graph] = []
    for attribute in node.attributes.values():
        if attribute.type.name == "GRAPH":
            found.append(attribute.as_graph())
        elif attribute.type.name == "GRAPHS":
            found.extend(attribute.as_graphs())
    return found
