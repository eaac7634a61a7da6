"""Writes what a stage asserts into its file. ONNX has no assertion, but an impossible Reshape ends a run.

condition -> Where(1, 2) -> Reshape([0], ...) -> index 0     one element in the shape of one, or of two
output    -> Unsqueeze   -> Gather(.., 0)     -> output      unchanged, and absent where a check failed

Every device checks the shape of a Reshape; not every one checks the indices of a Gather. The Reshape is
named with the assertion's message, so that onnxruntime shows it when it fails.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

if TYPE_CHECKING:
    import onnx_ir as ir

ASSERTING = {torch._assert_async, torch.ops.aten._assert_async, torch.ops.aten._assert_async.msg}


class Asserted:
    """Holds the conditions and messages that the last recorded call of a stage asserted.

    What torch asserts while it decomposes recorded operators is not among them.
    """

    def __init__(self) -> None:
        self.conditions: list[Tensor] = []
        self.messages: list[str] = []
        self.is_recording = False

    def start(self) -> None:
        self.conditions, self.messages = [], []
        self.is_recording = True

    def note(self, condition: Tensor, message: str = "an assertion does not hold") -> None:
        self.conditions.append(condition.to(torch.bool).reshape(()))
        self.messages.append(message)

    def returned_with(self, results: Any) -> Any:
        """Returns the results of the finished call, and after them the conditions."""
        self.is_recording = False
        if not self.conditions:
            return results
        return (*(results if isinstance(results, tuple) else (results,)), *self.conditions)


def take_conditions(model: ir.Model, messages: Sequence[str]) -> list[ir.Value]:
    """Takes the last outputs away, one for each message, and returns them."""
    first = len(model.graph.outputs) - len(messages)
    conditions = list(model.graph.outputs[first:])
    model.graph.outputs[:] = list(model.graph.outputs[:first])
    return conditions


def add_checks(model: ir.Model, conditions: Sequence[ir.Value], messages: Sequence[str]) -> None:
    """Makes the first output depend on all conditions."""
    if not conditions or not model.graph.outputs:
        return
    writer = _Writer(model)
    one, two = writer.constant("assert_one", [1]), writer.constant("assert_two", [2])
    zero, first = writer.constant("assert_zero", [0]), writer.constant("assert_axis", [0])
    checked = []
    for condition, message in zip(conditions, messages, strict=True):
        shape = writer.node("Where", [condition, one, two], "assert_shape", like=condition)
        checked.append(writer.node("Reshape", [zero, shape], message, like=condition))
    together = writer.node("Concat", checked, "assert_all", axis=0)
    index = writer.node("ReduceMax", [together], "assert_index", keepdims=0)
    value = model.graph.outputs[0]
    name, value.name = value.name, writer.unused(f"{value.name}_unchecked")
    layer = writer.node("Unsqueeze", [value, first], "assert_layer")
    made = writer.node("Gather", [layer, index], "assert_output", axis=0)
    made.name, made.type, made.shape = name, value.type, value.shape
    model.graph.outputs[0] = made


class _Writer:
    """Appends nodes to a graph, under names that are free in it."""

    def __init__(self, model: ir.Model) -> None:
        self._graph = model.graph
        self._taken = {node.name for node in model.graph} | {*model.graph.initializers}
        self._taken |= {value.name for node in model.graph.all_nodes() for value in node.outputs}
        self._taken |= {value.name for value in model.graph.inputs}

    def unused(self, name: str) -> str:
        number, found = 1, name
        while found in self._taken:
            number += 1
            found = f"{name} ({number})"
        self._taken.add(found)
        return found

    def constant(self, name: str, entries: Sequence[int]) -> ir.Value:
        import onnx_ir as ir

        tensor = ir.tensor(list(entries), dtype=ir.DataType.INT64, name=self.unused(name))
        value = ir.Value(
            name=tensor.name,
            type=ir.TensorType(tensor.dtype),
            shape=ir.Shape([len(entries)]),
            const_value=tensor,
        )
        self._graph.register_initializer(value)
        return value

    def node(
        self,
        operator: str,
        inputs: Sequence[ir.Value],
        name: str,
        *,
        like: ir.Value | None = None,
        **attributes: int,
    ) -> ir.Value:
        """Adds a node with the metadata of the node that makes `like`, and returns its output."""
        import onnx_ir as ir

        made = ir.node(operator, inputs, attributes, name=self.unused(name))
        maker = None if like is None else like.producer()
        if maker is not None:
            made.metadata_props.update(maker.metadata_props)
        made.outputs[0].name = self.unused(f"{operator.lower()}_{name}" if like is None else made.name or "")
        self._graph.append(made)
        return made.outputs[0]
