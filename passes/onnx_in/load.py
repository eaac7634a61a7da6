"""Loads a file as a graph that can be cut: functions inlined, constants as initialisers, all named."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from pd2bw_fx.errors import InputError
from pd2bw_fx.files import require_onnx_file
from pd2bw_fx.names import free_name
from pd2bw_fx.onnx_model import subgraphs
from pd2bw_fx.onnx_session import first_line, require

if TYPE_CHECKING:
    import onnx_ir as ir

_OLDEST_IR_VERSION = 4


def load_onnx(path: Path) -> ir.Model:
    """Loads the model, and leaves its weights in their files until they are needed.

    Raises InputError for a file that is not there or no ONNX model.
    """
    for needed in ("onnx", "onnx_ir", "onnxruntime"):
        require(needed)
    import onnx_ir as ir
    from onnx_ir import passes
    from onnx_ir.passes import common

    require_onnx_file(path)
    try:
        model = ir.load(path)
    except Exception as error:  # protobuf's and the reader's errors have no common class
        if "Map types are not supported" in first_line(error):
            raise InputError(
                f"{path} makes a map (by a ZipMap, as classifiers of scikit-learn are converted), and stages "
                "make tensors only; convert the model with options={'zipmap': False}"
            ) from error
        raise InputError(f"{path} is no valid ONNX model: {first_line(error)}") from error
    if model.ir_version is None or not model.graph.outputs:
        raise InputError(f"{path} is no valid ONNX model: it holds no graph with outputs")
    _check_reads(model, path)
    for tensor in _tensors(model):
        if isinstance(tensor, ir.ExternalTensor):
            _check_external(tensor, path)
    passes.Sequential(
        common.InlinePass(),
        common.RemoveUnusedFunctionsPass(),  # type: ignore[no-untyped-call]
        common.RemoveInitializersFromInputsPass(),
        common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
        common.LiftSubgraphInitializersToMainGraphPass(),  # weights of branches and bodies count too
        common.RemoveUnusedNodesPass(),
        common.NameFixPass(),
    )(model)
    _name_nodes(model)
    # Before version 4 initialisers had to be inputs too; they are removed from the inputs.
    model.ir_version = max(model.ir_version, _OLDEST_IR_VERSION)
    return model


def _tensors(model: ir.Model) -> Iterator[ir.TensorProtocol]:
    """Yields every constant of the model and of its subgraphs."""
    for graph in model.graphs():
        yield from (v.const_value for v in graph.initializers.values() if v.const_value is not None)
        for node in graph:
            for attribute in node.attributes.values():
                if attribute.type.name == "TENSOR" and not attribute.is_ref():
                    yield attribute.as_tensor()


def _check_external(tensor: ir.ExternalTensor, path: Path) -> None:
    """Refuses a tensor whose bytes are missing, or in a file that is not beside the model."""
    where = f"{path} keeps {tensor.name!r} in {str(tensor.location)!r}"
    location = Path(tensor.location)
    file = path.parent / location
    if location.is_absolute() or ".." in location.parts:
        raise InputError(
            f"{where}, which is outside of its folder; copy that file beside it and save it again"
        )
    if not file.is_file():
        raise InputError(f"{where}, and there is no such file; copy it beside the model")
    start, needed = tensor.offset or 0, tensor.nbytes
    if tensor.length is not None and tensor.length != needed:
        raise InputError(f"{where} as {tensor.length} bytes, and its shape needs {needed}; export it again")
    if start < 0 or start + needed > file.stat().st_size:
        raise InputError(
            f"{where} at {start} to {start + needed}, and that file has {file.stat().st_size} bytes; "
            "it is cut short, copy it again"
        )


def _check_reads(model: ir.Model, path: Path) -> None:
    known = {id(value) for value in (*model.graph.inputs, *model.graph.initializers.values())}
    for node in model.graph:
        for value in reads(node):
            if id(value) not in known and value.producer() is None:
                raise InputError(
                    f"{path} is no valid ONNX model: a {node.op_type} reads {value.name!r}, which is "
                    "no input, no initialiser, and made by no node"
                )


def _name_nodes(model: ir.Model) -> None:
    """Gives nodes unique names, other than those of values: operators are found by either."""
    taken = {value.name or "" for node in model.graph for value in node.outputs}
    taken |= {value.name or "" for value in (*model.graph.inputs, *model.graph.initializers.values())}
    for number, node in enumerate(model.graph):
        node.name = free_name(node.name or f"{node.op_type}_{number}", taken)
        taken.add(node.name)


def reads(node: ir.Node) -> list[ir.Value]:
    """Returns a node's operands, and the outer values that its subgraphs use."""
    inside: set[int] = set()
    found: dict[int, ir.Value] = {}
    for value in _used(node, inside):
        if id(value) not in inside:
            found[id(value)] = value
    return list(found.values())


def _used(node: ir.Node, inside: set[int]) -> Iterator[ir.Value]:
    yield from (value for value in node.inputs if value is not None)
    for graph in subgraphs(node):
        inside |= {id(value) for value in (*graph.inputs, *graph.initializers.values())}
        for child in graph:
            inside |= {id(value) for value in child.outputs}
            yield from _used(child, inside)
        yield from graph.outputs
