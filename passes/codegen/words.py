"""Operators whose public spelling differs from their schema: x[:, 0], -x, x.mT, F.cross_entropy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from .expression import UNARY, Scene, Source, Special, call, given, infix
from .functions import FUNCTIONS
from .literals import literal, quoted
from .subscripts import basic_subscript, several_new_dimensions, subscript_of_tensors


def _slice_scatter(values: Mapping[str, Any], scene: Scene) -> Source:
    bounds = {name: value for name, value in values.items() if name in ("dim", "start", "end", "step")}
    if isinstance(bounds.get("end"), int) and bounds["end"] >= 2**62:
        del bounds["end"]
    return call(f"{scene.receiver(values['self'])}.slice_scatter", scene, values["src"], **bounds)


def _to(values: Mapping[str, Any], scene: Scene) -> Source | None:
    """Spells a cast; a device that was the trace's own becomes that of a tensor at hand."""
    kwargs = given(values, "copy", "memory_format")
    if "other" in values:
        return call(f"{scene.receiver(values['self'])}.to", scene, values["other"], **kwargs)
    receiver = scene.receiver(values["self"])
    texts = [scene.device()] if values.get("device") is not None else []
    texts += [literal(values["dtype"])] if values.get("dtype") is not None else []
    if len(texts) > 1 and texts[0] == f"{receiver}.device":
        del texts[0]  # the tensor is there already
    texts += [f"{name}={scene.text(value)}" for name, value in kwargs.items()]
    return Source(f"{receiver}.to({', '.join(texts)})")


def _moved(values: Mapping[str, Any], scene: Scene) -> Source | None:
    """Spells the author's `x.to(device)`, which torch records together with the type that x has.

    For `x.to(memory_format=torch.channels_last)` torch records the device and the type; there the device is
    left out, as a stage's tensors are all on one device.
    """
    before = values["self"].meta.get("val") if isinstance(values["self"], fx.Node) else None
    is_kept = isinstance(before, torch.Tensor) and before.dtype == values.get("dtype")
    if not is_kept or values.get("device") is None:
        return _to(values, scene)
    known = {"dtype", "device"} if values.get("memory_format") is not None else {"dtype"}
    return _to({name: value for name, value in values.items() if name not in known}, scene)


def _sized(name: str, shape: str) -> Special:
    """Spells methods whose sizes read better one by one: x.view(batch, -1)."""

    def spelled(values: Mapping[str, Any], scene: Scene) -> Source | None:
        sizes = values.get(shape)
        if not isinstance(sizes, list | tuple) or set(values) - {"self", shape} or not sizes:
            return None
        texts = ", ".join(scene.text(size) for size in sizes)
        return Source(f"{scene.receiver(values['self'])}.{name}({texts})")

    return spelled


def _rsub(values: Mapping[str, Any], scene: Scene) -> Source | None:
    return None if "alpha" in values else infix("sub", values["other"], values["self"], scene)


def _unary(sign: str) -> Special:
    return lambda values, scene: Source(f"{sign}{scene.source(values['self']).within(UNARY)}", UNARY)


def _lists_first(function: str, first: str) -> Special:
    def spelled(values: Mapping[str, Any], scene: Scene) -> Source:
        return call(function, scene, values[first], **given(values, "dim"))

    return spelled


def _split_with_sizes(values: Mapping[str, Any], scene: Scene) -> Source:
    receiver = scene.receiver(values["self"])
    return call(f"{receiver}.split", scene, values["split_sizes"], **given(values, "dim"))


def _einsum(values: Mapping[str, Any], scene: Scene) -> Source:
    operands = ", ".join(scene.text(tensor) for tensor in values["tensors"])
    return Source(f"torch.einsum({quoted(str(values['equation']))}, {operands})")


def _each_by_itself(name: str) -> Special:
    """Spells functions that take tensors one by one, where the schema has a list."""
    return lambda values, scene: call(f"torch.{name}", scene, *values["tensors"])


def _meshgrid(values: Mapping[str, Any], scene: Scene) -> Source:
    return call("torch.meshgrid", scene, *values["tensors"], **given(values, "indexing"))


def _assertion(values: Mapping[str, Any], scene: Scene) -> Source:
    return call("torch._assert_async", scene, *values.values())


# Attributes of a tensor, with the names of their operators.
_ATTRIBUTES = {"mT": "mT", "mH": "mH", "numpy_T": "T", "matrix_H": "H", "real": "real", "imag": "imag"}


# Methods without arguments whose name differs from their operator's.
_METHODS = {"_conj": "conj", "_is_all_true": "all", "_is_any_true": "any"}


def _attribute(name: str) -> Special:
    return lambda values, scene: Source(f"{scene.receiver(values['self'])}.{name}")


def _method(name: str) -> Special:
    return lambda values, scene: Source(f"{scene.receiver(values['self'])}.{name}()")


def _filled(name: str) -> Special:
    """Spells draws that torch only has in place: x.new_empty(4).uniform_(), where nothing else reads that."""

    def spelled(values: Mapping[str, Any], scene: Scene) -> Source | None:
        base = values["self"]
        if not isinstance(base, fx.Node) or not _is_new(base) or len(base.users) > 1:
            return None
        first = [values["from"]] if "from" in values else []  # it cannot be an argument's name in Python
        rest = {n: value for n, value in values.items() if n not in ("self", "from", "generator")}
        return call(f"{scene.receiver(base)}.{name}_", scene, *first, **rest)

    return spelled


def _is_new(node: fx.Node) -> bool:
    """Whether a tensor is made by itself, or is one of another type that a cast makes of such a tensor."""
    if node.target in _CASTS:
        base = node.args[0]
        if not isinstance(base, fx.Node):
            return False
        before, after = base.meta.get("val"), node.meta.get("val")
        if not isinstance(before, torch.Tensor) or not isinstance(after, torch.Tensor):
            return False
        return before.dtype != after.dtype and _is_new(base)
    return node.target in _MAKERS


_CASTS = {torch.ops.aten.to.dtype, torch.ops.aten.to.other, torch.ops.aten.to.device}
_MAKERS = {
    torch.ops.aten.empty.memory_format, torch.ops.aten.empty_like.default, torch.ops.aten.new_empty.default,
    torch.ops.aten.ones.default, torch.ops.aten.ones_like.default, torch.ops.aten.new_ones.default,
    torch.ops.aten.zeros.default, torch.ops.aten.zeros_like.default, torch.ops.aten.new_zeros.default,
    torch.ops.aten.full.default, torch.ops.aten.full_like.default, torch.ops.aten.new_full.default,
}  # fmt: skip

SPECIAL: dict[str, Special] = FUNCTIONS | {
    "_assert_async": _assertion,
    "alias": lambda values, scene: scene.source(values["self"]),
    "block_diag": _each_by_itself("block_diag"),
    "broadcast_tensors": _each_by_itself("broadcast_tensors"),
    "cartesian_prod": _each_by_itself("cartesian_prod"),
    **{name: _filled(name) for name in ("cauchy", "exponential", "geometric", "log_normal", "uniform")},
    **{name: _attribute(attribute) for name, attribute in _ATTRIBUTES.items()},
    "sym_size": lambda values, scene: Source(
        f"{scene.receiver(values['self'])}.shape[{scene.text(values['dim'])}]"
    ),
    "slice": basic_subscript("slice"),
    "slice_scatter": _slice_scatter,
    "select": basic_subscript("select"),
    "index": subscript_of_tensors,
    "to": _to,
    "to.dtype_layout": _moved,
    "view": _sized("view", "size"),
    "reshape": _sized("reshape", "shape"),
    "permute": _sized("permute", "dims"),
    "expand": _sized("expand", "size"),
    "repeat": _sized("repeat", "repeats"),
    "rsub": _rsub,
    **{name: _method(public) for name, public in _METHODS.items()},
    "meshgrid": _meshgrid,
    "neg": _unary("-"),
    "bitwise_not": _unary("~"),
    "cat": _lists_first("torch.cat", "tensors"),
    "stack": _lists_first("torch.stack", "tensors"),
    "unsqueeze": several_new_dimensions,
    "split_with_sizes": _split_with_sizes,
    "einsum": _einsum,
}
