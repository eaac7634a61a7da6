"""Conditions on open sizes in the author's code, and the batches that have the same answers.

if x.shape[0] > 1:                      torch takes an open size for two or more, and answers by itself
if x.shape[0] * x.shape[1] <= 100:      it cannot solve this for the batch where 100 is no multiple
x.chunk(math.ceil(x.shape[0] / 128))    it cannot solve this either
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.fx.experimental.sym_node import SymNode

from pd2bw_fx.passes.trace.source_lines import is_the_authors

from . import conditions

_LARGEST = 2**32


@dataclass(slots=True)
class SizeAnswers:
    """What the last trace asked of sizes, as expressions of symbols."""

    given: list[tuple[Any, bool]] = field(
        default_factory=list
    )  # the author's conditions, with their outcomes
    numbers: list[tuple[Any, int]] = field(default_factory=list)  # numbers made of sizes, with their values
    guards: list[Any] = field(default_factory=list)  # all guards of torch


@contextmanager
def record_size_answers(answers: SizeAnswers) -> Iterator[None]:
    """Adds conditions on open sizes in the author's code, and numbers made of open sizes, to `answers`."""
    kind: Any = torch.SymBool
    number_kind: Any = SymNode
    plain, plain_number = kind.__bool__, number_kind.guard_int

    def answered(condition: Any) -> bool:
        answer = bool(plain(condition))
        asking = sys._getframe(1)
        if asking.f_code.co_filename == conditions.__file__ and asking.f_back is not None:
            asking = asking.f_back
        if is_the_authors(asking.f_code.co_filename):
            answers.given.append((condition.node.expr, answer))
        return answer

    def numbered(node: Any, file: str, line: int) -> int:
        number: int = plain_number(node, file, line)
        answers.numbers.append((node.expr, number))
        return number

    kind.__bool__ = answered
    number_kind.guard_int = numbered
    try:
        yield
    finally:
        kind.__bool__ = plain
        number_kind.guard_int = plain_number


def largest_batch_answered_alike(answers: SizeAnswers, batch_size: int) -> int | None:
    """Returns the largest batch size up to which all answers are the same; None if there is no limit.

    These are the conditions on a single size and the numbers that are made of a single size. The result is
    at least `batch_size`.
    """
    given = [*answers.given, *answers.numbers]
    known = [(asked, answer) for asked, answer in given if len(asked.free_symbols) == 1]

    def is_alike(size: int) -> bool:
        return all(
            asked.xreplace(dict.fromkeys(asked.free_symbols, size)) == answer for asked, answer in known
        )

    largest, other = batch_size, 2 * batch_size
    while is_alike(other):
        largest, other = other, 2 * other
        if largest > _LARGEST:
            return None
    while other - largest > 1:
        middle = (largest + other) // 2
        largest, other = (middle, other) if is_alike(middle) else (largest, middle)
    return largest
