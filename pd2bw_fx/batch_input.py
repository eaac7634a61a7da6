"""One tensor of a batch: where it is, and what it has to be like, in words that say what to give instead."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pd2bw_fx.containers import place_of
from pd2bw_fx.errors import InputError
from pd2bw_fx.graph import dtype_name
from pd2bw_fx.size_range import SizeRange
from pd2bw_fx.units import counted

TOO_FEW = "leave such a batch out, as DataLoader(drop_last=True) does, or add samples of another"


@dataclass(frozen=True, slots=True)
class BatchInput:
    """One tensor of the batch: the model's input `name` is found at `path` within the call's `argument`.

    `num_dims` and `dtype` are the example's. If it is not `batched`, every microbatch gets the whole tensor.
    `sizes` are those that the program was made for, None where any size will do; empty if nothing is known.
    """

    name: str
    argument: str
    path: tuple[str | int, ...]
    num_dims: int
    dtype: torch.dtype
    batched: bool = True
    sizes: tuple[int | None, ...] = ()

    def __str__(self) -> str:
        return place_of(self.argument, self.path)

    @property
    def quoted(self) -> str:
        """Where it is, for the beginning of a message."""
        return str(self) if self.path else repr(self.argument)

    def require_alike(self, value: Any, *, lengths_asked: bool) -> Tensor:
        """Returns a tensor that is like the example's, and raises InputError for anything else.

        `lengths_asked`: the trace was to leave lengths open.
        """
        if not isinstance(value, Tensor):
            kind = type(value).__name__
            advice = (
                "; torch.as_tensor makes one of it" if kind in ("ndarray", "list", "float", "int") else ""
            )
            raise InputError(f"the batch's {self} is a {kind}; a tensor was expected{advice}")
        if value.layout is not torch.strided or value.is_meta:
            what = "has no values, on the meta device" if value.is_meta else f"is in layout {value.layout}"
            raise InputError(f"the batch's {self} {what}; a dense tensor with values was expected")
        if value.dtype is not self.dtype or value.dim() != self.num_dims:
            found = f"{dtype_name(value.dtype)} with {counted(value.dim(), 'dimension')}"
            raise InputError(
                f"the batch's {self} is {found}; expected {dtype_name(self.dtype)} with {self.num_dims}, "
                "as in the example inputs"
            )
        if any(size not in (None, own) for size, own in zip(self.sizes, value.shape, strict=False)):
            sizes = ", ".join("any" if size is None else str(size) for size in self.sizes)
            raise InputError(
                f"the batch's {self} has shape {tuple(value.shape)}, and the stages were made for "
                f"({sizes}); {self._how_to_fit(value, lengths_asked=lengths_asked)}"
            )
        return value

    def _how_to_fit(self, value: Tensor, *, lengths_asked: bool) -> str:
        """Returns what to try where a tensor has another size than the stages were made for."""
        advice = "give all batches that size, or split with example inputs of another"
        if not self.batched and value.shape[1:] == self.sizes[1:]:
            advice = (
                "its first dimension was not taken for the batch, since other inputs' have another size: "
                "where it is, split with as many samples of each"
            )
        elif lengths_asked:
            advice += "; why tracer='export-sequence' has not left this one open, trace_report says"
        elif not self.dtype.is_floating_point and value.dim() == 2:
            advice += ", or let lengths of token sequences vary with split(tracer='export-sequence')"
        if self.batched or value.shape[1:] != self.sizes[1:]:
            advice += (
                "; sizes of other kinds (a graph's edges) are open in an ExportedProgram of your own, "
                "which split takes: torch.export.export(model, example, dynamic_shapes=..)"
            )
        return advice

    def require_equal_pieces(self, size: int, num_microbatches: int, right: SizeRange) -> None:
        """Raises InputError unless so many samples make microbatches of the sizes that are right."""
        if size == 0:
            raise InputError(f"{self.quoted} has 0 samples: the batch is empty; at least one was expected")
        if size < num_microbatches:
            raise InputError(
                f"{self.quoted} has {counted(size, 'sample')}, which cannot be cut into {num_microbatches} "
                f"microbatches; {TOO_FEW}"
            )
        if size % num_microbatches:
            fewer = max(number for number in range(1, num_microbatches) if size % number == 0)
            other = f"set microbatches_per_update={fewer}, " if fewer > 1 else ""
            raise InputError(
                f"{self.quoted} has {counted(size, 'sample')}, which cannot be cut into {num_microbatches} "
                f"equal microbatches; pass a multiple of {num_microbatches}, {other}or pass Microbatches "
                "that you have cut"
            )
        each = size // num_microbatches
        if each not in right:
            nearest = num_microbatches * right.nearest(each)
            cut = f", {each} in each of {num_microbatches} microbatches" if num_microbatches > 1 else ""
            raise InputError(
                f"{self.quoted} has {counted(size, 'sample')}{cut}; the model was traced for {right}: pass "
                f"{nearest} samples, or split it with other example inputs"
            )
