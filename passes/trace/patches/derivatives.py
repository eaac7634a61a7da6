"""Models that differentiate in their forward: physics-informed networks, gradient penalties, energies.

What autograd computes there becomes operators of the trace. Where the trace lacks values that autograd has
saved (`saved_values.py`), torch fails at a later point with an error that does not name the cause.
"""

from __future__ import annotations

import linecache
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch._functorch import eager_transforms
from torch.autograd import forward_ad
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from pd2bw_fx.errors import Pd2bwError, TraceError
from pd2bw_fx.passes.trace.source_lines import is_the_authors

from .below_autograd import is_traced_above
from .function_transforms import leave_out_levels


class DerivativeError(TraceError):
    """The trace lacks a part of what autograd computes."""


@contextmanager
def trace_derivatives() -> Iterator[None]:
    """Traces derivatives; an error after the forward asked for one becomes a TraceError with the asking line.

    It is a DerivativeError where autograd itself was asked, not a transform of torch.func.
    """
    asked: list[TraceError] = []
    engine = _noted(vars(torch.autograd)["_engine_run_backward"], DerivativeError, asked)

    def run_backward(
        outputs: Any, seeds: Any, keeps_graph: bool, makes_graph: bool, *args: Any, **options: Any
    ) -> Any:
        found = engine(outputs, seeds, keeps_graph, makes_graph, *args, **options)
        if makes_graph or not found:
            return found
        # The trace has the operators; without `detach` a stage would send gradients through a constant.
        return tuple(None if one is None else one.detach() for one in found)

    with ExitStack() as stack:
        stack.enter_context(patch.object(torch.autograd, "_engine_run_backward", run_backward))
        nested = _noted(eager_transforms.grad_increment_nesting, TraceError, asked)

        def within_a_map() -> Any:
            if is_traced_above():
                raise DerivativeError(_message(_line_of_the_authors()))
            return nested()

        def dual_level() -> Any:
            raise TraceError(_dual_message(_line_of_the_authors()))

        stack.enter_context(leave_out_levels(within_a_map))
        stack.enter_context(patch.object(forward_ad, "enter_dual_level", dual_level))
        try:
            yield
        except (Pd2bwError, torch._dynamo.exc.UserError, GuardOnDataDependentSymNode):
            raise  # a UserError: sizes cannot be open; a guard: a condition on values, as everywhere
        except Exception as error:
            if not asked:
                raise
            raise asked[0] from error


def _message(line: str) -> str:
    return (
        f"the model differentiates in its forward ({line}), and what autograd computes there is in no trace; "
        "expected a forward of operators alone: write the derivative out"
    )


def _dual_message(line: str) -> str:
    return (
        f"the model differentiates by dual numbers ({line}), which are in no trace; expected torch.func.jvp "
        "or jacfwd, which go through"
    )


def _noted(
    function: Callable[..., Any], kind: type[TraceError], asked: list[TraceError]
) -> Callable[..., Any]:
    def noted(*args: Any, **kwargs: Any) -> Any:
        asked.append(kind(_message(_line_of_the_authors())))
        return function(*args, **kwargs)

    return noted


def _line_of_the_authors() -> str:
    frame = sys._getframe(2)
    while frame.f_back is not None and not is_the_authors(frame.f_code.co_filename):
        frame = frame.f_back
    file, number = frame.f_code.co_filename, frame.f_lineno
    return f"{Path(file).name}:{number}: {linecache.getline(file, number).strip()}"
