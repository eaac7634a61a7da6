"""What torch does for every operator of a trace and of an export to ONNX, with less work and the same result.

Most of the time of a split is torch's: each operator is asked for the sizes of its results several times.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from traceback import FrameSummary, StackSummary
from typing import Any
from unittest.mock import patch

import sympy
import torch
import torch.utils._traceback as torch_traceback
from sympy.solvers import inequalities
from torch._C import DispatchKey
from torch._ops import OperatorBase
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, in_kernel_invocation_manager
from torch.fx._lazy_graph_module import _use_lazy_graph_module
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.fx.experimental.sym_node import SymNode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

# What SymNode does with two whole numbers, by their expressions alone.
_COMBINING = ("add", "sub", "mul", "eq", "ne", "lt", "le", "gt", "ge", "sym_max", "sym_min")

_TORCH_EXPR: Any = SymNode.expr
_reduce_inequalities: Any = inequalities.reduce_inequalities
_note: Any = ShapeEnv._create_fx_call_function
_output_to_cache: Any = FakeTensorMode._get_output_info_for_cache_entry
_py_impl: Any = OperatorBase.py_impl


@contextmanager
def do_less_work() -> Iterator[None]:
    """Leaves out what nobody reads, or does it where it is read.

    - The source lines of frames that are not kept.
    - What is known of a size, which is found at once.
    - Notes of how a size is computed, which torch looks for even where it makes none.
    - What two sizes make, which is asked for again at each operator: a trace has few different sizes.
    - The Python code of the graph, which torch would write anew after each of its own passes.
    - The range of a size, once for all models that ask the same of it.
    - The tensor by which torch sees that a result can be cached, which needs no open sizes to show it.
    - The types of a kernel, of which torch makes objects whenever it registers one.
    """
    combining: dict[str, Any] = {f"_{name}": _once(name) for name in _COMBINING}
    with (
        patch.multiple(SymNode, **combining),
        patch.object(torch_traceback, "_extract_symbolized_tb", _frames),
        patch.object(SymNode, "expr", property(_expr)),
        patch.object(ShapeEnv, "_create_fx_call_function", _noted),
        _use_lazy_graph_module(True),
        patch.object(inequalities, "reduce_inequalities", _reduced),
        patch.object(FakeTensorMode, "_get_output_info_for_cache_entry", _cached),
        patch.object(OperatorBase, "py_impl", _registering),
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


def _once(name: str) -> Callable[[Any, Any], Any]:
    """Returns a method of SymNode that computes with each two sizes once, where the example has them.

    Every result is a node of its own: a trace tells by it which computation made a size.
    """
    combine: Callable[[Any, Any], Any] = getattr(SymNode, f"_{name}")
    known: dict[tuple[Any, ...], tuple[Any, type, Any, bool]] = {}

    def combined(node: Any, other: Any) -> Any:
        if not (_is_known_size(node) and _is_known_size(other)) or get_proxy_mode() is not None:
            return combine(node, other)
        sums = node._optimized_summation, other._optimized_summation
        key = node.expr, other.expr, node._hint, other._hint, *sums
        if (found := known.get(key)) is None:
            made = combine(node, other)
            known[key] = made._expr, made.pytype, made._hint, made._optimized_summation
            return made
        expression, kind, value, is_sum = found
        return SymNode(expression, node.shape_env, kind, value, optimized_summation=is_sum)

    return combined


def _is_known_size(node: Any) -> bool:
    """Whether it is a whole number that the example has, of which torch takes no notes."""
    if node.pytype is not int or type(node._hint) is not int or (sizes := node.shape_env) is None:
        return False
    return not (sizes._translation_validation_enabled or sizes.should_record_events)


def _noted(sizes: Any, *computation: Any) -> Any:
    if sizes._translation_validation_enabled or sizes.should_record_events:
        return _note(sizes, *computation)
    return None, False


def _cached(mode: Any, *call: Any) -> Any:
    """Returns what is cached of an operator's result, as torch does, which makes a second result to compare.

    It compares by which kernels they are dispatched to, and that is not a matter of sizes.
    """
    mode._output_from_cache_entry = functools.partial(_dispatched_alike, mode)
    try:
        return _output_to_cache(mode, *call)
    finally:
        del mode._output_from_cache_entry


def _dispatched_alike(mode: Any, state: Any, entry: Any, key: Any, func: Any, args: Any) -> FakeTensor:
    """Returns an empty tensor of all that is cached of a result but its sizes."""
    known = entry.output_infos[0].metadata
    with in_kernel_invocation_manager(mode):
        empty = torch.empty(
            (0,), dtype=known.dtype, layout=known.layout, device="meta", requires_grad=known.requires_grad
        )
    if known.is_conj:
        torch._C._set_conj(empty, True)
    if known.is_neg:
        torch._C._set_neg(empty, True)
    return FakeTensor(mode, empty, known.device)


def _registering(operator: Any, key: Any) -> Callable[[Any], Any]:
    """Returns what registers a kernel, without making types of it: every ONNX file has its own."""
    if isinstance(key, DispatchKey) and key != DispatchKey.Python and key not in operator.py_kernels:
        return functools.partial(_register, operator, key)
    register: Callable[[Any], Any] = _py_impl(operator, key)
    return register


def _register(operator: Any, key: DispatchKey, kernel: Any) -> Any:
    operator.py_kernels[key] = kernel
    operator._dispatch_cache.clear()
    return kernel
