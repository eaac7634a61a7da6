"""How far a rounding moves the values that stages make, where kernels of another runtime round otherwise.

What is left of numbers that cancel each other may be rounding alone: the logarithm of a determinant that is
1, before a normalising flow has been trained.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from pd2bw_fx.roundings import NUM_ROUNDINGS, TIMES_SENSITIVITY, rounded
from pd2bw_fx.stage import StageProgram, held_tensors

from .arrays import to_array
from .check import relative_difference
from .run import run_modules


def allowed_by_rounding(
    programs: Sequence[StageProgram], modules: Sequence[nn.Module], fed: Mapping[str, Tensor]
) -> dict[str, float]:
    """Returns how far each value may be from what torch computes, relative to its largest entry.

    It is four times what a rounding of all weights and inputs does to it, by the least of several draws.
    """
    held = [held_tensors(*pair) for pair in zip(programs, modules, strict=True)]
    before = [{name: tensor.clone() for name, tensor in tensors.items()} for tensors in held]
    expected = run_modules(programs, modules, fed)
    allowed = dict.fromkeys(expected, float("inf"))
    try:
        for seed in range(NUM_ROUNDINGS):
            for tensors, kept in zip(held, before, strict=True):
                _write(tensors, rounded(kept, seed))
            found = run_modules(programs, modules, rounded(fed, seed))
            for name, tensor in expected.items():
                moved = relative_difference(to_array(name, found[name]), to_array(name, tensor))
                allowed[name] = min(allowed[name], TIMES_SENSITIVITY * moved)
    finally:
        for tensors, kept in zip(held, before, strict=True):
            _write(tensors, kept)
    return allowed


def _write(tensors: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    with torch.no_grad():
        for name, tensor in tensors.items():
            tensor.copy_(values[name])
