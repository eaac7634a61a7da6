"""`torch.func.grad`, `grad_and_value` and `vjp` in a forward, by the autograd that a trace can follow.

They wrap tensors for a level of their own, which no trace has. An alias of each does as well: what is
differentiated by it is what the function does with it. Within `torch.vmap` they stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch._functorch import eager_transforms
from torch.utils._pytree import tree_map_only


@dataclass(frozen=True, slots=True)
class _Level:
    """In place of the number that torch has; `is_differentiated`: with gradients outside of it, too."""

    is_differentiated: bool


@contextmanager
def levels_left_out(nested: Callable[[], Any]) -> Iterator[None]:
    """`nested` opens a level where one cannot be left out."""
    replacements = {
        "_wrap_all_tensors": lambda value, level: tree_map_only(Tensor, torch.ops.aten.alias.default, value),
        "_create_differentiable": lambda value, level: tree_map_only(Tensor, Tensor.requires_grad_, value),
        "_undo_create_differentiable": _undone,
    }
    with ExitStack() as stack:
        stack.enter_context(
            patch.object(eager_transforms, "grad_increment_nesting", lambda: _open_level(nested))
        )
        stack.enter_context(patch.object(eager_transforms, "_autograd_grad", _graph_kept))
        for name, replacement in replacements.items():
            own = getattr(eager_transforms, name)
            stack.enter_context(patch.object(eager_transforms, name, _where_left_out(replacement, own)))
        yield


def _open_level(nested: Callable[[], Any]) -> Any:
    if torch._C._functorch.peek_interpreter_stack() is None:
        return nullcontext(_Level(torch.is_grad_enabled()))
    return nested()


_autograd_grad: Any = eager_transforms._autograd_grad


def _graph_kept(*args: Any, **options: Any) -> Any:
    """A level's own graph is nobody else's; this one may be differentiated again."""
    return _autograd_grad(*args, **{**options, "retain_graph": True})


def _undone(value: Any, level: _Level) -> Any:
    return value if level.is_differentiated else tree_map_only(Tensor, Tensor.detach, value)


def _where_left_out(replacement: Callable[..., Any], own: Callable[..., Any]) -> Callable[..., Any]:
    def chosen(value: Any, level: Any = None) -> Any:
        return (replacement if isinstance(level, _Level) else own)(value, level)

    return chosen
