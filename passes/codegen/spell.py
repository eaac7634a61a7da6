"""How an operator is spelled in torch's public words. Operands arrive as source, constants as values."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from pd2bw_fx.errors import TraceError

from .literals import in_tuple, is_plain_name, literal, quoted

# Binding strength, as in Python's grammar; larger binds looser.
ATOM, POWER, UNARY, TIMES, PLUS, AND, XOR, OR, COMPARE = range(9)


@dataclass(frozen=True, slots=True)
class Source:
    """An expression and how tightly it binds."""

    text: str
    strength: int = ATOM

    def within(self, strength: int) -> str:
        """The text, in parentheses if it binds more loosely than its place allows."""
        return self.text if self.strength <= strength else f"({self.text})"


class Scene:
    """What spelling needs of its surroundings."""

    def __init__(self, expression: Callable[[fx.Node], Source], device: Callable[[], str]) -> None:
        self.expression = expression
        self.device = device  # source for the device of a tensor at hand

    def text(self, value: Any) -> str:
        """An operand or constant as an argument."""
        if isinstance(value, fx.Node):
            return self.expression(value).text
        if isinstance(value, list | tuple) and _holds_nodes(value):
            items = [self.text(item) for item in value]
            return in_tuple(items) if isinstance(value, tuple) else f"[{', '.join(items)}]"
        if isinstance(value, slice) and _holds_nodes((value.start, value.stop, value.step)):
            return f"slice({self.text(value.start)}, {self.text(value.stop)}, {self.text(value.step)})"
        if isinstance(value, torch.device):
            return self.device()
        return literal(value)

    def source(self, value: Any) -> Source:
        if isinstance(value, fx.Node):
            return self.expression(value)
        text = self.text(value)
        return Source(text, UNARY if text.startswith("-") else ATOM)

    def receiver(self, value: Any) -> str:
        """As what stands before a dot or a bracket."""
        return self.source(value).within(ATOM)


def _holds_nodes(items: Sequence[Any]) -> bool:
    return any(
        isinstance(item, fx.Node) or (isinstance(item, list | tuple) and _holds_nodes(item)) for item in items
    )


def spell(node: fx.Node, scene: Scene) -> Source:
    """The expression that computes what the node computes, in the same operations."""
    if node.op == "call_method":
        return _method(str(node.target), node.args, node.kwargs, scene)
    if node.op == "call_module":
        raise AssertionError("a module call is spelled where its module is")
    if isinstance(node.target, torch._ops.OpOverload):
        return _overload(node, scene)
    return _function(node, scene)


_INFIX: dict[str, tuple[str, int]] = {
    "add": ("+", PLUS), "sub": ("-", PLUS), "mul": ("*", TIMES), "div": ("/", TIMES),
    "matmul": ("@", TIMES), "mm": ("@", TIMES), "floordiv": ("//", TIMES), "mod": ("%", TIMES),
    "__and__": ("&", AND), "__or__": ("|", OR), "__xor__": ("^", XOR), "truediv": ("/", TIMES),
    "bitwise_and": ("&", AND), "bitwise_or": ("|", OR), "bitwise_xor": ("^", XOR), "remainder": ("%", TIMES),
    "eq": ("==", COMPARE), "ne": ("!=", COMPARE), "lt": ("<", COMPARE), "le": ("<=", COMPARE),
    "gt": (">", COMPARE), "ge": (">=", COMPARE),
}  # fmt: skip


def _infix(name: str, left: Any, right: Any, scene: Scene) -> Source:
    sign, strength = _INFIX[name]
    a, b = scene.source(left), scene.source(right)
    # Comparisons do not chain, and the right operand of a left-associative sign keeps its own grouping.
    left_limit = strength - 1 if strength == COMPARE else strength
    return Source(f"{a.within(left_limit)} {sign} {b.within(strength - 1)}", strength)


def _method(name: str, args: Sequence[Any], kwargs: Mapping[str, Any], scene: Scene) -> Source:
    if not is_plain_name(name):
        raise TraceError(f"the traced program calls a method named {name!r}, which is no method of a tensor")
    return Source(f"{scene.receiver(args[0])}.{name}({_arguments(args[1:], kwargs, scene)})")


def _arguments(args: Sequence[Any], kwargs: Mapping[str, Any], scene: Scene) -> str:
    texts = [scene.text(value) for value in args]
    texts += [f"{name}={scene.text(value)}" for name, value in kwargs.items()]
    return ", ".join(texts)


def _function(node: fx.Node, scene: Scene) -> Source:
    """A Python function of a symbolically traced program, or arithmetic on sizes."""
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
    if name in _INFIX and getattr(operator, name, None) is target:
        return _infix(name, node.args[0], node.args[1], scene)
    if target is operator.neg:
        return Source(f"-{scene.source(node.args[0]).within(UNARY)}", UNARY)
    for prefix, module in (("torch", torch), ("F", F)):
        if getattr(module, name, None) is target:
            return Source(f"{prefix}.{name}({_arguments(node.args, node.kwargs, scene)})")
    symbolic = {"sym_max": "max", "sym_min": "min", "sym_int": "int", "sym_not": "not "}
    if name in symbolic:
        return Source(f"{symbolic[name]}({_arguments(node.args, {}, scene)})")
    raise TraceError(
        f"the traced program calls {getattr(target, '__module__', '?')}.{name}, which torch has no word for; "
        "call a torch function in its place, or trace with tracer='export'"
    )


def _index(index: Any, scene: Scene) -> str:
    items = index if isinstance(index, tuple) else (index,)
    return ", ".join(_subscript(item, scene) for item in items) or "()"


def _subscript(item: Any, scene: Scene) -> str:
    if not isinstance(item, slice):
        return scene.text(item)
    bounds = [("" if bound is None else scene.text(bound)) for bound in (item.start, item.stop)]
    step = "" if item.step is None else f":{scene.text(item.step)}"
    return f"{bounds[0]}:{bounds[1]}{step}"


def _overload(node: fx.Node, scene: Scene) -> Source:
    target = node.target
    assert isinstance(target, torch._ops.OpOverload)
    values = _bound(target, node.args, node.kwargs)
    name = target._schema.name.partition("::")[2]
    if target.namespace == "aten":
        special = _SPECIAL.get(name)
        if special is not None:
            spelled = special(values, scene)
            if spelled is not None:
                return spelled
        if name in _INFIX and len(values) <= 2:
            left, right = values.values()
            return _infix(name, left, right, scene)
        return _public(target, name, values, scene)
    return _by_dispatcher(target, values, scene)


def _bound(target: torch._ops.OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Operands by the schema's names, those that have their default left out, layouts with them."""
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


def _public(target: torch._ops.OpOverload, name: str, values: Mapping[str, Any], scene: Scene) -> Source:
    """A method of the tensor, a function of torch, or one of torch.nn.functional, whichever there is."""
    arguments = target._schema.arguments
    takes_self = bool(arguments) and arguments[0].name == "self" and "self" in values
    rest = _by_schema(target, {k: v for k, v in values.items() if k != "self"}, scene)
    if takes_self and not isinstance(values["self"], list | tuple) and hasattr(torch.Tensor, name):
        return Source(f"{scene.receiver(values['self'])}.{name}({rest})")
    everything = _by_schema(target, values, scene)
    if hasattr(torch, name) and callable(getattr(torch, name)):
        return Source(f"torch.{name}({everything})")
    if hasattr(F, name):
        return Source(f"F.{name}({everything})")
    return _by_dispatcher(target, values, scene)


def _by_dispatcher(target: torch._ops.OpOverload, values: Mapping[str, Any], scene: Scene) -> Source:
    """No public spelling: the operator under its registered name."""
    namespace, name = target.namespace, target._schema.name.partition("::")[2]
    path = f"torch.ops.{namespace}.{name}.{target._overloadname}"
    return Source(f"{path}({_by_schema(target, values, scene)})")


def _by_schema(target: torch._ops.OpOverload, values: Mapping[str, Any], scene: Scene) -> str:
    """By position as long as nothing is left out, then by name."""
    texts: list[str] = []
    positional = True
    for argument in target._schema.arguments:
        if argument.name == "self" and "self" not in values:
            continue
        if argument.name not in values:
            positional = False
            continue
        value = values[argument.name]
        if isinstance(value, list) and value and all(isinstance(item, int | fx.Node) for item in value):
            value = tuple(value) if str(argument.type) in ("List[int]", "Optional[List[int]]") else value
        text = scene.text(value)
        named = isinstance(value, bool) or (argument.name == "dim" and texts)
        positional = positional and not (argument.kwarg_only or named)
        by_name = not positional
        texts.append(f"{argument.name}={text}" if by_name else text)
    return ", ".join(texts)


def _call(function: str, scene: Scene, *args: Any, **kwargs: Any) -> Source:
    return Source(f"{function}({_arguments(args, kwargs, scene)})")


def _given(values: Mapping[str, Any], *names: str, **renamed: str) -> dict[str, Any]:
    """Of these the ones that were given, under their public names."""
    chosen = {name: values[name] for name in names if name in values}
    return chosen | {public: values[name] for public, name in renamed.items() if name in values}


Special = Callable[[Mapping[str, Any], Scene], Source | None]


def _linear(values: Mapping[str, Any], scene: Scene) -> Source:
    return _call("F.linear", scene, *values.values())


def _embedding(values: Mapping[str, Any], scene: Scene) -> Source:
    padding = values.get("padding_idx", -1)
    kwargs = {} if padding == -1 else {"padding_idx": padding}
    kwargs |= _given(values, "scale_grad_by_freq", "sparse")
    return _call("F.embedding", scene, values["indices"], values["weight"], **kwargs)


def _layer_norm(values: Mapping[str, Any], scene: Scene) -> Source:
    kwargs = _given(values, "weight", "bias", "eps")
    return _call("F.layer_norm", scene, values["input"], tuple(values["normalized_shape"]), **kwargs)


def _dropout(values: Mapping[str, Any], scene: Scene) -> Source:
    tensor, rate = scene.text(values["input"]), literal(values["p"])
    training = "self.training" if values["train"] is True else "False"
    return Source(f"F.dropout({tensor}, {rate}, training={training})")


def _attention(values: Mapping[str, Any], scene: Scene) -> Source:
    kwargs = {name: scene.text(v) for name, v in _given(values, "attn_mask").items()}
    if values.get("dropout_p", 0.0):
        kwargs["dropout_p"] = f"{literal(values['dropout_p'])} if self.training else 0.0"
    kwargs |= {n: scene.text(v) for n, v in _given(values, "is_causal", "scale", "enable_gqa").items()}
    texts = [scene.text(values[name]) for name in ("query", "key", "value")]
    texts += [f"{name}={text}" for name, text in kwargs.items()]
    return Source(f"F.scaled_dot_product_attention({', '.join(texts)})")


def _batch_norm(values: Mapping[str, Any], scene: Scene) -> Source:
    statistics = [scene.text(values.get(name)) for name in ("running_mean", "running_var")]
    affine = [scene.text(values.get(name)) for name in ("weight", "bias")]
    training = "self.training" if values["training"] is True else "False"
    rates = [literal(values["momentum"]), literal(values["eps"])]
    texts = [scene.text(values["input"]), *statistics, *affine, training, *rates]
    return Source(f"F.batch_norm({', '.join(texts)})")


_REDUCTIONS = {0: "none", 1: "mean", 2: "sum"}


def _loss(function: str) -> Special:
    def spelled(values: Mapping[str, Any], scene: Scene) -> Source:
        rest = {name: value for name, value in values.items() if name not in ("self", "target")}
        if "reduction" in rest:
            rest["reduction"] = _REDUCTIONS[rest["reduction"]]
        return _call(f"F.{function}", scene, values["self"], values["target"], **rest)

    return spelled


def _softmax(function: str) -> Special:
    def spelled(values: Mapping[str, Any], scene: Scene) -> Source:
        kwargs = {"dim": values["dim"]} | _given(values, "dtype")
        return _call(f"F.{function}", scene, values["self"], **kwargs)

    return spelled


def _slice(values: Mapping[str, Any], scene: Scene) -> Source | None:
    dimension, end = values.get("dim", 0), values.get("end")
    if not isinstance(dimension, int) or dimension < 0 or dimension > 3:
        return None
    if isinstance(end, int) and end >= 2**62:
        end = None
    start = values.get("start")
    bounds = slice(None if start == 0 and type(start) is int else start, end, values.get("step"))
    if any(isinstance(bound, fx.Node) for bound in (bounds.start, bounds.stop)):
        return None
    places = [":"] * dimension + [_subscript(bounds, scene)]
    return Source(f"{scene.receiver(values['self'])}[{', '.join(places)}]")


def _select(values: Mapping[str, Any], scene: Scene) -> Source | None:
    dimension, index = values["dim"], values["index"]
    if not isinstance(dimension, int) or not isinstance(index, int) or dimension < 0 or dimension > 3:
        return None
    places = [":"] * dimension + [literal(index)]
    return Source(f"{scene.receiver(values['self'])}[{', '.join(places)}]")


def _index_tensor(values: Mapping[str, Any], scene: Scene) -> Source:
    places = [":" if item is None else scene.text(item) for item in values["indices"]]
    return Source(f"{scene.receiver(values['self'])}[{', '.join(places)}]")


def _to(values: Mapping[str, Any], scene: Scene) -> Source | None:
    """A cast; a device that was the trace's own becomes that of a tensor at hand."""
    kwargs = _given(values, "copy", "memory_format")
    if "other" in values:
        return _call(f"{scene.receiver(values['self'])}.to", scene, values["other"], **kwargs)
    texts = [scene.device()] if values.get("device") is not None else []
    texts += [literal(values["dtype"])] if values.get("dtype") is not None else []
    texts += [f"{name}={scene.text(value)}" for name, value in kwargs.items()]
    return Source(f"{scene.receiver(values['self'])}.to({', '.join(texts)})")


def _sized(name: str, shape: str) -> Special:
    """Methods whose sizes are nicer one by one: x.view(batch, -1)."""

    def spelled(values: Mapping[str, Any], scene: Scene) -> Source | None:
        sizes = values.get(shape)
        if not isinstance(sizes, list | tuple) or set(values) - {"self", shape} or not sizes:
            return None
        texts = ", ".join(scene.text(size) for size in sizes)
        return Source(f"{scene.receiver(values['self'])}.{name}({texts})")

    return spelled


def _rsub(values: Mapping[str, Any], scene: Scene) -> Source | None:
    return None if "alpha" in values else _infix("sub", values["other"], values["self"], scene)


def _unary(sign: str) -> Special:
    return lambda values, scene: Source(f"{sign}{scene.source(values['self']).within(UNARY)}", UNARY)


def _relu(function: str) -> Special:
    return lambda values, scene: _call(f"F.{function}", scene, *values.values())


def _lists_first(function: str, first: str, then: str = "dim") -> Special:
    def spelled(values: Mapping[str, Any], scene: Scene) -> Source:
        return _call(function, scene, values[first], **_given(values, then))

    return spelled


def _einsum(values: Mapping[str, Any], scene: Scene) -> Source:
    operands = ", ".join(scene.text(tensor) for tensor in values["tensors"])
    return Source(f"torch.einsum({quoted(str(values['equation']))}, {operands})")


def _one_hot(values: Mapping[str, Any], scene: Scene) -> Source:
    return _call("F.one_hot", scene, *values.values())


def _gelu(values: Mapping[str, Any], scene: Scene) -> Source:
    return _call("F.gelu", scene, values["self"], **_given(values, "approximate"))


def _pad(values: Mapping[str, Any], scene: Scene) -> Source:
    kwargs = _given(values, "mode", "value")
    return _call("F.pad", scene, values["self"], tuple(values["pad"]), **kwargs)


def _convolution(name: str) -> Special:
    def spelled(values: Mapping[str, Any], scene: Scene) -> Source:
        kwargs = {n: v for n, v in values.items() if n not in ("input", "weight")}
        return _call(f"F.{name}", scene, values["input"], values["weight"], **kwargs)

    return spelled


def _pool(name: str) -> Special:
    def spelled(values: Mapping[str, Any], scene: Scene) -> Source:
        kwargs = {n: v for n, v in values.items() if n not in ("self", "kernel_size", "output_size")}
        size = values.get("kernel_size", values.get("output_size"))
        return _call(f"F.{name}", scene, values["self"], tuple(size or ()), **kwargs)

    return spelled


def _each_by_itself(name: str) -> Special:
    """Functions that take their tensors one by one, where the schema has a list."""
    return lambda values, scene: _call(f"torch.{name}", scene, *values["tensors"])


_SPECIAL: dict[str, Special] = {
    "block_diag": _each_by_itself("block_diag"),
    "broadcast_tensors": _each_by_itself("broadcast_tensors"),
    "cartesian_prod": _each_by_itself("cartesian_prod"),
    "linear": _linear,
    "embedding": _embedding,
    "layer_norm": _layer_norm,
    "dropout": _dropout,
    "scaled_dot_product_attention": _attention,
    "batch_norm": _batch_norm,
    "cross_entropy_loss": _loss("cross_entropy"),
    "mse_loss": _loss("mse_loss"),
    "l1_loss": _loss("l1_loss"),
    "smooth_l1_loss": _loss("smooth_l1_loss"),
    "binary_cross_entropy_with_logits": _loss("binary_cross_entropy_with_logits"),
    "nll_loss_nd": _loss("nll_loss"),
    "softmax": _softmax("softmax"),
    "log_softmax": _softmax("log_softmax"),
    "slice": _slice,
    "select": _select,
    "index": _index_tensor,
    "to": _to,
    "view": _sized("view", "size"),
    "reshape": _sized("reshape", "shape"),
    "permute": _sized("permute", "dims"),
    "expand": _sized("expand", "size"),
    "repeat": _sized("repeat", "repeats"),
    "rsub": _rsub,
    "neg": _unary("-"),
    "bitwise_not": _unary("~"),
    "cat": _lists_first("torch.cat", "tensors"),
    "stack": _lists_first("torch.stack", "tensors"),
    "einsum": _einsum,
    "one_hot": _one_hot,
    "gelu": _gelu,
    "pad": _pad,
    **{name: _relu(name) for name in ("relu", "silu", "elu", "leaky_relu", "softplus", "hardtanh", "mish")},
    **{name: _convolution(name) for name in ("conv1d", "conv2d", "conv3d")},
    **{
        name: _pool(name)
        for name in ("max_pool1d", "max_pool2d", "avg_pool2d", "adaptive_avg_pool1d", "adaptive_avg_pool2d")
    },
}
