"""Python conditions on the values of tensors: recorded in a run on the example inputs, assumed in a trace.

if not torch.isfinite(hidden).all():      the branch that the example takes is traced, with an
    hidden = hidden.clamp(...)            assertion that every batch takes it

A condition on constants (`torch.linspace(0, 1, 5)`, the times of an ODE solver) comes out alike for all
batches and needs no assertion.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any
from unittest.mock import patch

import sympy
import torch
from torch import Tensor
from torch._C import TensorBase
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, free_unbacked_symbols

from pd2bw_fx.assumptions import assumption

from .asked_places import AskedAt, asked_at, authors
from .compared_numbers import reporting_number
from .constants import constant_number, outcomes_by_size
from .selected_sizes import SelectedSizes, outcome_of_sizes


class ChoiceError(ValueError):
    """Values choose between two branches, at these places, and the user may allow it."""

    def __init__(self, places: Sequence[AskedAt]) -> None:
        super().__init__(f"chooses a way by values, which is for you to allow, at {places[0]}")
        self.places = places


# Takes what is asked, and where; None where the trace is to answer.
_Answer = Callable[[Tensor, AskedAt], bool | None]


@dataclass(slots=True)
class Conditions:
    """How the conditions of one run came out, in order, to be assumed in a trace, which has no values.

    A trace may ask less than a run does: models leave checks out while they are traced.
    """

    found: list[tuple[AskedAt, bool]] = field(default_factory=list)
    asked: list[AskedAt] = field(default_factory=list)  # the conditions that the last trace met
    choices: list[AskedAt] = field(default_factory=list)  # those of them that need the user's leave
    choices_by_size: list[AskedAt] = field(default_factory=list)  # those that depend on nothing but sizes
    asks_for_numbers: bool = False  # the run asked for numbers; a trace has those of constants
    selected: SelectedSizes = field(default_factory=SelectedSizes)

    @property
    def are_any(self) -> bool:
        return bool(self.found) or self.asks_for_numbers or bool(self.selected.shapes)

    def require_checks(self) -> None:
        """Raises an error, ChoiceError by values, if the last trace met a choice between two branches."""
        if self.choices:
            raise ChoiceError(self.choices)
        if self.choices_by_size:
            raise ValueError(f"goes another way at other sizes, at {self.choices_by_size[0]}")

    def notes(self) -> tuple[str, ...]:
        """Returns a note for each line of the model, however often it asks in functions of torch."""
        return tuple(
            f"traced with the way that the example inputs take, which the stages assert, at {place}"
            for place in dict.fromkeys(map(str, self.asked))
        )

    @contextmanager
    def recorded(self) -> Iterator[None]:
        def record(tensor: Tensor, place: AskedAt) -> bool:
            outcome = TensorBase.__bool__(tensor)
            self.found.append((place, outcome))
            return outcome

        def number(tensor: Tensor) -> Any:
            self.asks_for_numbers = True
            return reporting_number(TensorBase.item(tensor), self._note)

        def converted(tensor: Tensor) -> None:
            self.asks_for_numbers = True

        selected = self.selected.recorded()
        with _on_truth(record, number), _on_comparison(record), _on_conversion(converted), selected:
            yield

    def _assume(self, tensor: Tensor, outcome: bool, place: AskedAt) -> bool:
        """Asserts that the tensor has this outcome, and notes whether the user must allow that."""
        self.asked.append(place)
        if not place.may_be_assumed:
            outcomes = outcomes_by_size(tensor)
            if outcomes is None:
                self.choices.append(place)
            elif len(outcomes) > 1:
                self.choices_by_size.append(place)
        holds = tensor if outcome else tensor.logical_not()
        check = Path(place.asking).name if place.is_check else None
        torch.ops.aten._assert_async.msg(holds, assumption(place.model, place.line, check=check))
        return outcome

    def _note(self, outcome: bool, asking: FrameType) -> None:
        self.found.append((asked_at(authors(asking)), outcome))

    @contextmanager
    def assumed(self, tensors: Sequence[Tensor], examples: Sequence[Tensor]) -> Iterator[None]:
        """Answers conditions as the run did; any other is left to the trace, which mostly has no answer.

        `tensors` are what the trace has for the example inputs.
        """
        coming = list(self.found)
        self.asked, self.choices, self.choices_by_size = [], [], []

        def answer(tensor: Tensor, place: AskedAt) -> bool | None:
            entry = next((entry for entry in coming if entry[0] == place), None)
            if entry is not None:
                coming.remove(entry)
            if (value := constant_number(tensor)) is not None:
                return bool(value)
            if entry is None:
                return None
            return self._assume(tensor, entry[1], place)

        numbers: dict[sympy.Symbol, Tensor] = {}

        def number(tensor: Tensor) -> Any:
            constant = constant_number(tensor)
            value: Any = TensorBase.item(tensor) if constant is None else constant
            if isinstance(value, torch.SymFloat | torch.SymInt):
                numbers[value.node.expr] = tensor
            return value

        def of_numbers(condition: torch.SymBool) -> bool | None:
            symbols = sorted(free_unbacked_symbols(condition), key=str)
            if not symbols:
                return None
            place = asked_at(authors(sys._getframe(2)))
            if (of_sizes := outcome_of_sizes(condition, sizes)) is not None:
                return self._assume(of_sizes[1], of_sizes[0], place)
            if not numbers.keys() >= set(symbols) or all(entry[0] != place for entry in coming):
                return None
            tensor = sympy.lambdify(symbols, condition.node.expr, "math")(*(numbers[s] for s in symbols))
            return answer(tensor, place)

        if self.are_any:
            with (
                self.selected.known(tensors, examples) as sizes,
                _on_truth(answer, number),
                _on_comparison(answer),
                _on_conversion(constant_number),
                _on_truth_of_numbers(of_numbers),
            ):
                yield
        else:
            yield


@contextmanager
def _on_truth(answer: _Answer, number: Callable[[Tensor], Any]) -> Iterator[None]:
    """Has `answer` decide this thread's `bool(tensor)` and `item` of truth values, and `number` other `item`.

    A torch function mode would not see what functions of torch ask.
    """
    thread = threading.get_ident()

    def truth(tensor: Tensor) -> bool:
        answered = answer(tensor, asked_at(sys._getframe(1))) if threading.get_ident() == thread else None
        return TensorBase.__bool__(tensor) if answered is None else answered

    def item(tensor: Tensor) -> Any:
        if threading.get_ident() != thread:
            return TensorBase.item(tensor)
        if tensor.dtype != torch.bool:
            return number(tensor)
        answered = answer(tensor, asked_at(sys._getframe(1)))
        return TensorBase.item(tensor) if answered is None else answered

    Tensor.__bool__ = truth  # type: ignore[method-assign, assignment]
    Tensor.item = item  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        del Tensor.__bool__, Tensor.item


@contextmanager
def _on_comparison(answer: _Answer) -> Iterator[None]:
    """Has `answer` decide this thread's `torch.equal` and `torch.allclose`, which ask as `.all()` does."""
    thread = threading.get_ident()
    equal, allclose = torch.equal, torch.allclose

    @functools.wraps(equal)
    def equal_or_not(input: Tensor, other: Tensor) -> bool:  # noqa: A002 (torch's word)
        if threading.get_ident() != thread or input.dtype != other.dtype:
            return equal(input, other)  # torch refuses two types in words of its own
        if input is other or input.shape != other.shape:
            return input is other
        answered = answer((input == other).all(), asked_at(sys._getframe(1)))
        return equal(input, other) if answered is None else answered

    @functools.wraps(allclose)
    def close_or_not(input: Tensor, other: Tensor, *args: Any, **kwargs: Any) -> bool:  # noqa: A002
        if threading.get_ident() != thread:
            return allclose(input, other, *args, **kwargs)
        close = torch.isclose(input, other, *args, **kwargs).all()
        answered = answer(close, asked_at(sys._getframe(1)))
        return allclose(input, other, *args, **kwargs) if answered is None else answered

    with ExitStack() as places:
        for holder in (torch, Tensor):
            places.enter_context(patch.object(holder, "equal", equal_or_not))
            places.enter_context(patch.object(holder, "allclose", close_or_not))
        yield


@contextmanager
def _on_conversion(number: Callable[[Tensor], Any]) -> Iterator[None]:
    """Makes `int(tensor)` and `float(tensor)` of what `number` returns, if that is not None."""
    thread = threading.get_ident()

    def converting(kind: type, plain: Callable[[Tensor], Any]) -> Callable[[Tensor], Any]:
        def converted(tensor: Tensor) -> Any:
            known = number(tensor) if threading.get_ident() == thread else None
            return plain(tensor) if known is None else kind(known)

        return converted

    Tensor.__int__ = converting(int, TensorBase.__int__)  # type: ignore[method-assign, assignment]
    Tensor.__float__ = converting(float, TensorBase.__float__)  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        del Tensor.__int__, Tensor.__float__


@contextmanager
def _on_truth_of_numbers(answer: Callable[[torch.SymBool], bool | None]) -> Iterator[None]:
    """Answers comparisons of symbolic numbers by `answer` where torch cannot."""
    thread = threading.get_ident()
    torchs: Callable[[torch.SymBool], bool] = torch.SymBool.__bool__

    def truth(condition: torch.SymBool) -> bool:
        try:
            return torchs(condition)
        except GuardOnDataDependentSymNode:
            answered = answer(condition) if threading.get_ident() == thread else None
            if answered is None:
                raise
            return answered

    torch.SymBool.__bool__ = truth  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.SymBool.__bool__ = torchs  # type: ignore[method-assign]


class UnseenChoiceError(ValueError):
    """A truth value chooses between two branches where no trace sees it, and torch.fx least of all."""


@contextmanager
def intercept_boolean_items(given: bool | None = None) -> Iterator[list[AskedAt]]:
    """Makes `item` of a tensor of truth values return `given`, if that is not None, in a trace.

    Yields a list that gets the place of every such `item`.
    """
    thread, asked = threading.get_ident(), list[AskedAt]()

    def item(tensor: Tensor) -> float | bool:
        if threading.get_ident() != thread or tensor.dtype != torch.bool:
            return TensorBase.item(tensor)
        if (value := constant_number(tensor)) is not None:
            return bool(value)
        asked.append(asked_at(sys._getframe(1)))
        return TensorBase.item(tensor) if given is None else given

    Tensor.item = item  # type: ignore[method-assign, assignment]
    try:
        yield asked
    finally:
        del Tensor.item
