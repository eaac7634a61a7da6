"""Models to try things on: a Config and `from_config` each, no download."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from .bert import Bert
    from .encdec import EncDec
    from .gpt import GPT
    from .mlp import MLP
    from .moe import MoE
    from .resnet import ResNet
    from .vgg import VGG

    Model = Bert | EncDec | GPT | MLP | MoE | ResNet | VGG

Size = Literal["small", "paper"]

# Each in the module of its name. Imported on first use: a list of the names needs no torch.
_CLASSES = {
    "mlp": "MLP",
    "gpt": "GPT",
    "bert": "Bert",
    "resnet": "ResNet",
    "vgg": "VGG",
    "encdec": "EncDec",
    "moe": "MoE",
}


def _made(name: str, size: Size) -> Model:
    module, kind = import_module(f"{__name__}.{name}"), _CLASSES[name]
    config = getattr(module, f"{kind}Config")
    made: Model = getattr(module, kind)(config.small() if size == "small" else config.paper())
    return made


MODELS: Mapping[str, Mapping[Size, Callable[[], Model]]] = {
    name: {
        "small": functools.partial(_made, name, "small"),
        "paper": functools.partial(_made, name, "paper"),
    }
    for name in _CLASSES
}


def build(name: str, size: Size = "small") -> Model:
    """A model by name with fresh weights: small (milliseconds a step on a CPU), or as in its paper."""
    return MODELS[name][size]()


def __getattr__(name: str) -> Any:
    for module, kind in _CLASSES.items():
        if name in (kind, f"{kind}Config"):
            return getattr(import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
