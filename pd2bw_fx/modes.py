"""What a module does in the mode that it is not in: a trace sees the one of its two modes."""

from __future__ import annotations

import inspect

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
    """Whether it has a program of torch.export in it, which refuses `train()` and `eval()`."""
    return any(isinstance(part, fx.GraphModule) and "train" in vars(part) for part in module.modules())


def passes_through_in_evaluation(module: nn.Module) -> bool:
    """Whether a module that is in training mode, and holds nothing, gives its input back in evaluation.

    So do stochastic depth and layers that add noise: their forward asks `if not self.training: return x`, of
    which a trace in training mode has nothing. torch.nn's own layers are printed as what they are.
    """
    if not module.training or type(module).__module__.startswith("torch.nn") or "forward" in vars(module):
        return False
    if next(module.children(), None) or next(module.parameters(), None) is not None:
        return False
    if next(module.buffers(), None) is not None or not _asks_for_its_mode(module):
        return False
    given = torch.zeros(2, 2, 2)
    try:
        module.training = False
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            return type(module).forward(module, given) is given
    except Exception:  # a forward of other inputs, or of several
        return False
    finally:
        module.training = True


def asking_for_mode(model: nn.Module) -> list[str]:
    """Modules that do something else in evaluation and are no layers of torch.nn's (but may be what it
    computes weights by), by class: "Name at path"."""
    found: dict[type[nn.Module], str] = {}
    for path, module in model.named_modules():
        if type(module).__module__.startswith("torch.nn.modules") or not _asks_for_its_mode(module):
            continue
        if not passes_through_in_evaluation(module):
            found.setdefault(type(module), f"{type(module).__name__} at {path or 'the top'}")
    return list(found.values())[:3]


def _asks_for_its_mode(module: nn.Module) -> bool:
    try:
        return ".training" in inspect.getsource(type(module).forward)
    except (OSError, TypeError):
        return False
