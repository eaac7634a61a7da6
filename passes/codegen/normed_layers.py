"""Layers whose weight torch.nn.utils.parametrizations norms: weight_norm(nn.Conv1d(80, 512, 7), dim=2).

Other parametrisations, several of them, or those of a bias, are printed as what they compute.
"""

from __future__ import annotations

import collections
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from .scopes import Scope
from .template import Call, Leaf, Part

_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_ATEN = torch.ops.aten


def norm_of(module: nn.Module) -> nn.Module | None:
    """Returns what norms the weight of a layer, if nothing else about the layer is parametrised."""
    found = module._modules.get("parametrizations")
    if not isinstance(found, nn.ModuleDict) or list(found) != ["weight"]:
        return None
    held: Any = found["weight"]
    kinds = (parametrizations._WeightNorm, parametrizations._SpectralNorm)
    if type(held) is not parametrize.ParametrizationList or len(held) != 1:
        return None
    return held[0] if type(held[0]) in kinds else None


def layer_in(module: nn.Module) -> type[nn.Module]:
    """Returns the class of a layer, which is another one while its weight is normed."""
    return type(module) if norm_of(module) is None else parametrize.type_before_parametrizations(module)


def changes_its_norm(module: nn.Module) -> bool:
    """Whether each call in training, and none in evaluation, brings the norm nearer to what it should be."""
    return isinstance(norm_of(module), parametrizations._SpectralNorm)


def with_norm(layer: nn.Module, module: nn.Module) -> nn.Module:
    """Returns a new layer with the norm of another one of its class."""
    norm = norm_of(module)
    if norm is None:
        return layer
    options = {name: value for name, value, _ in _options(norm, module)}
    normed: nn.Module = getattr(parametrizations, _name(norm))(layer, **options)
    return normed


def normed(layer: Call, module: nn.Module) -> Call:
    """Returns the source of a layer with the norm of its weight."""
    norm = norm_of(module)
    if norm is None:
        return layer
    options = [
        Part(Leaf(name, value), name, default, by_name=True)
        for name, value, default in _options(norm, module)
    ]
    return Call(_name(norm), (Part(layer), *options))


def calls_what_the_layer_calls(call: Scope, module: nn.Module) -> bool:
    """Whether a layer calls nothing, or what computes its normed weight, and that once.

    Torch can keep such a weight for several calls, or compute it in another mode than the layer's.
    """
    norm: Any = norm_of(module)
    within = [item.path for item in call.items if isinstance(item, Scope)]
    if norm is None:
        return set(within) <= {call.path}
    operators = collections.Counter(node.target for node in call.nodes)
    if isinstance(norm, parametrizations._WeightNorm):
        is_once = operators[_ATEN._weight_norm.default] == 1
    else:
        products = 2 * norm.n_power_iterations + 1
        is_once = (operators[_ATEN.vdot.default], operators[_ATEN.mv.default]) == (1, products)
    return is_once and within == [f"{call.path}.parametrizations.weight"]


def _name(norm: nn.Module) -> str:
    return "weight_norm" if isinstance(norm, parametrizations._WeightNorm) else "spectral_norm"


def _options(norm: Any, module: nn.Module) -> list[tuple[str, Any, Any]]:
    """Lists what the norm is given, with names and defaults."""
    if isinstance(norm, parametrizations._WeightNorm):
        return [("dim", None if norm.dim == -1 else norm.dim, 0)]
    usual = 1 if isinstance(module, _TRANSPOSED) else 0
    iterations = ("n_power_iterations", norm.n_power_iterations, 1)
    return [iterations, ("eps", norm.eps, 1e-12), ("dim", norm.dim, usual)]
