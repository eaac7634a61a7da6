"""The optimizers that the command line knows by name."""

from __future__ import annotations

import functools
import pkgutil
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from pd2bw_fx.errors import UsageError

if TYPE_CHECKING:
    from pd2bw_fx.graph import OperatorGraph
    from pd2bw_fx.runtime.optimizing import ParameterOptions

# By where they are: the names are known without torch.
_OPTIMIZERS = {
    "adamw": "torch.optim:AdamW",
    "nadamw": "pd2bw_fx.optim:nadamw",
    "muon": "pd2bw_fx.optim:MuonWithAdamW",
    "adam": "torch.optim:Adam",
    "sgd": "torch.optim:SGD",
}
OPTIMIZER_NAMES = ", ".join(_OPTIMIZERS)


def check_optimizer(name: str, lr: float | None) -> None:
    """Raises UsageError for a name that is none, and for a rate beside an optimizer that brings its own."""
    if name in _OPTIMIZERS:
        return
    if ":" not in name:
        raise UsageError(f"--optimizer is {name!r}; expected {OPTIMIZER_NAMES} or module:callable")
    if lr is not None:
        raise UsageError(f"--lr goes with {OPTIMIZER_NAMES}; an optimizer of your own brings its rate itself")


def optimizer_named(name: str, lr: float | None, load: Callable[[str], Any]) -> Callable[[Any], Any]:
    """Returns an optimizer of torch's or of `pd2bw_fx.optim` by name, or what `module:callable` names."""
    check_optimizer(name, lr)
    if name in _OPTIMIZERS:
        known = pkgutil.resolve_name(_OPTIMIZERS[name])
        return functools.partial(known, **({} if lr is None else {"lr": lr}))
    found: Callable[[Any], Any] = load(name)
    return found


def groups_named(name: str, graph: OperatorGraph) -> ParameterOptions | None:
    """Returns the `parameter_options` that an optimizer of this name needs for the model."""
    if name != "muon":
        return None
    needed: ParameterOptions = pkgutil.resolve_name("pd2bw_fx.optim:heads_to_adamw")(graph)
    return needed
