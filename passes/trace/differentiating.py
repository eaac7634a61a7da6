"""Models that differentiate in their forward: physics-informed networks, gradient penalties, energies.

torch.export sees what autograd computes, but not all that it computes from: what an operator has saved for
its backward is none of the trace's values. Such a model is exported once more with `saved_values_found`.
Where that is not enough, torch fails somewhere behind the derivative with words of its own.
"""

from __future__ import annotations

import linecache
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._functorch import eager_transforms
from torch.fx.experimental import proxy_tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from pd2bw_fx.errors import Pd2bwError, TraceError

_TORCH = str(Path(torch.__file__).resolve().parent)
_DIFFERENTIATE = (
    (torch.autograd, "grad"),
    (torch.autograd, "backward"),
    (eager_transforms, "grad_increment_nesting"),
    (eager_transforms, "jvp_increment_nesting"),
)


class DerivativeError(TraceError):
    """A derivative in the forward that the trace has not."""


@contextmanager
def differentiation_named() -> Iterator[None]:
    """What fails in here after a derivative was asked for fails with a TraceError that has the line, of
    autograd's own with a DerivativeError."""
    lines: list[str] = []
    by_autograd: list[str] = []
    with ExitStack() as stack:
        for owner, name in _DIFFERENTIATE:
            of_its_own = by_autograd if owner is torch.autograd else []
            stack.enter_context(patch.object(owner, name, _noted(getattr(owner, name), lines, of_its_own)))
        try:
            yield
        except Pd2bwError:
            raise
        except Exception as error:
            if not lines:
                raise
            kind = DerivativeError if lines == by_autograd else TraceError
            raise kind(differentiation_message(lines[0])) from error


@contextmanager
def saved_values_found() -> Iterator[None]:
    """What autograd takes out of an operator is a new tensor, which the trace does not know: here it is known
    by the memory that it is in, as a value of the trace or its transpose (`linear` saves its weight so).

    What a norm saves besides is given out by the operator that it is made of.
    """
    known: dict[int, list[Tensor]] = {}
    track, fetch = proxy_tensor.track_tensor, proxy_tensor.fetch_object_proxy

    def tracked(tensor: Tensor, *args: Any, **kwargs: Any) -> None:
        track(tensor, *args, **kwargs)
        known.setdefault(_memory(tensor), []).append(tensor)

    def fetched(tracer: Any, value: Any) -> Any:
        found = fetch(tracer, value)
        if found is not value or not isinstance(value, Tensor):
            return found
        for original in reversed(known.get(_memory(value), [])):
            if _layout(original) == _layout(value):
                return fetch(tracer, original)
            if original.dim() == value.dim() == 2 and _layout(original.t()) == _layout(value):
                operand: Any = fetch(tracer, original)
                transposed = tracer.create_proxy(
                    "call_function", torch.ops.aten.t.default, (operand.proxy,), {}
                )
                proxy_tensor.track_tensor_tree(value, transposed, constant=None, tracer=tracer)
                return fetch(tracer, value)
        return found

    with (
        patch.object(proxy_tensor, "track_tensor", tracked),
        patch.object(proxy_tensor, "fetch_object_proxy", fetched),
        _OpenNorms(),
    ):
        yield


class _OpenNorms(TorchFunctionMode):
    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        opened = {functional.layer_norm: _layer_norm, functional.group_norm: _group_norm}.get(func, func)
        return opened(*args, **(kwargs or {}))


def _layer_norm(
    input: Tensor,  # noqa: A002 - as torch calls it
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    return torch.native_layer_norm(input, normalized_shape, weight, bias, eps)[0]


def _group_norm(
    input: Tensor,  # noqa: A002 - as torch calls it
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Tensor:
    """input: (batch, channels, ...)"""
    batch, channels = input.shape[:2]
    each = math.prod(input.shape[2:])
    given = input.contiguous()
    return torch.native_group_norm(given, weight, bias, batch, channels, each, num_groups, eps)[0]


def _memory(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _layout(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype


def differentiation_message(line: str) -> str:
    return (
        f"the model differentiates in its forward ({line}), and what autograd computes there is in no trace; "
        "expected a forward of operators alone: write the derivative out"
    )


def _noted(function: Callable[..., Any], *notes: list[str]) -> Callable[..., Any]:
    def noted(*args: Any, **kwargs: Any) -> Any:
        for lines in notes:
            lines.append(_line_outside_torch())
        return function(*args, **kwargs)

    return noted


def _line_outside_torch() -> str:
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename.startswith((_TORCH, __file__)):
        frame = frame.f_back
    file, number = frame.f_code.co_filename, frame.f_lineno
    return f"{Path(file).name}:{number}: {linecache.getline(file, number).strip()}"
