"""Constants of one number, or a few, that are written where they are read.

They are written as torch.full((), 100.0, device=x.device) and torch.tensor([0.1, 0.2]).to(x.device,
non_blocking=True). Constants of a few numbers that are read more often become buffers that are built from
their numbers.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from pd2bw_fx.graph import OperatorGraph

from .literals import in_tuple, literal

_TYPES_WRITTEN = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
)  # fmt: skip
_TYPES_OF_NUMBERS: dict[type, torch.dtype] = {bool: torch.bool, int: torch.int64, float: torch.float32}
_DIGITS = range(1, 18)  # significant digits; a float64 needs at most 17
_A_FEW = 16
_MOST_READERS = 2  # a tensor of a few numbers with more readers is a buffer


@dataclass(frozen=True, slots=True)
class Number:
    """A tensor of one element, as the number with the fewest digits that makes it."""

    shape: tuple[int, ...]
    value: float
    dtype: torch.dtype

    def spelled(self, device: str) -> str:
        """Writes the tensor by torch.full, which takes it to a GPU without a wait, unlike torch.tensor."""
        shape = in_tuple([literal(size) for size in self.shape]) if self.shape else "()"
        dtype = "" if self._is_of_its_number() else f"dtype={literal(self.dtype)}, "
        return f"torch.full({shape}, {literal(self.value)}, {dtype}device={device})"

    def made(self) -> Tensor:
        return torch.full(self.shape, self.value, dtype=self.dtype, device="cpu")

    def _is_of_its_number(self) -> bool:
        """Whether torch.full would give this number that type by default."""
        is_default = self.dtype != torch.float32 or torch.get_default_dtype() == torch.float32
        return is_default and self.dtype == _TYPES_OF_NUMBERS[type(self.value)]


@dataclass(frozen=True, slots=True)
class FewNumbers:
    """A tensor's numbers in lists, each with the fewest digits that make it."""

    values: list[Any]
    dtype: torch.dtype

    def spelled(self, device: str) -> str:
        """Writes the tensor by torch.tensor and `.to`.

        With device=, torch.tensor would wait until the GPU has done all that it was given before.
        """
        dtype = "" if self.is_of_their_type else f", dtype={literal(self.dtype)}"
        return f"torch.tensor({literal(self.values)}{dtype}).to({device}, non_blocking=True)"

    @property
    def is_of_their_type(self) -> bool:
        """Whether torch.tensor would give these numbers that type by default."""
        return self.made(None).dtype == self.dtype and torch.get_default_dtype() == torch.float32

    def made(self, dtype: torch.dtype | None) -> Tensor:
        return torch.tensor(self.values, dtype=dtype, device="cpu")


def few_numbers(graph: OperatorGraph, name: str) -> FewNumbers | None:
    """Returns the numbers of a constant that the forward makes; None for other tensors, or too many."""
    value = None if graph.fx is None else graph.fx.values.get(name)
    if not isinstance(value, Tensor) or not _is_made_in_the_forward(graph, name) or not _is_plain(value):
        return None
    if not value.dim() or not 1 <= value.numel() <= _A_FEW:
        return None
    found = [_number(number) for number in value.detach().reshape(-1)]
    if any(number is None for number in found):
        return None
    plain = iter([number.value for number in found if number is not None])
    few = FewNumbers(_in_lists(plain, value.shape), value.dtype)
    return few if torch.equal(_bits(few.made(value.dtype)), _bits(value)) else None


def _in_lists(values: Iterator[float], shape: Sequence[int]) -> list[Any]:
    return [next(values) if len(shape) == 1 else _in_lists(values, shape[1:]) for _ in range(shape[0])]


def numbers(graph: OperatorGraph) -> dict[str, Number | FewNumbers]:
    """Finds, by name, the constants that can be written as their numbers.

    Such a constant is no attribute of the model, and is neither written nor returned as it is.
    """
    values = {} if graph.fx is None else graph.fx.values
    found: dict[str, Number | FewNumbers] = {}
    for name in graph.buffers:
        value = values.get(name)
        if not isinstance(value, Tensor) or not _is_made_in_the_forward(graph, name):
            continue
        number = _number(value) or few_numbers(graph, name)
        if number is not None:
            found[name] = number
    returned = {output.value for output in graph.outputs}
    for node in () if graph.fx is None or not found else graph.fx.graph.find_nodes(op="get_attr"):
        operators = [graph.operators[user.name] for user in node.users if user.name in graph.operators]
        is_kept = any(o.memory_group is not None or o.writes_buffers for o in operators)
        is_read_often = len(operators) > _MOST_READERS
        is_kept = is_kept or (is_read_often and isinstance(found.get(str(node.target)), FewNumbers))
        if is_kept or node.name in returned or len(operators) < len(node.users):
            found.pop(str(node.target), None)
    return found


def _is_made_in_the_forward(graph: OperatorGraph, name: str) -> bool:
    return re.fullmatch(r"constant_\d+", name) is not None and not hasattr(graph.root, name)


def _is_plain(constant: Tensor) -> bool:
    if type(constant) is not Tensor or constant.is_meta or constant.layout is not torch.strided:
        return False
    return not constant.requires_grad and constant.dtype in _TYPES_WRITTEN


def _number(constant: Tensor) -> Number | None:
    if not _is_plain(constant) or constant.numel() != 1:
        return None
    value = constant.item()
    shortened = [float(f"{value:.{digits}g}") for digits in _DIGITS] if isinstance(value, float) else []
    candidates = (Number(tuple(constant.shape), number, constant.dtype) for number in (*shortened, value))
    return next((number for number in candidates if _is_same(number, constant)), None)


def _is_same(number: Number, constant: Tensor) -> bool:
    """Whether the number makes the constant bit for bit: -0.0 is another number than 0.0."""
    try:
        made = number.made()
    except RuntimeError:  # rounded up, it is beyond what the type holds
        return False
    return torch.equal(_bits(made), _bits(constant))


def _bits(constant: Tensor) -> Tensor:
    return constant.cpu().reshape(-1).view(torch.uint8)
