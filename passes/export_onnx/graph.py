"""One stage as an ONNX model: translated by torch, then tidied, with the names that we promise."""

from __future__ import annotations

import contextlib
import io
import logging
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from pd2bw_fx.errors import ExportError
from pd2bw_fx.graph import OperatorGraph
from pd2bw_fx.onnx_session import first_line, require
from pd2bw_fx.stage import Port, StageProgram

from .origin import describe_nodes

if TYPE_CHECKING:
    import onnx_ir as ir

# Below: the exporter's translations begin there. Above: files were written that the checker refuses.
OLDEST_OPSET, NEWEST_OPSET = 18, 25

_TALKATIVE = ("torch.onnx", "torch.export", "torch.fx.experimental.symbolic_shapes", "onnxscript", "onnx_ir")


def stage_model(
    program: StageProgram,
    module: nn.Module,
    inputs: Sequence[Tensor],
    *,
    opset: int,
    names: Mapping[str, str],
    graph: OperatorGraph | None = None,
) -> ir.Model:
    """The stage in the mode that the module is in, dynamic where its ports have a symbol for a size.

    Inputs and outputs are called `names[value]`, parameters and buffers as in the state_dict. Nodes know
    where they come from, the better with the operator graph at hand.
    """
    shapes = tuple(_dynamic_axes(program.stage, port) for port in program.inputs)
    try:
        with _quiet(), _TranslatableSpelling():
            exported = torch.onnx.export(
                module,
                tuple(tensor.contiguous() for tensor in inputs),  # strides would be symbols, too
                dynamo=True,
                opset_version=opset,
                dynamic_shapes=shapes if any(shapes) else None,
                optimize=False,
                verbose=False,
            )
            assert exported is not None
            model: ir.Model = exported.model
            held = {value.name for value in model.graph.initializers.values()}
            _tidy(model, held)
            describe_nodes(model, program, graph)
    except Exception as error:  # the exporter raises whatever the operator's translation raised
        raise ExportError(
            f"stage {program.stage} cannot be translated to ONNX opset {opset}: {first_line(error)}; look "
            f"for the operator in its source; another opset ({OLDEST_OPSET} to {NEWEST_OPSET}) may know it"
        ) from error
    _name(model, program, names)
    return model


def produced(program: StageProgram) -> list[Port]:
    """The outputs that the file has: a value that is an input too, or stands there twice, needs no other."""
    ports = {port.value: port for port in reversed(program.outputs)}
    received = {port.value for port in program.inputs}
    return [port for port in program.outputs if ports[port.value] is port and port.value not in received]


def _dynamic_axes(stage: int, port: Port) -> dict[int, Any]:
    if port.spec.shape is None:
        raise ExportError(
            f"the shape of {port.value!r}, an input of stage {stage}, is not known; split the model with "
            "example_args to export it"
        )
    return {
        axis: torch.export.Dim.DYNAMIC for axis, size in enumerate(port.spec.shape) if isinstance(size, str)
    }


def _tidy(model: ir.Model, held: set[str | None]) -> None:
    """Fold what is constant, except what is computed from parameters: they keep their names and shapes.

    (The exporter's own optimisation stores transposed weights under new names, and merges parameters whose
    entries happen to be equal.)
    """
    require("onnxscript")
    from onnx_ir import passes
    from onnx_ir.passes import common
    from onnxscript import optimizer

    passes.Sequential(common.InlinePass())(model)

    def should_fold(node: ir.Node) -> bool | None:
        reads_parameter = any(value is not None and value.name in held for value in node.inputs)
        return False if reads_parameter else None

    optimizer.fold_constants(model, should_fold=should_fold)
    passes.Sequential(
        common.RemoveUnusedNodesPass(),
        common.RemoveUnusedFunctionsPass(),  # type: ignore[no-untyped-call]
        common.RemoveUnusedOpsetsPass(),
        common.CommonSubexpressionEliminationPass(),
        common.IdentityEliminationPass(),
        common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0),
        common.OutputFixPass(),
        common.NameFixPass(),
    )(model)


def _name(model: ir.Model, program: StageProgram, names: Mapping[str, str]) -> None:
    for alias, name in program.ties.items():
        # The exporter keeps one tensor of a tie, under whichever name it met last.
        if alias in model.graph.initializers and name not in model.graph.initializers:
            model.graph.initializers[alias].name = name
    outgoing = produced(program)
    kept = [
        v
        for v, port in zip(model.graph.outputs, program.outputs, strict=True)
        if any(port is own for own in outgoing)
    ]
    model.graph.outputs[:] = kept
    ports = (*program.inputs, *outgoing)
    values = (*model.graph.inputs, *kept)
    wanted = {names[port.value] for port in ports}
    ours = {id(value) for value in values}
    taken = wanted | {value.name or "" for value in _values(model)}
    for value in _values(model):
        if value.name in wanted and id(value) not in ours:
            value.name = _unused(value.name or "", taken)
            taken.add(value.name)
    # First out of the way, since they may have one another's names.
    for index, value in enumerate(values):
        value.name = _unused(f"port_{index}", taken)
    for value, port in zip(values, ports, strict=True):
        value.name = names[port.value]
    _name_sizes(model, program)


def _name_sizes(model: ir.Model, program: StageProgram) -> None:
    """The exporter's s23 as the graph's own symbol, "batch"."""
    import onnx_ir as ir

    symbols: dict[str, str] = {}
    for value, port in zip(model.graph.inputs, program.inputs, strict=True):
        for found, size in zip(value.shape or (), port.spec.shape or (), strict=False):
            if isinstance(found, ir.SymbolicDim) and isinstance(size, str) and found.value is not None:
                symbols[found.value] = size if size.isidentifier() else f"({size})"
    for value in _values(model):
        if value.shape is not None:
            value.shape = ir.Shape(
                _renamed(size.value, symbols) if isinstance(size, ir.SymbolicDim) else size
                for size in value.shape
            )


def _renamed(expression: str | None, symbols: Mapping[str, str]) -> str | None:
    if expression is None:
        return None
    return re.sub(r"[A-Za-z_]\w*", lambda match: symbols.get(match[0], match[0]), expression)


def _values(model: ir.Model) -> Iterator[ir.Value]:
    yield from model.graph.inputs
    yield from list(model.graph.initializers.values())  # a copy: renaming one changes the mapping
    for node in model.graph.all_nodes():
        yield from node.outputs


def _unused(name: str, taken: set[str]) -> str:
    number = 1
    while f"{name}_{number}" in taken:
        number += 1
    return f"{name}_{number}"


class _TranslatableSpelling(TorchFunctionMode):
    """While the exporter records a stage: the same computation in a form that it can translate.

    It knows attention of four dimensions only, and lays its result out in memory otherwise than the kernel
    does, so that a `view` of it may not be possible any more. Batch normalisation it translates as in
    evaluation, whatever it is told. Where a convolution over three dimensions has no bias, it makes one of
    zeros in a shape that no runtime takes. Of cross entropy it leaves label smoothing out, and knows classes
    as targets only, no probabilities.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        if func in _ATTENTION:
            query, key, value, *others = args
            if others:
                named["attn_mask"], others = others[0], others[1:]
            named |= dict(zip(("dropout_p", "is_causal"), others, strict=False))
            return _attention(func, query, key, value, **named)
        if func is functional.batch_norm and _named(_BATCH_NORM, args, named).get("training"):
            return _normalised_by_batch(**_named(_BATCH_NORM, args, named))
        if func is functional.cross_entropy:
            named = _named(_CROSS_ENTROPY, args, named)
            if named.get("label_smoothing") or named["target"].is_floating_point():
                return _cross_entropy(**named)
            return func(**named)
        if func in _CONV3D and _named(_CONVOLUTION, args, named).get("bias") is None:
            named = _named(_CONVOLUTION, args, named)
            named["bias"] = named["weight"].new_zeros(named["weight"].shape[0])
            return func(**named)
        if func in _VIEW and not any(isinstance(argument, torch.dtype) for argument in args):
            return Tensor.reshape(*args, **named)
        return func(*args, **named)


_ATTENTION = {
    functional.scaled_dot_product_attention,
    torch.ops.aten.scaled_dot_product_attention,
    torch.ops.aten.scaled_dot_product_attention.default,
}
_CONV3D = {functional.conv3d, torch.ops.aten.conv3d, torch.ops.aten.conv3d.default}
_VIEW = {Tensor.view, torch.ops.aten.view, torch.ops.aten.view.default}


_CONVOLUTION = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
_CROSS_ENTROPY = (
    "input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing",
)  # fmt: skip
_BATCH_NORM = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")


def _named(names: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return dict(zip(names, args, strict=False)) | dict(kwargs)


def _cross_entropy(
    input: Tensor,  # noqa: A002 - as torch calls it
    target: Tensor,
    weight: Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
    **_: Any,
) -> Tensor:
    """A share `label_smoothing` of every target goes to all classes alike; targets are classes, or shares of
    each (arXiv 1512.00567, section 7)."""
    classes = 1 if input.dim() > 1 else 0
    logs, count = input.log_softmax(classes), input.shape[classes]
    rest = label_smoothing / count
    weighed = logs if weight is None else logs * weight.reshape(-1, *(1,) * (input.dim() - classes - 1))
    if target.is_floating_point():
        losses = -(weighed * (target * (1 - label_smoothing) + rest)).sum(classes)
        number = max(1, input.numel() // count)
        return losses if reduction == "none" else losses.sum() / (number if reduction == "mean" else 1)
    told = target != ignore_index
    known = torch.where(told, target, 0)
    own = weighed.gather(classes, known.unsqueeze(classes)).squeeze(classes)
    losses = torch.where(told, -(1 - label_smoothing) * own - rest * weighed.sum(classes), 0.0)
    if reduction == "none":
        return losses
    counted = told.to(losses.dtype) if weight is None else torch.where(told, weight[known], 0.0)
    return losses.sum() / counted.sum() if reduction == "mean" else losses.sum()


def _normalised_by_batch(
    input: Tensor,  # noqa: A002 - as torch calls it
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    **_: Any,
) -> Tensor:
    """input: (batch, channels, ...), normalised over all but the channels by its own mean and variance."""
    others = [axis for axis in range(input.dim()) if axis != 1]
    channels = [1, -1] + [1] * (input.dim() - 2)
    variance, mean = torch.var_mean(input, dim=others, correction=0, keepdim=True)
    result = (input - mean) * torch.rsqrt(variance + eps)
    if weight is not None:
        result = result * weight.view(channels)
    return result if bias is None else result + bias.view(channels)


def _attention(
    func: Any, query: Tensor, key: Tensor, value: Tensor, *, attn_mask: Tensor | None = None, **options: Any
) -> Tensor:
    """query: (..., time, width) of any number of leading dimensions."""
    if query.dim() > 4:
        leading = query.shape[:-3]
        query, key, value = (tensor.flatten(0, -4) for tensor in (query, key, value))
        if attn_mask is not None and attn_mask.dim() > 3:
            attn_mask = attn_mask.expand(*leading, *attn_mask.shape[-3:]).flatten(0, -4)
        mixed: Tensor = func(query, key, value, attn_mask=attn_mask, **options)
        return mixed.reshape(*leading, *mixed.shape[1:])
    added = 4 - query.dim()
    if added > 0:
        query, key, value = (_with_heads(tensor, added) for tensor in (query, key, value))
        if attn_mask is not None and attn_mask.dim() > 2:
            attn_mask = _with_heads(attn_mask, added)
    mixed = func(query, key, value, attn_mask=attn_mask, **options).contiguous()
    return mixed[0, 0] if added == 2 else mixed.squeeze(1) if added == 1 else mixed


def _with_heads(tensor: Tensor, added: int) -> Tensor:
    """(batch, time, width) -> (batch, 1, time, width); (time, width) -> (1, 1, time, width)"""
    return tensor.unsqueeze(1) if added == 1 else tensor[None, None]


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The exporter prints its progress and logs what it skips; a library prints nothing."""
    loggers = [logging.getLogger(name) for name in _TALKATIVE]
    levels = [logger.level for logger in loggers]
    try:
        for logger in loggers:
            logger.setLevel(logging.CRITICAL)
        silence = io.StringIO()
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stdout(silence),
            contextlib.redirect_stderr(silence),
        ):
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
