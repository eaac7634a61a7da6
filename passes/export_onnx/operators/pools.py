"""Pools: the largest or the mean of windows whose sizes differ, and sums over a divisor of one's own."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional


def _windows(output_size: Any, shape: Any, num_dims: int) -> dict[int, list[tuple[int, int]]] | None:
    """Returns where the windows of each dimension begin and end; None for open sizes."""
    asked = output_size if isinstance(output_size, tuple | list) else (output_size,) * num_dims
    wanted = dict(zip(range(-num_dims, 0), asked * (num_dims // len(asked)), strict=True))
    if any(type(size) is not int for size in shape):
        return None
    counts = {dim: count for dim, count in wanted.items() if count is not None and count != shape[dim]}
    return {
        dim: [(place * shape[dim] // count, -(-(place + 1) * shape[dim] // count)) for place in range(count)]
        for dim, count in counts.items()
    }


def _adaptive_max_pool(
    input: Tensor,  # noqa: A002 - as torch calls it
    output_size: Any,
    return_indices: bool = False,
    *,
    num_dims: int,
) -> Any:
    """Takes the maximum of each window, one dimension after another, and its index in the whole input.

    Of equal maxima it takes the first. Open sizes are left to the exporter.
    """
    shape = input.shape[-num_dims:]
    windows = _windows(output_size, shape, num_dims)
    if windows is None:
        return NotImplemented
    values, places = input, torch.arange(math.prod(shape), device=input.device).reshape(shape)
    places = places.expand(input.shape)
    for dim, bounds in reversed(windows.items()):
        found = [values.narrow(dim, start, end - start).max(dim, keepdim=True) for start, end in bounds]
        values = torch.cat([cell.values for cell in found], dim)
        starts = torch.tensor([start for start, _ in bounds], device=input.device)
        own = torch.cat([cell.indices for cell in found], dim)
        own = own + starts.reshape(-1, *(1,) * (-dim - 1))
        places = places.gather(dim, own)
    return (values, places) if return_indices else values


def _adaptive_max_pool_with_places(
    self: Tensor, output_size: Any, return_indices: bool = True, *, num_dims: int
) -> Any:
    return _adaptive_max_pool(self, output_size, True, num_dims=num_dims)


def _adaptive_mean_pool(input: Tensor, output_size: Any, *, num_dims: int) -> Any:  # noqa: A002
    """Takes the mean of each window, one dimension after another. Open sizes are left to the exporter."""
    windows = _windows(output_size, input.shape[-num_dims:], num_dims)
    if windows is None:
        return NotImplemented
    values = input
    for dim, bounds in windows.items():
        means = [values.narrow(dim, start, end - start).mean(dim, keepdim=True) for start, end in bounds]
        values = torch.cat(means, dim)
    return values


def _sum_pool(
    input: Tensor,  # noqa: A002 - as torch calls it
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
    *,
    num_dims: int,
) -> Any:
    """Divides sums of windows by a number of one's own, which the exporter leaves out.

    With `ceil_mode`, zeros complete a last window that begins within the input or the padding before it.
    """
    if divisor_override is None:
        return NotImplemented
    shape = input.shape[-num_dims:]
    given = (kernel_size, kernel_size if stride is None else stride, padding)
    sides, steps, before = (_of_each(option, num_dims) for option in given)
    around: list[int] = []
    for size, side, step, margin in zip(shape, sides, steps, before, strict=True):
        if ceil_mode and type(size) is not int:
            return NotImplemented
        missing = (side - size - 2 * margin) % step if ceil_mode else 0
        begins = size + 2 * margin + missing - side
        around = [margin, margin + missing if begins < size + margin else margin, *around]
    pool = (functional.avg_pool2d, functional.avg_pool3d)[num_dims - 2]
    means: Tensor = pool(functional.pad(input, around), sides, steps)
    return means * (math.prod(sides) / divisor_override)


def _of_each(option: Any, num_dims: int) -> list[int]:
    given = [option] if isinstance(option, int) else list(option)
    return given * (num_dims // len(given))


BY_FUNCTION: Mapping[Any, Callable[..., Any]] = {
    function: functools.partial(kernel, num_dims=num_dims)
    for num_dims in (1, 2, 3)
    for kernel, function in (
        (_adaptive_max_pool, getattr(functional, f"adaptive_max_pool{num_dims}d")),
        (_adaptive_max_pool_with_places, getattr(functional, f"adaptive_max_pool{num_dims}d_with_indices")),
    )
} | {
    torch.adaptive_max_pool1d: functools.partial(_adaptive_max_pool_with_places, num_dims=1),
    functional.adaptive_avg_pool3d: functools.partial(_adaptive_mean_pool, num_dims=3),
    functional.avg_pool2d: functools.partial(_sum_pool, num_dims=2),
    functional.avg_pool3d: functools.partial(_sum_pool, num_dims=3),
}
"""Functions of torch and torch.nn.functional."""
