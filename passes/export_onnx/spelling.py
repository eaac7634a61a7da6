"""Writes calls that torch's exporter to ONNX translates wrongly or not at all in a form that it can."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from .assertions import ASSERTING, Asserted
from .operators.translatable import TRANSLATABLE


class TranslatableSpelling(TorchFunctionMode):
    """Replaces calls by the same computation in other words, while the exporter records a stage.

    call                what the exporter gets wrong                      written as
    assertions          leaves them out                                   noted in `asserted`
    attention           takes four dimensions; other memory layout        four dimensions, contiguous
    batch_norm          in training, translates it as in evaluation       its own mean and variance
    layer_norm          one type for input and weight                     cast to the weight's
    cross_entropy       no label smoothing, probabilities, rows' losses,  log_softmax and gather
                        or rows that a mask selects
    nll_loss            rows' losses as one number; rows of a mask        gather
    conv3d              without bias, zeros in a shape no runtime takes   with a bias of zeros
    diagonal_scatter    unknown                                           index_put
    index_put           by a mask                                         where
    `x.data`            the memory of a constant                          detach
    view                not possible in the exporter's memory layout      reshape
    `operators/`        see there
    """

    def __init__(self, opset: int = 20) -> None:
        super().__init__()
        self._opset = opset
        self.asserted = Asserted()

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        if func in ASSERTING and self.asserted.is_recording:
            return self.asserted.note(*args, **named)
        if func in _ATTENTION:
            query, key, value, *others = args
            if others:
                named["attn_mask"], others = others[0], others[1:]
            named |= dict(zip(("dropout_p", "is_causal"), others, strict=False))
            if self._opset >= _HAS_ATTENTION:
                return _attention(_attention_of_words, query, key, value, whole_mask=True, **named)
            return _attention(func, query, key, value, **named)
        if func is functional.batch_norm and _named(_BATCH_NORM, args, named).get("training"):
            return _normalised_by_batch(**_named(_BATCH_NORM, args, named))
        if func is functional.layer_norm:
            return _layer_norm(**_named(_LAYER_NORM, args, named))
        if func is functional.cross_entropy:
            named = _named(_CROSS_ENTROPY, args, named)
            if named.get("label_smoothing") or named["target"].is_floating_point() or _is_by_row(named):
                return _cross_entropy(**named)
            return _cross_entropy(**named) if _has_selected_rows(named) else func(**named)
        if func is functional.nll_loss:
            named = _named(_NLL_LOSS, args, named)
            is_written_out = _is_by_row(named) or _has_selected_rows(named)
            return _nll_loss(**named) if is_written_out else func(**named)
        if func in _CONV3D and _named(_CONVOLUTION, args, named).get("bias") is None:
            named = _named(_CONVOLUTION, args, named)
            named["bias"] = named["weight"].new_zeros(named["weight"].shape[0])
            return func(**named)
        if func in _DIAGONAL_SCATTER:
            return _with_diagonal(*args, **named)
        if func in _INDEX_PUT and (filled := _filled(*args, **named)) is not None:
            return filled
        if func == _READ_DATA:
            return args[0].detach()
        if func in _VIEW and not any(isinstance(argument, torch.dtype) for argument in args):
            return Tensor.reshape(*args, **named)
        if func in TRANSLATABLE and (result := TRANSLATABLE[func](*args, **named)) is not NotImplemented:
            return result
        return func(*args, **named)


_ATTENTION = {
    functional.scaled_dot_product_attention,
    torch.ops.aten.scaled_dot_product_attention,
    torch.ops.aten.scaled_dot_product_attention.default,
}
_HAS_ATTENTION = 23  # the opset
_CONV3D = {functional.conv3d, torch.ops.aten.conv3d, torch.ops.aten.conv3d.default}
_DIAGONAL_SCATTER = {
    Tensor.diagonal_scatter,
    torch.diagonal_scatter,
    torch.ops.aten.diagonal_scatter,
    torch.ops.aten.diagonal_scatter.default,
}
_INDEX_PUT = {
    Tensor.index_put,
    torch.index_put,
    torch.ops.aten.index_put,
    torch.ops.aten.index_put.default,
}
_READ_DATA = Tensor.data.__get__  # type: ignore[attr-defined]
_VIEW = {Tensor.view, torch.ops.aten.view, torch.ops.aten.view.default}


_CONVOLUTION = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
_CROSS_ENTROPY = (
    "input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction", "label_smoothing",
)  # fmt: skip
_NLL_LOSS = ("input", "target", "weight", "size_average", "ignore_index", "reduce", "reduction")
_LAYER_NORM = ("input", "normalized_shape", "weight", "bias", "eps")
_BATCH_NORM = ("input", "running_mean", "running_var", "weight", "bias", "training", "momentum", "eps")


def _named(names: Sequence[str], args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    return dict(zip(names, args, strict=False)) | dict(kwargs)


def _is_by_row(named: Mapping[str, Any]) -> bool:
    """Returns whether each row of (batch, classes) has its loss, which the exporter takes for one number."""
    return named.get("reduction") == "none" and named["input"].dim() == 2


def _has_selected_rows(named: Mapping[str, Any]) -> bool:
    """Returns whether values say how many rows there are (`logits[mask]`), and may leave none."""
    return bool(free_unbacked_symbols(tuple(named["input"].shape)))


def _nll_loss(
    input: Tensor,  # noqa: A002 - as torch calls it
    target: Tensor,
    weight: Tensor | None = None,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    **_: Any,
) -> Tensor:
    """Computes the negative log likelihood. input: (batch, classes, ..) or (classes), log probabilities."""
    classes = 1 if input.dim() > 1 else 0
    told = target != ignore_index
    known = torch.where(told, target, 0)
    own = _weighed(input, weight).gather(classes, known.unsqueeze(classes)).squeeze(classes)
    losses = torch.where(told, -own, 0.0)
    return _reduced(losses, told, None if weight is None else weight[known], reduction)


def _weighed(logs: Tensor, weight: Tensor | None) -> Tensor:
    """Returns the logarithms times the weights of their classes. logs: (batch, classes, ..) or (classes)"""
    return logs if weight is None else logs * weight.reshape(-1, *(1,) * max(logs.dim() - 2, 0))


def _reduced(losses: Tensor, told: Tensor, weights: Tensor | None, reduction: str) -> Tensor:
    """Reduces losses. The mean is over the targets that count, by the weights of their classes."""
    if reduction == "none":
        return losses
    counted = told.to(losses.dtype) if weights is None else torch.where(told, weights, 0.0)
    return losses.sum() / counted.sum() if reduction == "mean" else losses.sum()


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
    """Computes cross entropy with label smoothing (arXiv 1512.00567, section 7).

    Targets are classes, or probabilities of all classes.
    """
    classes = 1 if input.dim() > 1 else 0
    logs, count = input.log_softmax(classes), input.shape[classes]
    rest = label_smoothing / count
    weighed = _weighed(logs, weight)
    if target.is_floating_point():
        losses = -(weighed * (target * (1 - label_smoothing) + rest)).sum(classes)
        number = max(1, input.numel() // count)
        return losses if reduction == "none" else losses.sum() / (number if reduction == "mean" else 1)
    if not label_smoothing:  # the other classes do not count, not even 0 times minus infinity
        return _nll_loss(logs, target, weight, ignore_index=ignore_index, reduction=reduction)
    told = target != ignore_index
    known = torch.where(told, target, 0)
    own = weighed.gather(classes, known.unsqueeze(classes)).squeeze(classes)
    losses = torch.where(told, -(1 - label_smoothing) * own - rest * weighed.sum(classes), 0.0)
    return _reduced(losses, told, None if weight is None else weight[known], reduction)


def _layer_norm(
    input: Tensor,  # noqa: A002 - as torch calls it
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """Computes in the weight's type: under autocast the input may have another, and ONNX has one for both."""
    dtype = input.dtype if weight is None else weight.dtype
    normed = functional.layer_norm(input.to(dtype), list(normalized_shape), weight, bias, eps)
    return normed.to(input.dtype)


def _normalised_by_batch(
    input: Tensor,  # noqa: A002 - as torch calls it
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    **_: Any,
) -> Tensor:
    """Normalises by the batch's own mean and variance. input: (batch, channels, ...)."""
    others = [axis for axis in range(input.dim()) if axis != 1]
    channels = [1, -1] + [1] * (input.dim() - 2)
    variance, mean = torch.var_mean(input, dim=others, correction=0, keepdim=True)
    result = (input - mean) * torch.rsqrt(variance + eps)
    if weight is not None:
        result = result * weight.view(channels)
    return result if bias is None else result + bias.view(channels)


def _attention(
    func: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    attn_mask: Tensor | None = None,
    whole_mask: bool = False,
    **options: Any,
) -> Tensor:
    """Calls `func` with four dimensions. query: (..., time, width), with any leading dimensions.

    `whole_mask` gives the mask a row for each query, as onnxruntime's Attention wants it.
    """
    if attn_mask is not None and whole_mask:
        attn_mask = attn_mask.expand(*attn_mask.shape[:-2], query.shape[-2], key.shape[-2])
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
    if attn_mask is not None:  # torch returns 0 for rows whose keys are all masked
        seen = attn_mask if attn_mask.dtype is torch.bool else attn_mask != -math.inf
        mixed = torch.where(seen.any(-1, keepdim=True), mixed, 0.0)
    return mixed[0, 0] if added == 2 else mixed.squeeze(1) if added == 1 else mixed


def _attention_of_words(
    query: Tensor, key: Tensor, value: Tensor, *, attn_mask: Tensor | None = None, **options: Any
) -> Tensor:
    """Writes attention out where a mask of numbers is added.

    onnxruntime's Attention is wrong for rows where every number added is the lowest one.
    """
    if attn_mask is None or attn_mask.dtype is torch.bool or options.get("dropout_p"):
        return functional.scaled_dot_product_attention(query, key, value, attn_mask=attn_mask, **options)
    if options.get("enable_gqa"):
        key, value = (_for_each_head(tensor, query.shape[-3]) for tensor in (key, value))
    scale = options.get("scale") or query.shape[-1] ** -0.5
    shares: Tensor = ((query * scale) @ key.transpose(-2, -1) + attn_mask).softmax(-1)
    return shares @ value


def _for_each_head(tensor: Tensor, num_heads: int) -> Tensor:
    """Repeats each key or value head for the query heads that share it."""
    return tensor.repeat_interleave(num_heads // tensor.shape[-3], dim=-3)


def _with_heads(tensor: Tensor, added: int) -> Tensor:
    """(batch, time, width) -> (batch, 1, time, width); (time, width) -> (1, 1, time, width)"""
    return tensor.unsqueeze(1) if added == 1 else tensor[None, None]


def _with_diagonal(
    input: Tensor,  # noqa: A002 - as torch calls it
    src: Tensor,
    offset: int = 0,
    dim1: int = 0,
    dim2: int = 1,
) -> Tensor:
    """Puts src: (..., length) on the diagonal of dimensions `dim1` and `dim2`."""
    rows = torch.arange(src.shape[-1], device=src.device)
    places = (rows - min(offset, 0), rows + max(offset, 0))
    first = input.movedim((dim1, dim2), (0, 1))
    return first.index_put(places, src.movedim(-1, 0)).movedim((0, 1), (dim1, dim2))


def _filled(
    input: Tensor,  # noqa: A002 - as torch calls it
    indices: Sequence[Tensor | None],
    values: Tensor,
    accumulate: bool = False,
) -> Tensor | None:
    """Computes `x[:, mask] = 0.0` or `= y[:, mask]` by `where`.

    Returns None where the indices are no mask, or where a known number of values other than one is given.
    """
    given = [index for index in indices if index is not None]
    if len(given) != 1 or given[0].dtype is not torch.bool or accumulate:
        return None
    (mask,) = given
    before = next(place for place, index in enumerate(indices) if index is not None)
    behind = input.dim() - before - mask.dim()
    wide = mask.reshape(*mask.shape, *(1,) * behind)
    if type(values.numel()) is int:
        return torch.where(wide, values.reshape(()), input) if values.numel() == 1 else None
    if values.dim() != before + 1 + behind or type(values.shape[before]) is int:
        return None
    # Each picked place takes the value of its number among the picked; an extra row serves an empty mask.
    number = (mask.flatten().to(torch.int64).cumsum(0) - 1).clamp(min=0)
    one_more = torch.cat(
        [values, torch.zeros_like(input.flatten(before, before + mask.dim() - 1).narrow(before, 0, 1))],
        before,
    )
    return torch.where(wide, one_more.index_select(before, number).reshape(input.shape), input)
