"""What torch does for every operator of a trace, with less work and the same result.

Without these a split takes a tenth longer.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from traceback import FrameSummary, StackSummary
from typing import Any
from unittest.mock import patch

import sympy
import torch.utils._traceback as torch_traceback
from sympy.solvers import inequalities
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.fx.experimental.sym_node import SymNode

_TORCH_EXPR: Any = SymNode.expr
_reduce_inequalities: Any = inequalities.reduce_inequalities


@contextmanager
def do_less_work() -> Iterator[None]:
    """Leaves out what nobody reads, or does it where it is read.

    - The source lines of frames that are not kept.
    - What is known of a size, which is found at once.
    - The Python code of the graph, which torch would write anew after each of its own passes.
    - The range of a size, once for all models that ask the same of it.
    """
    with (
        patch.object(torch_traceback, "_extract_symbolized_tb", _frames),
        patch.object(SymNode, "expr", property(_expr)),
        _use_lazy_graph_module(True),
        patch.object(inequalities, "reduce_inequalities", _reduced),
    ):
        yield


def _reduced(inequalities: Collection[Any], size: sympy.Symbol) -> Any:
    return _reduced_once(frozenset(inequalities), size)


@functools.lru_cache(maxsize=256)
def _reduced_once(inequalities: frozenset[Any], size: sympy.Symbol) -> Any:
    return _reduce_inequalities(inequalities, size)


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
