"""What a module does in the mode that it is not in: a trace sees only one of its two modes."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import fx, nn

LAYERS_WITH_MODES = (
    nn.modules.batchnorm._NormBase,
    nn.modules.dropout._DropoutNd,
    nn.RNNBase,
    nn.MultiheadAttention,
    nn.RReLU,
)


def has_one_mode(module: nn.Module) -> bool:
    """Returns whether it contains a program of torch.export, which refuses `train()` and `eval()`."""
    return any(isinstance(part, fx.GraphModule) and "train" in vars(part) for part in module.modules())


def passes_through_in_evaluation(module: nn.Module) -> bool:
    """Returns whether a module in training mode, without state, gives its input back in evaluation.

    Stochastic depth and layers that add noise do so: their forward asks `if not self.training: return x`,
    which a trace in training mode does not have. torch.nn's own layers are printed as what they are.
    """
    if not module.training or type(module).__module__.startswith("torch.nn") or "forward" in vars(module):
        return False
    # A module may have a length that cannot be asked for (torch.compile's), and so no truth value.
    if next(module.children(), None) is not None or next(module.parameters(), None) is not None:
        return False
    if next(module.buffers(), None) is not None or not _asks_for_its_mode(module):
        return False
    given = torch.zeros(2, 2, 2)
    try:
        module.training = False
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            return type(module).forward(module, given) is given
    except Exception:  # its forward takes other inputs, or several
        return False
    finally:
        module.training = True


def asking_for_mode(model: nn.Module) -> list[str]:
    """Returns up to three modules that do something else in evaluation, one for each class: "Name at path".

    torch.nn's own layers are not among them, but what computes their weights may be: a parametrization, or a
    hook such as that of torch.nn.utils.spectral_norm.
    """
    found: dict[Any, str] = {}  # by class, or by the function that a hook is
    for path, module in model.named_modules():
        for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
            kind = hook if inspect.isroutine(hook) else type(hook)
            if _has_mode_in_source(kind.__call__ if isinstance(kind, type) else kind):
                told = f"{kind.__name__}, a hook of {type(module).__name__} at {path or 'the top'},"
                found.setdefault(kind, told)
        if type(module).__module__.startswith("torch.nn.modules") or not _asks_for_its_mode(module):
            continue
        if not passes_through_in_evaluation(module):
            found.setdefault(type(module), f"{type(module).__name__} at {path or 'the top'}")
    return list(found.values())[:3]


def _asks_for_its_mode(module: nn.Module) -> bool:
    return _has_mode_in_source(type(module).forward)


def _has_mode_in_source(function: Any) -> bool:
    try:
        return ".training" in inspect.getsource(function)
    except (OSError, TypeError):
        return False
