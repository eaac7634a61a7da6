"""Transforms of torch.func in a forward (grad, vjp, jvp), by plain autograd, which a trace can follow.

Torch wraps the operands of such a transform for a level of their own, which a trace cannot have. An alias of
each operand works as well: differentiating by the alias covers all that the function does with it. Within
`torch.vmap` the levels stay (`below_autograd.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, _vmap_internals
from torch._functorch import eager_transforms
from torch.utils._pytree import tree_map_only


@dataclass(frozen=True, slots=True)
class _Level:
    """A level that is left out, in place of torch's number of a level."""

    is_differentiated: bool  # whether there are gradients outside of the level too


@contextmanager
def leave_out_levels(nested: Callable[[], Any]) -> Iterator[None]:
    """Leaves out the levels of torch.func; `nested` opens a level within a map, where it must stay."""
    replacements = {
        "_wrap_all_tensors": lambda value, level: tree_map_only(Tensor, torch.ops.aten.alias.default, value),
        "_create_differentiable": lambda value, level: tree_map_only(Tensor, Tensor.requires_grad_, value),
        "_undo_create_differentiable": _undone,
    }
    with ExitStack() as stack:
        stack.enter_context(
            patch.object(eager_transforms, "grad_increment_nesting", lambda: _open_level(nested))
        )
        stack.enter_context(patch.object(eager_transforms, "_jvp_with_argnums", _jvp_by_vjps))
        stack.enter_context(patch.object(eager_transforms, "_autograd_grad", _graph_kept))
        for user in (_vmap_internals, torch.autograd.functional):
            stack.enter_context(patch.object(user, "_vmap", _mapped))
        for name, replacement in replacements.items():
            own = getattr(eager_transforms, name)
            stack.enter_context(patch.object(eager_transforms, name, _where_left_out(replacement, own)))
        yield


def _jvp_by_vjps(
    func: Callable[..., Any],
    primals: tuple[Any, ...],
    tangents: tuple[Any, ...],
    argnums: Any = None,
    *,
    strict: bool = False,
    has_aux: bool,
) -> tuple[Any, ...]:
    """Computes a jvp by two vjps: a vjp is linear in its cotangents, and the vjp of that function is the jvp.

    Forward mode fills in zeros for missing tangents, which fix the batch size in a trace.
    """
    chosen = primals if argnums is None else eager_transforms._slice_argnums(primals, argnums)

    def of_chosen(*values: Any) -> Any:
        return func(
            *(values if argnums is None else eager_transforms._replace_args(primals, values, argnums))
        )

    results, backward, *aux = _vjp(of_chosen, *chosen, has_aux=has_aux)
    seeds = tree_map_only(Tensor, torch.zeros_like, results)
    _, forward = _vjp(backward, seeds)
    (tangents_out,) = forward(tangents)
    return results, tangents_out, *aux


def _mapped(
    func: Callable[..., Any], in_dims: Any = 0, out_dims: Any = 0, allow_none_pass_through: bool = False
) -> Callable[..., Any]:
    """Maps over batches of gradients by `torch.vmap`, which a trace knows, not by autograd's own map."""

    def mapped(*args: Any) -> Any:
        missing: list[bool] = []

        def present(*operands: Any) -> Any:
            results = func(*operands)
            if not allow_none_pass_through:
                return results
            missing[:] = [result is None for result in results]
            return tuple(result for result in results if result is not None)

        found = torch.vmap(present, in_dims, out_dims)(*args)
        if not allow_none_pass_through:
            return found
        remaining = iter(found)
        return tuple(None if is_missing else next(remaining) for is_missing in missing)

    return mapped


def _open_level(nested: Callable[[], Any]) -> Any:
    if torch._C._functorch.peek_interpreter_stack() is None:
        return nullcontext(_Level(torch.is_grad_enabled()))
    return nested()


_autograd_grad: Any = eager_transforms._autograd_grad
_vjp: Any = eager_transforms._vjp_with_argnums


def _graph_kept(*args: Any, **options: Any) -> Any:
    """Keeps the graph: one that belongs to a level is used once, but this one may be differentiated again."""
    return _autograd_grad(*args, **{**options, "retain_graph": True})


def _undone(value: Any, level: _Level) -> Any:
    return value if level.is_differentiated else tree_map_only(Tensor, Tensor.detach, value)


def _where_left_out(replacement: Callable[..., Any], own: Callable[..., Any]) -> Callable[..., Any]:
    def chosen(value: Any, level: Any = None) -> Any:
        return (replacement if isinstance(level, _Level) else own)(value, level)

    return chosen
