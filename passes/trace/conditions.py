"""Python conditions on the values of tensors: how they come out on the example inputs, assumed in a trace.

if not torch.isfinite(hidden).all():      the way that the example takes is traced,
    hidden = hidden.clamp(...)            and an assertion that it is the way of every batch
"""

from __future__ import annotations

import linecache
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from pd2bw_fx.traced import assumption

_TORCH = str(Path(torch.__file__).resolve().parent)
_LAYERS = str(Path(nn.__file__).resolve().parent)


@dataclass(frozen=True, slots=True)
class Condition:
    """A tensor was taken for a truth value at this line of the model's."""

    place: str  # "modeling_detr.py:643"
    line: str
    outcome: bool
    is_torchs: bool = False  # of a layer of torch's, which looks whether a mask is causal

    def __str__(self) -> str:
        return f"{self.place}: {self.line}"

    @property
    def is_assertion(self) -> bool:
        return self.line.startswith("assert ")


@dataclass(slots=True)
class Conditions:
    """Those of one run, in order; `assumed` in a trace, which has no values to ask.

    A trace may ask less than a run does: models leave checks out while they are traced. `asked` are those
    that the last trace came to.
    """

    found: list[Condition] = field(default_factory=list)
    asked: list[Condition] = field(default_factory=list)

    def require_assertions(self) -> None:
        """Raises ValueError for a condition that chooses between two ways."""
        for condition in self.asked:
            if not condition.is_assertion and not condition.is_torchs:
                raise ValueError(f"chooses a way by values, which is for you to allow, at {condition}")

    def notes(self) -> tuple[str, ...]:
        return tuple(
            dict.fromkeys(
                f"traced with the way that the example inputs take, which the stages assert, at {condition}"
                for condition in self.asked
            )
        )

    @contextmanager
    def recorded(self) -> Iterator[None]:
        with _OnTruth(self._record):
            yield

    @contextmanager
    def assumed(self) -> Iterator[None]:
        """Raises ValueError within, where the trace asks for something else than the run before did."""
        coming = list(self.found)
        self.asked = []

        def answer(tensor: Tensor, place: str, line: str, is_torchs: bool) -> bool:
            condition = next((condition for condition in coming if condition.place == place), None)
            if condition is None:
                raise ValueError(f"a run does not come to the condition that the trace comes to at {place}")
            coming.remove(condition)
            self.asked.append(condition)
            holds = tensor if condition.outcome else tensor.logical_not()
            torch.ops.aten._assert_async.msg(holds, assumption(place, line))
            return condition.outcome

        if self.found:
            with _OnTruth(answer):
                yield
        else:
            yield

    def _record(self, tensor: Tensor, place: str, line: str, is_torchs: bool) -> bool:
        outcome = bool(tensor)
        self.found.append(Condition(place, line, outcome, is_torchs))
        return outcome


class _OnTruth(TorchFunctionMode):
    """Asks `answer(tensor, place, line, is_torchs)` whenever Python wants to know if a tensor is true."""

    def __init__(self, answer: Any) -> None:
        super().__init__()
        self._answer = answer

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if func is Tensor.__bool__:
            asking = sys._getframe(1)
            return self._answer(args[0], *_line(asking), asking.f_code.co_filename.startswith(_LAYERS))
        return func(*args, **(kwargs or {}))


def _line(frame: FrameType | None) -> tuple[str, str]:
    while frame is not None and frame.f_code.co_filename.startswith(_TORCH):
        frame = frame.f_back
    if frame is None:
        return "", ""
    file, number = frame.f_code.co_filename, frame.f_lineno
    return f"{Path(file).name}:{number}", linecache.getline(file, number).strip()
