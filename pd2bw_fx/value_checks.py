"""Functions of torch that check values: where there are none, the check is taken as passed.

torch.istft asks whether its windows leave a gap, and raises in the stages as it does in the model. torch.cov
and torch.corrcoef ask whether there are enough samples, and would be traced for one number of them: a trace
has what they compute instead.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._subclasses.fake_impls import op_implementations_dict

_CHECKING = ("istft", "cov", "corrcoef")
_OPERATORS = frozenset(getattr(torch.ops.aten, name).default for name in _CHECKING)
_TORCH_COV = torch.cov
_QUESTION = torch.ops.aten.equal.default  # "is there a gap": is it equal to true


def _cov(
    input: Tensor,  # noqa: A002 (torch's word)
    *,
    correction: int = 1,
    fweights: Tensor | None = None,
    aweights: Tensor | None = None,
) -> Tensor:
    if fweights is not None or aweights is not None:
        return _TORCH_COV(input, correction=correction, fweights=fweights, aweights=aweights)
    rows = input if input.ndim > 1 else input.view(1, -1)
    apart = rows - (rows.sum(1) / rows.shape[1]).unsqueeze(1)
    return (torch.mm(apart, apart.t().conj()) / (rows.shape[1] - correction)).squeeze()


def _corrcoef(input: Tensor) -> Tensor:  # noqa: A002
    covariance = _cov(input)
    if covariance.ndim == 0:
        return covariance / covariance
    variance = covariance.diag()
    deviation = (variance.real if variance.is_complex() else variance).sqrt()
    correlation = covariance / deviation.view(-1, 1) / deviation.view(1, -1)
    if correlation.is_complex():
        return torch.complex(correlation.real.clip(-1, 1), correlation.imag.clip(-1, 1))
    return correlation.clip(-1, 1)


def checks_passed_in(call: Any) -> AbstractContextManager[None]:
    """Returns a context in which the operator runs on tensors without values, its checks taken as passed."""
    return _found_in_order() if call in _OPERATORS else nullcontext()


@contextmanager
def skip_value_checks() -> Iterator[None]:
    found = {"cov": _unasked(_cov), "corrcoef": _unasked(_corrcoef), "istft": _unasked(torch.istft)}
    with ExitStack() as places:
        for holder in (torch, torch.Tensor):
            for name, function in found.items():
                places.enter_context(patch.object(holder, name, function))
        yield


def _unasked(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with _found_in_order():
            return function(*args, **kwargs)

    return call


@contextmanager
def _found_in_order() -> Iterator[None]:
    with patch.dict(op_implementations_dict, {_QUESTION: lambda *_: False}):
        yield
