"""From a front end's names of modules and tensors to those of the user's model."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import nn

from pd2bw_fx.traced import Traced, name_beside

_SLICE = re.compile(r"slice\((None|-?\d+), (None|-?\d+), (None|-?\d+)\)")


def own_name(target: str, traced: Traced) -> str:
    """Returns the name of a tensor in the user's model; one of the loss_fn's gets a name beside those."""
    if target.startswith(traced.prefix):
        return target.removeprefix(traced.prefix)
    return name_beside(traced.model, target)


def own_calls(stack: Mapping[str, tuple[str, Any]], traced: Traced) -> dict[str, tuple[str, str]]:
    """Returns path in the user's model and class name of each module on the stack, outermost first.

    Repeated calls of a module have keys of their own ("block@1") and the same path. A slice, `layers[1:3]`,
    is not a module of the model and is left out.
    """
    calls: dict[str, tuple[str, str]] = {}
    for key, (path, kind) in stack.items():
        is_wrapper = bool(traced.prefix) and not path
        if is_wrapper or key.startswith("_empty_nn_module_stack"):
            continue
        once = re.sub(r"@\d+(?=\.|$)", "", path)
        own = _unsliced(own_name(f"{once}.", traced).removesuffix("."), traced.model)
        if own is not None:
            name = kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__qualname__}"
            calls[key] = own, name
    return calls


def _unsliced(path: str, model: nn.Module) -> str | None:
    """ "layers.slice(1, 3, None).0" is "layers.1"; None for the slice itself.

    A slice of an nn.Sequential keeps the keys of its members; one of an nn.ModuleList numbers them anew.
    """
    if "slice(" not in path:
        return path
    names: list[str] = []
    module: nn.Module | None = model
    members: list[str] | None = None  # keys in the slice that the path is in
    for part in path.split("."):
        bounds = _SLICE.fullmatch(part)
        if bounds is not None and module is not None:
            start, stop, step = (None if bound == "None" else int(bound) for bound in bounds.groups())
            members = (list(module._modules) if members is None else members)[start:stop:step]
            continue
        is_renumbered = members is not None and isinstance(module, nn.ModuleList)
        name = members[int(part)] if members is not None and is_renumbered else part
        names.append(name)
        module, members = module._modules.get(name) if module is not None else None, None
    return ".".join(names) if members is None else None
