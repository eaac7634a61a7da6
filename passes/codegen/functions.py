"""Operators that are functions of torch with another name or other arguments than their schema's.

F.cross_entropy, F.interpolate and torch.stft are among them.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx

from .expression import Scene, Source, Special, call, given
from .literals import literal
from .spatial import SPATIAL


def _embedding(values: Mapping[str, Any], scene: Scene) -> Source:
    padding = values.get("padding_idx", -1)
    kwargs = {} if padding == -1 else {"padding_idx": padding}
    kwargs |= given(values, "scale_grad_by_freq", "sparse")
    return call("F.embedding", scene, values["indices"], values["weight"], **kwargs)


def _layer_norm(values: Mapping[str, Any], scene: Scene) -> Source:
    kwargs = given(values, "weight", "bias", "eps")
    return call("F.layer_norm", scene, values["input"], tuple(values["normalized_shape"]), **kwargs)


def _dropout(values: Mapping[str, Any], scene: Scene) -> Source:
    tensor, rate = scene.text(values["input"]), literal(values["p"])
    return Source(f"F.dropout({tensor}, {rate}, training={scene.mode(values['train'])})")


def _alpha_dropout(name: str) -> Special:
    def spelled(values: Mapping[str, Any], scene: Scene) -> Source:
        tensor, rate, mode = scene.text(values["input"]), literal(values["p"]), scene.mode(values["train"])
        return Source(f"F.{name}({tensor}, {rate}{'' if mode == 'False' else f', training={mode}'})")

    return spelled


def _feature_dropout(values: Mapping[str, Any], scene: Scene) -> Source | None:
    """Spells F.dropout2d of images and the other feature dropouts, by the number of dimensions."""
    dropped = values["input"].meta.get("val")
    if not isinstance(dropped, torch.Tensor) or dropped.dim() not in (3, 4, 5):
        return None
    tensor, rate = scene.text(values["input"]), literal(values["p"])
    return Source(f"F.dropout{dropped.dim() - 2}d({tensor}, {rate}, training={scene.mode(values['train'])})")


def _group_norm(values: Mapping[str, Any], scene: Scene) -> Source:
    kwargs = given(values, "weight", "bias", "eps")
    return call("F.group_norm", scene, values["input"], values["num_groups"], **kwargs)


def _instance_norm(values: Mapping[str, Any], scene: Scene) -> Source:
    statistics = given(values, "running_mean", "running_var")
    kwargs = {name: scene.text(v) for name, v in (statistics | given(values, "weight", "bias")).items()}
    if statistics.get("running_mean") is not None:
        kwargs["use_input_stats"] = scene.mode(values["use_input_stats"])
        kwargs["momentum"] = literal(values["momentum"])
    kwargs = {name: text for name, text in kwargs.items() if text != "None"}
    texts = [scene.text(values["input"]), *(f"{name}={text}" for name, text in kwargs.items())]
    return Source(f"F.instance_norm({', '.join(texts)}, eps={literal(values['eps'])})")


def _attention(values: Mapping[str, Any], scene: Scene) -> Source:
    kwargs = {name: scene.text(v) for name, v in given(values, "attn_mask").items()}
    if values.get("dropout_p", 0.0):
        rate, mode = literal(values["dropout_p"]), scene.mode(value=True)
        kwargs["dropout_p"] = rate if mode == "True" else f"{rate} if {mode} else 0.0"
    kwargs |= {n: scene.text(v) for n, v in given(values, "is_causal", "scale", "enable_gqa").items()}
    texts = [scene.text(values[name]) for name in ("query", "key", "value")]
    texts += [f"{name}={text}" for name, text in kwargs.items()]
    return Source(f"F.scaled_dot_product_attention({', '.join(texts)})")


def _batch_norm(values: Mapping[str, Any], scene: Scene) -> Source:
    statistics = [scene.text(values.get(name)) for name in ("running_mean", "running_var")]
    affine = [scene.text(values.get(name)) for name in ("weight", "bias")]
    training = scene.mode(values["training"])
    if values.get("running_mean") is None:  # the batch's own statistics, in evaluation too
        training = "True"
    rates = [literal(values["momentum"]), literal(values["eps"])]
    texts = [scene.text(values["input"]), *statistics, *affine, training, *rates]
    return Source(f"F.batch_norm({', '.join(texts)})")


_REDUCTIONS = {0: "none", 1: "mean", 2: "sum"}


def _loss(function: str) -> Special:
    def spelled(values: Mapping[str, Any], scene: Scene) -> Source:
        rest = {name: value for name, value in values.items() if name not in ("self", "target")}
        if "reduction" in rest:
            rest["reduction"] = _REDUCTIONS[rest["reduction"]]
        return call(f"F.{function}", scene, values["self"], values["target"], **rest)

    return spelled


def _named(function: str) -> Special:
    """Spells a function of tensors in the schema's order; other operands are given by the schema's names."""
    return lambda values, scene: _by_name(function, values, scene)


def _activation(name: str) -> Special:
    """Spells a function of torch.nn.functional; arguments at that function's defaults are left out."""
    defaults = _OF_BUILTINS.get(name)
    if defaults is None:
        arguments = inspect.signature(getattr(F, name)).parameters
        defaults = {argument: parameter.default for argument, parameter in arguments.items()}

    def spelled(values: Mapping[str, Any], scene: Scene) -> Source:
        given_otherwise = {
            argument: value
            for argument, value in values.items()
            if isinstance(value, fx.Node) or argument not in defaults or value != defaults[argument]
        }
        return _by_name(f"F.{name}", given_otherwise, scene)

    return spelled


_OF_BUILTINS: dict[str, dict[str, Any]] = {"softplus": {"beta": 1.0, "threshold": 20.0}}


def _by_name(function: str, values: Mapping[str, Any], scene: Scene) -> Source:
    tensors = [value for value in values.values() if isinstance(value, fx.Node)]
    rest = {
        name: tuple(value) if isinstance(value, list) else value
        for name, value in values.items()
        if not isinstance(value, fx.Node)
    }
    return call(function, scene, *tensors, **rest)


def _reduced(function: str) -> Special:
    """Spells losses whose public function reduces nothing unless told to, unlike the operator."""

    def spelled(values: Mapping[str, Any], scene: Scene) -> Source:
        if "reduction" in values:
            values = {**values, "reduction": _REDUCTIONS[values["reduction"]]}
        return _by_name(f"F.{function}", values, scene)

    return spelled


_REDUCED = (
    "cosine_embedding_loss", "hinge_embedding_loss", "margin_ranking_loss", "triplet_margin_loss", "kl_div",
    "huber_loss", "soft_margin_loss", "multilabel_margin_loss", "poisson_nll_loss",
)  # fmt: skip


def _softmax(function: str) -> Special:
    def spelled(values: Mapping[str, Any], scene: Scene) -> Source:
        kwargs = {"dim": values["dim"]} | given(values, "dtype")
        return call(f"F.{function}", scene, values["self"], **kwargs)

    return spelled


def _gelu(values: Mapping[str, Any], scene: Scene) -> Source:
    return call("F.gelu", scene, values["self"], **given(values, "approximate"))


def _pad(values: Mapping[str, Any], scene: Scene) -> Source:
    kwargs = given(values, "mode", "value")
    value, padded = kwargs.get("value"), values["self"].meta.get("val")
    if type(value) is float and value.is_integer() and _is_of_integers(padded):
        kwargs["value"] = int(value)
    return call("F.pad", scene, values["self"], tuple(values["pad"]), **kwargs)


def _is_of_integers(tensor: Any) -> bool:
    if not isinstance(tensor, torch.Tensor):
        return False
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype == torch.bool)


def _cdist(values: Mapping[str, Any], scene: Scene) -> Source:
    kwargs = given(values, "p")
    if values.get("compute_mode"):
        kwargs["compute_mode"] = _DISTANCES[values["compute_mode"]]
    return call("torch.cdist", scene, values["x1"], values["x2"], **kwargs)


_DISTANCES = {1: "use_mm_for_euclid_dist", 2: "donot_use_mm_for_euclid_dist"}


def _grouped_mm(values: Mapping[str, Any], scene: Scene) -> Source:
    kwargs = given(values, "offs", "bias", "out_dtype")
    return call("F.grouped_mm", scene, values["self"], values["mat2"], **kwargs)


def _stft(values: Mapping[str, Any], scene: Scene) -> Source:
    """Spells torch.stft without `center`, since what torch.stft pads is padded before the operator."""
    kwargs = {name: value for name, value in values.items() if name not in ("self", "n_fft")}
    return call("torch.stft", scene, values["self"], values["n_fft"], center=False, **kwargs)


def _tensordot(values: Mapping[str, Any], scene: Scene) -> Source:
    dims = (tuple(values["dims_self"]), tuple(values["dims_other"]))
    return call("torch.tensordot", scene, values["self"], values["other"], dims=dims)


FUNCTIONS: dict[str, Special] = SPATIAL | {
    "linear": _named("F.linear"),
    "embedding": _embedding,
    "layer_norm": _layer_norm,
    "dropout": _dropout,
    "feature_dropout": _feature_dropout,
    **{name: _alpha_dropout(name) for name in ("alpha_dropout", "feature_alpha_dropout")},
    "group_norm": _group_norm,
    "scaled_dot_product_attention": _attention,
    "batch_norm": _batch_norm,
    "instance_norm": _instance_norm,
    "cross_entropy_loss": _loss("cross_entropy"),
    "mse_loss": _loss("mse_loss"),
    "multi_margin_loss": _loss("multi_margin_loss"),
    "l1_loss": _loss("l1_loss"),
    "smooth_l1_loss": _loss("smooth_l1_loss"),
    "nll_loss_nd": _loss("nll_loss"),
    "binary_cross_entropy": _loss("binary_cross_entropy"),
    "binary_cross_entropy_with_logits": _loss("binary_cross_entropy_with_logits"),
    "ctc_loss": _reduced("ctc_loss"),
    **{name: _reduced(name) for name in _REDUCED},
    "softmax": _softmax("softmax"),
    "log_softmax": _softmax("log_softmax"),
    "one_hot": _named("F.one_hot"),
    "_grouped_mm": _grouped_mm,
    "gelu": _gelu,
    "pad": _pad,
    **{
        name: _activation(name)
        for name in ("relu", "silu", "elu", "leaky_relu", "softplus", "hardtanh", "mish")
    },
    "log_sigmoid": _named("F.logsigmoid"),
    "cdist": _cdist,
    "stft.default": _stft,
    "tensordot": _tensordot,
    "_weight_norm": _named("torch._weight_norm"),  # as torch's own weight_norm calls it
}
"""By the operator's name, or by it and its overload's where others have other operands."""
