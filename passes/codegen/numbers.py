"""Constants of one number, written where they are read: torch.full((), 100.0, device=x.device)."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch
from torch import Tensor

from pd2bw_fx.graph import OperatorGraph

from .literals import in_tuple, literal

_TYPES_WRITTEN = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
)  # fmt: skip
_TYPES_OF_NUMBERS: dict[type, torch.dtype] = {bool: torch.bool, int: torch.int64, float: torch.float32}
_DIGITS = range(1, 18)  # of a float64, at most


@dataclass(frozen=True, slots=True)
class Number:
    """A tensor of one element, and the number with the fewest digits that makes it."""

    shape: tuple[int, ...]
    value: float
    dtype: torch.dtype

    def spelled(self, device: str) -> str:
        """torch.full takes the number to a GPU without a wait for it, as torch.tensor would not."""
        shape = in_tuple([literal(size) for size in self.shape]) if self.shape else "()"
        dtype = "" if self._is_of_its_number() else f"dtype={literal(self.dtype)}, "
        return f"torch.full({shape}, {literal(self.value)}, {dtype}device={device})"

    def made(self) -> Tensor:
        return torch.full(self.shape, self.value, dtype=self.dtype, device="cpu")

    def _is_of_its_number(self) -> bool:
        """Whether torch.full would take that type for the number."""
        is_default = self.dtype != torch.float32 or torch.get_default_dtype() == torch.float32
        return is_default and self.dtype == _TYPES_OF_NUMBERS[type(self.value)]


def numbers(graph: OperatorGraph) -> dict[str, Number]:
    """By name, the constants that are one number and nothing else: no attribute of the model's, and neither
    written nor returned as they are."""
    values = {} if graph.fx is None else graph.fx.values
    found: dict[str, Number] = {}
    for name in graph.buffers:
        value = values.get(name)
        if not isinstance(value, Tensor) or not re.fullmatch(r"constant_\d+", name):
            continue
        number = None if hasattr(graph.root, name) else _number(value)
        if number is not None:
            found[name] = number
    returned = {output.value for output in graph.outputs}
    for node in () if graph.fx is None or not found else graph.fx.graph.find_nodes(op="get_attr"):
        operators = [graph.operators[user.name] for user in node.users if user.name in graph.operators]
        is_kept = any(o.memory_group is not None or o.writes_buffers for o in operators)
        if is_kept or node.name in returned or len(operators) < len(node.users):
            found.pop(str(node.target), None)
    return found


def _number(constant: Tensor) -> Number | None:
    if type(constant) is not Tensor or constant.is_meta or constant.layout is not torch.strided:
        return None
    if constant.numel() != 1 or constant.requires_grad or constant.dtype not in _TYPES_WRITTEN:
        return None
    value = constant.item()
    shortened = [float(f"{value:.{digits}g}") for digits in _DIGITS] if isinstance(value, float) else []
    candidates = (Number(tuple(constant.shape), number, constant.dtype) for number in (*shortened, value))
    return next((number for number in candidates if _is_same(number, constant)), None)


def _is_same(number: Number, constant: Tensor) -> bool:
    """Bit for bit: -0.0 is another number than 0.0."""
    try:
        made = number.made()
    except RuntimeError:  # rounded up, beyond what the type holds
        return False
    bits = (tensor.cpu().reshape(1).view(torch.uint8) for tensor in (made, constant))
    return torch.equal(*bits)
