"""What torch does for every operator of a trace, with less work and the same result.

Without these a split takes a twentieth longer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from traceback import FrameSummary, StackSummary
from typing import Any
from unittest.mock import patch

import torch.utils._traceback as torch_traceback
from torch.fx.experimental.sym_node import SymNode

_TORCH_EXPR: Any = SymNode.expr


@contextmanager
def do_less_work() -> Iterator[None]:
    """Reads the source lines of frames that are kept alone, and finds what is known of a size at once."""
    with (
        patch.object(torch_traceback, "_extract_symbolized_tb", _frames),
        patch.object(SymNode, "expr", property(_expr)),
    ):
        yield


def _frames(frames: Sequence[Mapping[str, Any]], skip: int) -> StackSummary:
    """Returns the stack, whose lines are read where they are asked for: a few of a hundred are."""
    return StackSummary(
        FrameSummary(frame["filename"], frame["line"], frame["name"], lookup_line=False)
        for frame in reversed(frames[skip:])
    )


def _expr(node: Any) -> Any:
    """Returns the expression of a size as torch does, which asks first if all parts of it are numbers."""
    sizes, known = node.shape_env, node._expr_cache
    if sizes is None or known is None or node._expr_ver != sizes._replacements_version_counter:
        return _TORCH_EXPR.fget(node)
    return known
