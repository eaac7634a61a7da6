"""How far two tensors are apart, and how far they may be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pd2bw_fx.errors import VerificationError
from pd2bw_fx.graph import OperatorGraph
from pd2bw_fx.stage import StageProgram

# Relative to a tensor's largest entry: no more than rounding of sums in another order.
_TOLERANCES = {
    torch.float64: 1e-12, torch.complex128: 1e-12, torch.float32: 2e-5, torch.complex64: 2e-5,
    torch.float16: 2e-2, torch.bfloat16: 1e-1,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Difference:
    """The largest absolute difference of two tensors, and their largest entry as its scale.

    The scale of a gradient is at least a thousandth of the largest entry of all gradients.
    """

    name: str
    largest: float
    scale: float

    @property
    def relative(self) -> float:
        return self.largest / self.scale if self.scale > 0 else self.largest


def coarsest_tolerance(graph: OperatorGraph, programs: Sequence[StageProgram]) -> float:
    """Returns the tolerance of the coarsest type that any operator of the stages computes in."""
    computed = [op for op in graph.operators.values() if not op.is_replicable]
    dtypes = {spec.dtype for op in computed for spec in op.outputs}
    autocast = [program.source for program in programs if "torch.autocast(" in program.source]
    dtypes |= {d for d in (torch.bfloat16, torch.float16) if any(str(d) in source for source in autocast)}
    return max((tolerance for dtype, tolerance in _TOLERANCES.items() if dtype in dtypes), default=0.0)


def tolerance_of(tensor: Tensor | None, coarsest: float) -> float:
    """Returns a tensor's tolerance: 0 for whole numbers, else the larger of `coarsest` and its type's."""
    own = None if tensor is None else _TOLERANCES.get(tensor.dtype)
    return 0.0 if own is None else max(own, coarsest)


def largest_of(tensor: Tensor) -> float:
    tensor = tensor.to_dense() if tensor.is_sparse else tensor
    return float(tensor.detach().abs().max().nan_to_num()) if tensor.numel() else 0.0


def difference(name: str, expected: Tensor | None, found: Tensor | None, faintest: float) -> Difference:
    if expected is None and found is None:
        return Difference(name, 0.0, 0.0)
    if expected is None or found is None:
        # An unread parameter has no gradient in one and zeros in the other: the same thing.
        other = expected if expected is not None else found
        assert other is not None
        return Difference(name, largest_of(other), faintest)
    expected, found = (t.to_dense() if t.is_sparse else t for t in (expected, found))
    if expected.shape != found.shape or expected.dtype != found.dtype:
        raise VerificationError(
            f"{name} is {found.dtype} {tuple(found.shape)} in the stages, "
            f"{expected.dtype} {tuple(expected.shape)} in the model"
        )
    if expected.numel() == 0 or torch.equal(expected, found):
        return Difference(name, 0.0, 1.0)
    wide = torch.complex128 if expected.is_complex() else torch.float64
    a, b = expected.to(wide), found.to(wide)
    same = (a == b) | (a.isnan() & b.isnan())
    apart = torch.where(same, 0.0, (a - b).abs()).max()
    return Difference(name, float(apart.nan_to_num(nan=float("inf"))), max(largest_of(a), faintest))
