"""Operators whose public spelling is another than their schema's: F.cross_entropy, x[:, 0], -x."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from .expression import UNARY, Scene, Source, arguments, infix, subscript
from .literals import literal, quoted


def _call(function: str, scene: Scene, *args: Any, **kwargs: Any) -> Source:
    return Source(f"{function}({arguments(args, kwargs, scene)})")


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


def _reduced(function: str) -> Special:
    """Losses whose word in torch reduces nothing unless told to, other than the operator."""

    def spelled(values: Mapping[str, Any], scene: Scene) -> Source:
        tensors = [value for value in values.values() if isinstance(value, fx.Node)]
        rest = {name: value for name, value in values.items() if not isinstance(value, fx.Node)}
        if "reduction" in rest:
            rest["reduction"] = _REDUCTIONS[rest["reduction"]]
        return _call(f"F.{function}", scene, *tensors, **rest)

    return spelled


_REDUCED = (
    "cosine_embedding_loss", "hinge_embedding_loss", "margin_ranking_loss", "triplet_margin_loss", "kl_div",
    "huber_loss", "soft_margin_loss", "multilabel_margin_loss",
)  # fmt: skip


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
    places = [":"] * dimension + [subscript(bounds, scene)]
    return Source(f"{scene.receiver(values['self'])}[{', '.join(places)}]")


def _slice_scatter(values: Mapping[str, Any], scene: Scene) -> Source:
    bounds = {name: value for name, value in values.items() if name in ("dim", "start", "end", "step")}
    if isinstance(bounds.get("end"), int) and bounds["end"] >= 2**62:
        del bounds["end"]
    return _call(f"{scene.receiver(values['self'])}.slice_scatter", scene, values["src"], **bounds)


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
    return None if "alpha" in values else infix("sub", values["other"], values["self"], scene)


def _unary(sign: str) -> Special:
    return lambda values, scene: Source(f"{sign}{scene.source(values['self']).within(UNARY)}", UNARY)


def _relu(function: str) -> Special:
    return lambda values, scene: _call(f"F.{function}", scene, *values.values())


def _lists_first(function: str, first: str, then: str = "dim") -> Special:
    def spelled(values: Mapping[str, Any], scene: Scene) -> Source:
        return _call(function, scene, values[first], **_given(values, then))

    return spelled


def _unsqueeze(values: Mapping[str, Any], scene: Scene) -> Source | None:
    """Several in a row, written in one line, are one subscript: x[None, None, :]."""
    base, dimensions = values["self"], [values["dim"]]
    while isinstance(base, fx.Node) and base.target is torch.ops.aten.unsqueeze.default:
        if scene.source(base).text.isidentifier():
            break
        dimensions.append(base.args[1])
        base = base.args[0]
    if len(dimensions) == 1 or not isinstance(base.meta.get("val"), torch.Tensor):
        return None
    places = [":"] * base.meta["val"].dim()
    for dimension in reversed(dimensions):
        places.insert(dimension if dimension >= 0 else len(places) + 1 + dimension, "None")
    return Source(f"{scene.receiver(base)}[{', '.join(places)}]")


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


def _assertion(values: Mapping[str, Any], scene: Scene) -> Source:
    return _call("torch._assert_async", scene, *values.values())


SPECIAL: dict[str, Special] = {
    "_assert_async": _assertion,
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
    "ctc_loss": _reduced("ctc_loss"),
    **{name: _reduced(name) for name in _REDUCED},
    "softmax": _softmax("softmax"),
    "log_softmax": _softmax("log_softmax"),
    "slice": _slice,
    "slice_scatter": _slice_scatter,
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
    "unsqueeze": _unsqueeze,
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
