"""Numbers that a loss_fn makes of tensors, to log or print them: stages have none, and training calls no
loss_fn."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, fx

from .asked_places import authors_line

_MAKE_NUMBERS = ("item", "tolist", "numpy", "__float__", "__int__", "__format__")
_NUMBERS = (torch.ops.aten.item.default, torch.ops.aten._local_scalar_dense.default)
_ELSEWHERE = "engine.step, on_update and on_report tell the loss of each update"


@contextmanager
def noting_numbers(lines: list[str]) -> Iterator[None]:
    """Adds to `lines` the author's lines that make numbers of tensors."""

    def noting(method: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **kwargs: Any) -> Any:
            if (line := authors_line()) not in lines:
                lines.append(line)
            return method(*args, **kwargs)

        return noted

    with ExitStack() as patches:
        for name in _MAKE_NUMBERS:
            patches.enter_context(patch.object(Tensor, name, noting(getattr(Tensor, name))))
        yield


def why_untraceable(lines: Sequence[str]) -> str:
    """Returns what to do about a loss_fn that cannot be traced, and that makes numbers at these lines."""
    return (
        f"loss_fn makes a Python number of a tensor at {lines[0]}, and a traced loss has none: leave that "
        f"out ({_ELSEWHERE}), compute with the tensor, or have the loss run as it is written: "
        "loss_fn=pd2bw_fx.untraced(loss_fn)"
    )


def note_on(lines: Sequence[str], program: Any) -> tuple[str, ...]:
    """Returns a note on numbers that a traced loss_fn has made at these lines, if no operator reads them."""
    graph = program.graph if lines and hasattr(program, "graph") else fx.Graph()
    made = [node for node in graph.nodes if node.target in _NUMBERS]
    if not lines or any(node.users for node in made):
        return ()
    return (
        f"loss_fn makes a number of a tensor while it is traced, and never in training: {lines[0]}; "
        f"{_ELSEWHERE}",
    )
