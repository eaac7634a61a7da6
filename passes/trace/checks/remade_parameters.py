"""Parameters that a forward makes anew, such as codebooks and centres that follow an average:

    self.centre = nn.Parameter(0.9 * self.centre + 0.1 * hidden.mean(0), requires_grad=False)

Stages write the new value into the existing parameter, since an optimizer and other stages may hold it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from pd2bw_fx.errors import TraceError

from .watch import leaves_of


@dataclass(frozen=True, slots=True)
class Remade:
    """A parameter, and the tensor that the forward has put in its place."""

    name: str
    before: torch.Tensor
    after: torch.Tensor


def require_values(remade: Remade, apart: Sequence[str]) -> None:
    """Raises TraceError where the new value cannot be written into the existing parameter.

    `apart` are other names of the parameter that no longer have the same tensor.
    """
    name, old, new = remade.name, remade.before, remade.after
    if (new.shape, new.dtype, new.device) != (old.shape, old.dtype, old.device):
        raise TraceError(
            f"the forward makes the parameter {name!r} anew, {_said(new)} in place of {_said(old)}; expected "
            "values for what is there, which an optimizer holds and stages write in place"
        )
    if apart:
        raise TraceError(
            f"the forward makes the parameter {name!r} anew, and {apart[0]!r}, which was the same one, is "
            "another one then; stages have both as one. Write it in place under torch.no_grad(), "
            f"self.{name}.copy_(..), or untie them"
        )


def require_no_gradient(remade: Iterable[Remade], results: Iterable[Any]) -> None:
    """Raises TraceError where a gradient flows to a remade parameter, new or old.

    An optimizer would go on with the old parameter, and the model with the new one.
    """
    leaves = {id(leaf) for leaf in leaves_of(results)} if remade else set()
    for parameter in remade:
        if id(parameter.before) in leaves or id(parameter.after) in leaves:
            raise TraceError(
                f"the forward makes the parameter {parameter.name!r} anew, and a gradient flows to it: the "
                "optimizer would train the one that it was, which the model has no more. Write it in place "
                f"under torch.no_grad(), self.{parameter.name}.copy_(..), or make it a buffer"
            )


def copied(tensor: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Returns a copy of the values, of the same type as `tensor`: a parameter for a parameter."""
    copy = values.detach().to(tensor, copy=True)
    is_parameter = isinstance(tensor, nn.Parameter)
    return nn.Parameter(copy, requires_grad=tensor.requires_grad) if is_parameter else copy


def _said(tensor: torch.Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)} on {tensor.device}"
