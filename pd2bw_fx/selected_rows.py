"""What torch's operators ask of how many rows a mask selects, where only their results' sizes are sought.

points = self.norm(points[mask])      a batch norm raises an error for one row
points[mask].logsumexp(0)             a row of numbers, whether there are rows or not, and yet torch asks

What a run does with no rows, or with one, the operator itself decides there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode


@contextmanager
def take_selected_rows_for_many(is_answered: Callable[[FrameType], bool] = lambda _: True) -> Iterator[None]:
    """Has torch take a number of rows that depends on values for two or more, as it does where it is careful.

    `is_answered` says of the frame that asks whether it gets this answer; others get torch's error.
    """
    kind: Any = SymNode
    plain = kind.guard_bool

    def guard_bool(node: Any, file: str, line: int) -> bool:
        try:
            return bool(plain(node, file, line))
        except GuardOnDataDependentSymNode:
            if not is_answered(sys._getframe(1)):
                raise
            return bool(node.guard_size_oblivious(file, line))

    kind.guard_bool = guard_bool
    try:
        yield
    finally:
        kind.guard_bool = plain
