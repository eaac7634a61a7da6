"""Convolutions, pooling, resampling and other window operators, as functions of torch.nn.functional."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from .expression import Scene, Source, Special, call, given


def _one(sizes: Any) -> Any:
    """Returns 3 for (3, 3), as it is usually written, and (3, 2) for [3, 2]."""
    if not isinstance(sizes, list | tuple):
        return sizes
    is_one = sizes and all(type(size) is int and size == sizes[0] for size in sizes)
    return sizes[0] if is_one else tuple(sizes)


_PLAIN_SIZES = {"stride": 1, "padding": 0, "output_padding": 0, "dilation": 1}


def _written(values: Mapping[str, Any], *without: str, **defaults: Any) -> dict[str, Any]:
    """Returns the sizes that are not torch's defaults, with equal ones as one number.

    An empty stride, which stands for the size of the window, is left out too.
    """
    defaults = _PLAIN_SIZES | defaults
    sizes = {name: _one(value) for name, value in values.items() if name not in without}
    return {n: v for n, v in sizes.items() if v != () and not (type(v) is int and v == defaults.get(n))}


def _convolution(name: str) -> Special:
    def spelled(values: Mapping[str, Any], scene: Scene) -> Source:
        sizes = _written(values, "input", "weight")
        return call(f"F.{name}", scene, values["input"], values["weight"], **sizes)

    return spelled


def _pool(name: str) -> Special:
    """Spells a pooling, with `return_indices` where the operator returns the places of the maxima too."""

    def spelled(values: Mapping[str, Any], scene: Scene) -> Source:
        size = _one(values["kernel_size"])
        sizes = _written(values, "self", "kernel_size", stride=size)
        if sizes.get("stride") == size:
            del sizes["stride"]
        indices = {"return_indices": True} if name.endswith(_INDICES) else {}
        return call(f"F.{name.removesuffix(_INDICES)}", scene, values["self"], size, **sizes, **indices)

    return spelled


_INDICES = "_with_indices"


def _adaptive_pool(name: str) -> Special:
    """Spells an adaptive pooling; of the maxima, the operator returns the places too."""
    indices = {"return_indices": True} if name.startswith("adaptive_max") else {}
    return lambda values, scene: call(
        f"F.{name}", scene, values["self"], _one(values["output_size"]), **indices
    )


def _fractional_max_pool(name: str) -> Special:
    def spelled(values: Mapping[str, Any], scene: Scene) -> Source:
        sizes = {"output_size": tuple(values["output_size"]), "return_indices": True}
        samples = given(values, _random_samples="random_samples")
        return call(f"F.{name}", scene, values["self"], tuple(values["kernel_size"]), **sizes, **samples)

    return spelled


def _max_unpool(name: str) -> Special:
    """Spells a max unpooling whose windows are side by side.

    The function takes the size of a window, the operator that of the result.
    """

    def spelled(values: Mapping[str, Any], scene: Scene) -> Source | None:
        given_sizes, tensor = values["output_size"], values["self"].meta.get("val")
        if not isinstance(tensor, torch.Tensor):
            return None
        pairs = list(zip(given_sizes, tensor.shape[-len(given_sizes) :], strict=True))
        if not all(type(out) is type(size) is int and out >= size > 0 for out, size in pairs):
            return None
        window = tuple(out // size for out, size in pairs)
        left_over = [out % size for out, size in pairs]
        is_plain = _one(values.get("stride", window)) == _one(window) and _one(values.get("padding", 0)) == 0
        if not is_plain or any(left >= width for left, width in zip(left_over, window, strict=True)):
            return None  # torch would refuse a result that large
        sizes = {"output_size": tuple(given_sizes)} if any(left_over) else {}
        return call(f"F.{name}", scene, values["self"], values["indices"], _one(window), **sizes)

    return spelled


def _unfold(values: Mapping[str, Any], scene: Scene) -> Source:
    sizes = _written(values, "self", "kernel_size")
    return call("F.unfold", scene, values["self"], _one(values["kernel_size"]), **sizes)


def _fold(values: Mapping[str, Any], scene: Scene) -> Source:
    window, sizes = _one(values["kernel_size"]), _written(values, "self", "output_size", "kernel_size")
    return call("F.fold", scene, values["self"], tuple(values["output_size"]), window, **sizes)


_SAMPLED = ("bilinear", "nearest", "bicubic")
_PADDED = ("zeros", "border", "reflection")


def _grid_sample(values: Mapping[str, Any], scene: Scene) -> Source:
    mode, padding = _SAMPLED[values["interpolation_mode"]], _PADDED[values["padding_mode"]]
    words = {} if mode == _SAMPLED[0] else {"mode": mode}
    words |= {} if padding == _PADDED[0] else {"padding_mode": padding}
    corners = values["align_corners"]
    return call("F.grid_sample", scene, values["input"], values["grid"], **words, align_corners=corners)


def _affine_grid(values: Mapping[str, Any], scene: Scene) -> Source:
    size, corners = tuple(values["size"]), values["align_corners"]
    return call("F.affine_grid", scene, values["theta"], size, align_corners=corners)


def _interpolate(mode: str, *, antialias: bool = False) -> Special:
    def spelled(values: Mapping[str, Any], scene: Scene) -> Source:
        kwargs: dict[str, Any] = {}
        if values.get("output_size") is not None:
            kwargs["size"] = tuple(values["output_size"])
        else:
            factors = tuple(values["scale_factors"])
            kwargs["scale_factor"] = factors[0] if len(set(factors)) == 1 else factors
        kwargs["mode"] = mode
        kwargs |= {"align_corners": True} if values.get("align_corners") else {}
        kwargs |= {"antialias": True} if antialias else {}
        return call("F.interpolate", scene, values["input"], **kwargs)

    return spelled


SPATIAL: dict[str, Special] = {
    **{f"conv{n}d": _convolution(f"conv{n}d") for n in (1, 2, 3)},
    **{f"conv_transpose{n}d": _convolution(f"conv_transpose{n}d") for n in (1, 2, 3)},
    **{f"{kind}_pool{n}d": _pool(f"{kind}_pool{n}d") for kind in ("avg", "max") for n in (1, 2, 3)},
    **{f"max_pool{n}d{_INDICES}": _pool(f"max_pool{n}d{_INDICES}") for n in (1, 2, 3)},
    **{
        f"adaptive_{kind}_pool{n}d": _adaptive_pool(f"adaptive_{kind}_pool{n}d")
        for kind in ("avg", "max")
        for n in (1, 2, 3)
    },
    **{f"fractional_max_pool{n}d": _fractional_max_pool(f"fractional_max_pool{n}d") for n in (2, 3)},
    **{f"max_unpool{n}d": _max_unpool(f"max_unpool{n}d") for n in (2, 3)},
    **{f"upsample_nearest{n}d.vec": _interpolate("nearest") for n in (1, 2, 3)},
    **{f"_upsample_nearest_exact{n}d.vec": _interpolate("nearest-exact") for n in (1, 2, 3)},
    "upsample_linear1d.vec": _interpolate("linear"),
    "upsample_bilinear2d.vec": _interpolate("bilinear"),
    "upsample_bicubic2d.vec": _interpolate("bicubic"),
    "upsample_trilinear3d.vec": _interpolate("trilinear"),
    "_upsample_bilinear2d_aa.vec": _interpolate("bilinear", antialias=True),
    "_upsample_bicubic2d_aa.vec": _interpolate("bicubic", antialias=True),
    "im2col": _unfold,
    "col2im": _fold,
    "grid_sampler": _grid_sample,
    "affine_grid_generator": _affine_grid,
}
"""By the operator's name, or by it and its overload's where others have other operands."""
