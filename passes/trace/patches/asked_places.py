"""Where Python asks for values: the model's line that leads there, and whether it is a check.

x.max() > 1, asked in a function of torch that model.py:12 calls      ->  model.py:12
"""

from __future__ import annotations

import ast
import functools
import linecache
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

_TORCH = str(Path(torch.__file__).resolve().parent) + os.sep  # not torchvision's
_LAYERS = str(Path(nn.__file__).resolve().parent)
# What the model calls of torch passes through functions of this folder where it is traced, and not where it
# is run.
_PATCHES = str(Path(__file__).parent)


@dataclass(frozen=True, slots=True)
class AskedAt:
    """The line where Python asks whether a tensor is true, and the model's line that leads there."""

    asking: str
    model: str  # "modeling_detr.py:643"
    line: str
    is_torchs: bool  # a layer of torch's asks: whether a mask is causal, for example
    # An assertion or a condition of an error, in the model or in torch; a trace may not see that it is one.
    is_check: bool = field(compare=False)

    def __str__(self) -> str:
        return f"{self.model}: {self.line}"

    @property
    def may_be_assumed(self) -> bool:
        """Whether no user need allow it: only one branch goes on, or the branches do not differ."""
        return self.is_torchs or self.is_check


def authors_line() -> str:
    """Returns the line that the model's own code is at, with its text."""
    return ": ".join(authors_place())


def authors_place() -> tuple[str, str]:
    """Returns the place that the model's own code is at, and the text of its line."""
    place = asked_at(authors(sys._getframe(1)))
    return place.model, place.line


def authors(frame: FrameType) -> FrameType:
    """Returns the innermost frame outside of torch and of this folder."""
    while frame.f_back is not None and frame.f_code.co_filename.startswith((_TORCH, _PATCHES)):
        frame = frame.f_back
    return frame


def asked_at(asking: FrameType) -> AskedAt:
    code, frame = asking.f_code, authors(asking)
    file, number = frame.f_code.co_filename, frame.f_lineno
    return AskedAt(
        asking=f"{code.co_filename}:{asking.f_lineno}",
        model=f"{Path(file).name}:{number}",
        line=linecache.getline(file, number).strip(),
        is_torchs=code.co_filename.startswith(_LAYERS),
        is_check=is_check(file, number, frame.f_locals)
        or is_check(code.co_filename, asking.f_lineno, asking.f_locals),
    )


def is_check(file: str, number: int, known: Mapping[str, Any] | None = None) -> bool:
    """Whether the statement at this line is an assertion, or a condition of nothing but an error.

    `known` are the values of the names there.

    A condition of several parts counts only if the good branch asks all of them: `assert a and b`,
    `if a or b: raise`. With `assert a or b`, two batches may go on with different outcomes of the parts.
    """
    for statement in _statements(file):
        if not isinstance(statement, ast.Assert | ast.If):
            continue
        test = statement.test
        if not test.lineno <= number <= (test.end_lineno or test.lineno):
            continue
        raises = isinstance(statement, ast.Assert) or isinstance(statement.body[-1], ast.Raise)
        joint = ast.And if isinstance(statement, ast.Assert) else ast.Or
        parts = test.values if isinstance(test, ast.BoolOp) and isinstance(test.op, joint) else [test]
        if isinstance(test, ast.BoolOp) and _one_part_decides(test, known or {}):
            parts = test.values
        inner = (node for part in parts for node in ast.walk(part))
        return raises and not any(isinstance(node, ast.BoolOp | ast.IfExp) for node in inner)
    return False


def _one_part_decides(test: ast.BoolOp, known: Mapping[str, Any]) -> bool:
    """Whether tensors are in one part alone, and its outcome is that of the whole: no later part differs."""
    own = next((place for place, part in enumerate(test.values) if not _is_without_tensors(part, known)), -1)
    goes_on = isinstance(test.op, ast.And)
    return all(_outcome(part, known) is goes_on for part in test.values[own:][1:])


def _is_without_tensors(part: ast.expr, known: Mapping[str, Any]) -> bool:
    """Whether the part has one outcome for every batch: `labels is not None`, `isinstance(x, Tensor)`."""
    if isinstance(part, ast.Compare):
        return all(isinstance(op, ast.Is | ast.IsNot) for op in part.ops)
    if isinstance(part, ast.Call):
        return isinstance(part.func, ast.Name) and part.func.id == "isinstance"
    return _outcome(part, known) is not None


def _outcome(part: ast.expr, known: Mapping[str, Any]) -> bool | None:
    """Returns the outcome of a name, or of `not name`, whose value is known to be a plain truth value."""
    if isinstance(part, ast.UnaryOp) and isinstance(part.op, ast.Not):
        found = _outcome(part.operand, known)
        return None if found is None else not found
    value = known.get(part.id) if isinstance(part, ast.Name) else None
    return value if isinstance(value, bool) else None


@functools.lru_cache(maxsize=8)
def _statements(file: str) -> tuple[ast.AST, ...]:
    try:
        return tuple(ast.walk(ast.parse("".join(linecache.getlines(file)))))
    except SyntaxError:
        return ()
