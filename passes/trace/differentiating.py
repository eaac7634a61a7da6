"""Models that differentiate in their forward: physics-informed networks, gradient penalties, energies.

torch.export does not see what autograd computes, and fails somewhere behind it with words of its own.
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

from pd2bw_fx.errors import Pd2bwError, TraceError

_TORCH = str(Path(torch.__file__).resolve().parent)
_DIFFERENTIATE = (
    (torch.autograd, "grad"),
    (torch.autograd, "backward"),
    (eager_transforms, "grad_increment_nesting"),
    (eager_transforms, "jvp_increment_nesting"),
)


@contextmanager
def differentiation_named() -> Iterator[None]:
    """What fails in here after a derivative was asked for fails with a TraceError that has the line."""
    lines: list[str] = []
    with ExitStack() as stack:
        for owner, name in _DIFFERENTIATE:
            stack.enter_context(patch.object(owner, name, _noted(getattr(owner, name), lines)))
        try:
            yield
        except Pd2bwError:
            raise
        except Exception as error:
            if not lines:
                raise
            raise TraceError(differentiation_message(lines[0])) from error


def differentiation_message(line: str) -> str:
    return (
        f"the model differentiates in its forward ({line}), and what autograd computes there is in no trace; "
        "expected a forward of operators alone: write the derivative out"
    )


def _noted(function: Callable[..., Any], lines: list[str]) -> Callable[..., Any]:
    def noted(*args: Any, **kwargs: Any) -> Any:
        lines.append(_line_outside_torch())
        return function(*args, **kwargs)

    return noted


def _line_outside_torch() -> str:
    frame = sys._getframe(2)
    while frame.f_back is not None and frame.f_code.co_filename.startswith((_TORCH, __file__)):
        frame = frame.f_back
    file, number = frame.f_code.co_filename, frame.f_lineno
    return f"{Path(file).name}:{number}: {linecache.getline(file, number).strip()}"
