"""Spells operators in torch's public words. Operands arrive as source, constants as values."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from pd2bw_fx.custom_function import custom_function
from pd2bw_fx.errors import TraceError

from .expression import INFIX, UNARY, Scene, Source, arguments, infix, power, subscript
from .layers import MODES
from .limits import with_limits
from .literals import is_plain_name
from .scopes import line_at, module_calls
from .statements import drops_always
from .subscripts import new_dimension
from .wording import (
    cast_called,
    divided_one,
    divisor_of,
    has_its_number_first,
    is_a_power,
    is_a_subscript,
    is_called_of_torch,
    is_written_data,
)
from .words import SPECIAL

# Functions of sizes and numbers. Those of torch can be traced again; Python's own serve as well.
_OF_NUMBERS: Mapping[Any, str] = {
    torch.sym_sqrt: "torch.sym_sqrt",
    math.floor: "math.floor",
    math.ceil: "math.ceil",
    math.trunc: "math.trunc",
    round: "round",
}


def spell(node: fx.Node, scene: Scene) -> Source:
    """Returns the expression that computes what the node computes, with the same operations."""
    if node.op == "call_method":
        return _method(str(node.target), node.args, node.kwargs, scene)
    if node.op == "call_module":
        raise TraceError(
            f"torch.fx keeps the layer {node.target} whole, which is in another mode than the model, is "
            "recurrent, or has hooks, a parametrisation or attributes that the forward sets; torch.export "
            "traces into it: give example inputs (example_args=(...), or the model's own example_inputs()) "
            "and tracer='export', or in place of a GraphModule torch.export.export(model, example)"
        )
    custom = custom_function(node.target)
    if custom is not None:
        return Source(f"{custom.name}.apply({arguments(node.args, {}, scene)})")
    if isinstance(node.target, torch._ops.OpOverload):
        return _overload(node, scene)
    return _function(node, scene)


def _method(name: str, args: Sequence[Any], kwargs: Mapping[str, Any], scene: Scene) -> Source:
    if not is_plain_name(name):
        raise TraceError(f"the traced program calls a method named {name!r}, which is no method of a tensor")
    return Source(f"{scene.receiver(args[0])}.{name}({arguments(args[1:], kwargs, scene)})")


def _function(node: fx.Node, scene: Scene) -> Source:
    """Spells a Python function of a symbolically traced program, or arithmetic on sizes."""
    target: Any = node.target
    name = getattr(target, "__name__", "")
    if target is operator.getitem:
        return Source(f"{scene.receiver(node.args[0])}[{_index(node.args[1], scene)}]")
    if target is getattr:
        attribute = node.args[1]
        assert isinstance(attribute, str)
        if not is_plain_name(attribute):
            raise TraceError(f"the traced program reads an attribute named {attribute!r}")
        return Source(f"{scene.receiver(node.args[0])}.{attribute}")
    if name in INFIX and getattr(operator, name, None) is target:
        return infix(name, node.args[0], node.args[1], scene)
    if target is operator.pow:
        base, exponent = node.args
        return power(base, exponent, scene)
    if target in (operator.neg, operator.invert):
        sign = "-" if target is operator.neg else "~"
        return Source(f"{sign}{scene.source(node.args[0]).within(UNARY)}", UNARY)
    if target in _OF_NUMBERS:
        given = [value for value in node.args if value is not None]  # round(number, None)
        return Source(f"{_OF_NUMBERS[target]}({arguments(given, {}, scene)})")
    for prefix, module in (("torch", torch), ("F", F)):
        if getattr(module, name, None) is target:
            return Source(f"{prefix}.{name}({arguments(node.args, node.kwargs, scene)})")
    raise TraceError(
        f"the traced program calls {getattr(target, '__module__', '?')}.{name}, which torch has no word for; "
        "call a torch function in its place, or trace with tracer='export'"
    )


def _index(index: Any, scene: Scene) -> str:
    items = index if isinstance(index, tuple) else (index,)
    return ", ".join(subscript(item, scene) for item in items) or "()"


def _overload(node: fx.Node, scene: Scene) -> Source:
    target = node.target
    assert isinstance(target, torch._ops.OpOverload)
    values = with_limits(node, _bound(target, node.args, node.kwargs))
    name = target._schema.name.partition("::")[2]
    if target.namespace == "aten" and _outs(target, values):
        return _public(target, name, values, scene)  # a nicer spelling would not write the outputs
    if target.namespace in ("aten", "pd2bw_fx"):  # ours stand for functions of torch
        worded = _as_the_author(node, name, values, scene)
        if worded is not None:
            return worded
        special = SPECIAL.get(f"{name}.{target._overloadname}", SPECIAL.get(name))
        if special is not None:
            line = line_at(node, len(module_calls(node))) if name == "dropout" else None
            is_always = line is not None and drops_always(line.code)
            spelled = special(values, scene.always() if is_always else scene)
            if spelled is not None:
                return spelled
        if name in INFIX and len(values) <= 2:
            left, right = values.values()
            return infix(name, left, right, scene)
        return _public(target, name, values, scene, of_torch=is_called_of_torch(node, name))
    return _by_dispatcher(target, values, scene)


def _as_the_author(node: fx.Node, name: str, values: Mapping[str, Any], scene: Scene) -> Source | None:
    """Spells an operator in the author's words, where these are not what the rule would choose."""
    first, second = (*values.values(), None, None)[:2]
    divisor = divisor_of(node) if name == "mul" else None
    if divisor is not None and not scene.source(first).text.isidentifier():  # the reciprocal is part of it
        return infix("div", second, divisor, scene)
    if name in ("add", "mul") and len(values) == 2 and isinstance(second, int | float | complex):
        is_first = has_its_number_first(node, name, first, second)
        return infix(name, second, first, scene) if is_first else None
    if name == "pow" and len(values) == 2 and is_a_power(node):
        return power(first, second, scene)
    if name == "reciprocal" and (one := divided_one(node)) is not None:
        return infix("div", one, first, scene)
    if name == "index_put_" and not node.users and values.keys() == {"self", "indices", "values"}:
        places = ", ".join(":" if index is None else scene.text(index) for index in values["indices"])
        return Source(f"{scene.receiver(first)}[{places}] = {scene.text(values['values'])}")
    if name == "detach" and is_written_data(node):
        return Source(f"{scene.receiver(first)}.data")
    if name == "unsqueeze" and is_a_subscript(node):
        return new_dimension(values, scene)
    if name == "to" and values.keys() == {"self", "dtype"} and (cast := cast_called(node, values["dtype"])):
        return Source(f"{scene.receiver(values['self'])}.{cast}()")
    return None


def _bound(target: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Maps the schema's names to operands, without those at their default, layouts and pinned memory."""
    values: dict[str, Any] = {}
    for position, argument in enumerate(target._schema.arguments):
        if position < len(args):
            value = args[position]
        elif argument.name in kwargs:
            value = kwargs[argument.name]
        else:
            continue
        if argument.name in ("layout", "pin_memory"):
            continue
        if argument.has_default_value() and _same(value, argument.default_value):
            continue
        values[argument.name] = value
    return values


def _same(value: Any, default: Any) -> bool:
    return type(value) is type(default) and value is not Ellipsis and bool(value == default)


def _public(
    target: torch._ops.OpOverload,
    name: str,
    values: Mapping[str, Any],
    scene: Scene,
    *,
    of_torch: bool = False,
) -> Source:
    """Spells a method of the tensor, or a function of torch or torch.nn.functional, whichever there is.

    `of_torch` prefers a function of torch to a method.
    """
    if any(
        isinstance(value, list | tuple) and any(item is None for item in value) for value in values.values()
    ):
        return _by_dispatcher(
            target, values, scene
        )  # `x[:, i] = y`: in public words only indices stand there
    takes_self = target._schema.arguments[:1] != [] and target._schema.arguments[0].name == "self"
    takes_self = takes_self and "self" in values
    rest = _by_schema(target, {k: v for k, v in values.items() if k != "self"}, scene)
    writes_out = bool(_outs(target, values))
    is_tensor = takes_self and isinstance(target._schema.arguments[0].type, torch.TensorType)
    is_method = is_tensor and isinstance(values["self"], fx.Node) and name not in _FUNCTIONS
    is_method = is_method and not writes_out and not (of_torch and hasattr(torch._C._VariableFunctions, name))
    if name in _AS_ACTIVATIONS and not writes_out:
        return Source(f"F.{name}({_by_schema(target, values, scene)})")
    if is_method and hasattr(torch.Tensor, name):
        return Source(f"{scene.receiver(values['self'])}.{name}({rest})")
    everything = _with_outs(target, values, scene)
    for family in _FAMILIES:
        if hasattr(getattr(torch, family), name.removeprefix(f"{family}_")) and name.startswith(f"{family}_"):
            return Source(f"torch.{name.replace('_', '.', 1)}({everything})")
    if not name.startswith("_") and callable(getattr(torch, name, None)):
        return Source(f"torch.{name}({everything})")
    if hasattr(F, name) and name not in _OTHERWISE_IN_PUBLIC and not writes_out:
        return Source(f"F.{name}({everything})")
    return _by_dispatcher(target, values, scene)


def _outs(target: torch._ops.OpOverload, values: Mapping[str, Any]) -> list[str]:
    """Lists the arguments that results are written to."""
    return [a.name for a in target._schema.arguments if a.is_out and a.name in values]


def _with_outs(target: torch._ops.OpOverload, values: Mapping[str, Any], scene: Scene) -> str:
    """Writes all arguments; those for results go together: torch.sort(x, out=(values, indices))."""
    outs = _outs(target, values)
    if len(outs) < 2:
        return _by_schema(target, values, scene)
    given = _by_schema(target, {name: v for name, v in values.items() if name not in outs}, scene)
    return f"{given}, out=({', '.join(scene.text(values[name]) for name in outs)})"


def _by_dispatcher(target: torch._ops.OpOverload, values: Mapping[str, Any], scene: Scene) -> Source:
    """Spells an operator that has no public name by its registered name."""
    namespace, name = target.namespace, target._schema.name.partition("::")[2]
    path = f"torch.ops.{namespace}.{name}.{target._overloadname}"
    return Source(f"{path}({_by_schema(target, values, scene)})")


# Operators whose `dim` may be one dimension or several.
_OVER_ONE_OR_MORE = {
    f"aten::{name}"
    for name in ("mean", "sum", "amax", "amin", "std", "var", "logsumexp", "linalg_vector_norm")
}
# Functions that take sizes one by one as well as together.
_OF_SIZES = {f"{new}{kind}" for new in ("", "new_") for kind in ("zeros", "ones", "empty")} | {
    "rand",
    "randn",
}
# Modules of torch whose name begins their operators' names: torch.fft.rfft is fft_rfft.
_FAMILIES = ("fft", "linalg", "special")
# The public function takes the kernel's size, the operator that of the result.
_OTHERWISE_IN_PUBLIC = {"max_unpool2d", "max_unpool3d"}
# These are known by their names in torch.nn.functional, though torch or its tensors have them too.
_AS_ACTIVATIONS = {
    "selu", "celu", "threshold", "prelu", "hardshrink", "cosine_similarity", "pairwise_distance", "bilinear",
    "pixel_shuffle", "pixel_unshuffle", "rms_norm",
}  # fmt: skip
# These read better as functions than as methods of their first operand.
_FUNCTIONS = {"addmm", "baddbmm", "addcmul", "addcdiv", "minimum", "maximum", "outer"}


def _has_statistics(target: torch._ops.OpOverload, values: Mapping[str, Any]) -> bool:
    """Whether a norm has statistics; a batch norm that keeps none takes the batch's in evaluation too."""
    return "batch_norm" not in target._schema.name or values.get("running_mean") is not None


def _by_schema(target: torch._ops.OpOverload, values: Mapping[str, Any], scene: Scene) -> str:
    """Writes the arguments by position as long as nothing is left out, then by name."""
    texts: list[str] = []
    positional = True
    name = target._schema.name.partition("::")[2]
    for argument in target._schema.arguments:
        if argument.name == "self" and "self" not in values:
            continue
        if argument.name not in values:
            positional = False
            continue
        value = values[argument.name]
        if isinstance(value, list) and all(isinstance(item, int | fx.Node) for item in value):
            value = tuple(value) if str(argument.type) in ("List[int]", "Optional[List[int]]") else value
        if argument.name == "size" and positional and name in _OF_SIZES and value:
            texts += [scene.text(size) for size in value]  # torch.zeros(2, 8) for torch.zeros((2, 8))
            continue
        if argument.name == "dim" and isinstance(value, list | tuple) and len(value) == 1:
            value = value[0] if target._schema.name in _OVER_ONE_OR_MORE else value
        is_mode = argument.name in MODES and value is True and _has_statistics(target, values)
        text = scene.mode(value) if is_mode else scene.text(value)
        named = isinstance(value, bool) or (argument.name == "dim" and texts)
        is_clamp = target._schema.name == "aten::clamp" and argument.name != "self"
        named = named or (is_clamp and "max" not in values)  # clamp(min=0)
        positional = positional and not (argument.kwarg_only or named)
        by_name = not positional
        texts.append(f"{argument.name}={text}" if by_name else text)
    return ", ".join(texts)
