"""Layers of torch.nn that are printed as themselves, with the arguments that they were built with."""

from __future__ import annotations

import inspect
import itertools
import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx, nn

from pd2bw_fx.graph import dtype_name
from pd2bw_fx.modes import LAYERS_WITH_MODES

from .literals import are_numbered, is_plain_name
from .normed_layers import changes_its_norm, layer_in, norm_of, normed, with_norm
from .template import NO_DEFAULT, Call, Fixed, Leaf, Part, Template

# Layers whose forward takes one tensor and gives one (recurrent ones: with their states; attention: see
# attention.py). Anything else is printed as the operators that it was traced to.
_LAYERS: tuple[type[nn.Module], ...] = (
    nn.Linear, nn.Embedding, nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.LocalResponseNorm,
    nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d,
    nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d,
    nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d,
    nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout,
    nn.ReLU, nn.ReLU6, nn.GELU, nn.SiLU, nn.Mish, nn.Tanh, nn.Sigmoid, nn.ELU, nn.SELU, nn.LeakyReLU,
    nn.Softplus, nn.Softmax, nn.LogSoftmax, nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid, nn.LogSigmoid,
    nn.PReLU, nn.CELU, nn.GLU, nn.Softmin, nn.Softmax2d, nn.Softsign, nn.Softshrink, nn.Hardshrink,
    nn.Tanhshrink, nn.Threshold, nn.RReLU,
    nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d, nn.LPPool1d,
    nn.LPPool2d, nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d,
    nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d,
    nn.ZeroPad1d, nn.ZeroPad2d, nn.ZeroPad3d, nn.ConstantPad1d, nn.ConstantPad2d, nn.ConstantPad3d,
    nn.ReflectionPad1d, nn.ReflectionPad2d, nn.ReflectionPad3d,
    nn.ReplicationPad1d, nn.ReplicationPad2d, nn.ReplicationPad3d,
    nn.CircularPad1d, nn.CircularPad2d, nn.CircularPad3d,
    nn.Upsample, nn.UpsamplingNearest2d, nn.UpsamplingBilinear2d, nn.PixelShuffle, nn.PixelUnshuffle,
    nn.ChannelShuffle, nn.Flatten, nn.Unflatten, nn.Fold, nn.Unfold,
    nn.LSTM, nn.GRU, nn.RNN, nn.LSTMCell, nn.GRUCell, nn.RNNCell, nn.EmbeddingBag, nn.Identity,
    nn.MultiheadAttention,
)  # fmt: skip
# Layers whose forward takes two tensors, in the order of their operator's.
LAYERS_OF_TWO: tuple[type[nn.Module], ...] = (
    nn.CrossEntropyLoss, nn.NLLLoss, nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss, nn.BCELoss,
    nn.BCEWithLogitsLoss, nn.KLDivLoss, nn.Bilinear,
)  # fmt: skip
RECURRENT_LAYERS = (nn.LSTM, nn.GRU, nn.RNN)
RECURRENT_CELLS = (nn.LSTMCell, nn.GRUCell, nn.RNNCell)
LAYERS_OF_PAIRS = (nn.LSTM, nn.LSTMCell)  # their state is (hidden, cell)
LAYERS_GIVING_TUPLES = (*RECURRENT_LAYERS, nn.LSTMCell)
_WITH_WEIGHT = (nn.Linear, nn.Bilinear, nn.Embedding, nn.EmbeddingBag, nn.modules.conv._ConvNd)
# Names of the arguments by which operators get a layer's mode.
MODES = {"train", "training", "use_input_stats"}
_SIZES_TO_KEEP = {"normalized_shape", "unflattened_size"}  # (8, 8) does not mean the same as 8 there

_BY_NAME = {"eps", "momentum", "dropout"}  # arguments that nobody writes by place
_RECURRENT = ("input_size", "hidden_size", "num_layers", "bias", "batch_first", "dropout", "bidirectional")


def is_layer(module: nn.Module, *, training: bool) -> bool:
    """Whether a module is exactly a layer of torch.nn as its constructor makes it, in the model's mode.

    A subclass, a hook, a parametrisation other than those of normed_layers.py, or a forward of the instance's
    own would compute something else. Stages are built in training mode, so a layer that depends on the mode
    does not qualify in a model that was traced in evaluation mode.
    """
    return (
        _kind(module) in _LAYERS + LAYERS_OF_TWO
        and all(part.training == training for part in module.modules())
        and (training or not (isinstance(module, LAYERS_WITH_MODES) or changes_its_norm(module)))
        and "forward" not in vars(module)
        and not getattr(module, "return_indices", False)
        and not any(p._forward_hooks or p._forward_pre_hooks or p._backward_hooks for p in module.modules())
        and _has_its_own_weights(module)
        and _has_the_sizes_it_says(module)
        and not (type(module) in LAYERS_OF_TWO and next(module.buffers(), None) is not None)
    )


def _kind(module: nn.Module) -> type[nn.Module]:
    """Returns the layer's class; a class that torch only marks a layer with is that of the layer."""
    kind = layer_in(module)
    return nn.Linear if kind is nn.modules.linear.NonDynamicallyQuantizableLinear else kind


def mode_of(node: fx.Node) -> Any:
    """Returns what an operator is given as its mode (True in training), or None where it takes none."""
    arguments = node.target._schema.arguments if isinstance(node.target, torch._ops.OpOverload) else ()
    for place, argument in enumerate(arguments):
        if argument.name in MODES:
            default = node.kwargs.get(argument.name, argument.default_value)
            return node.args[place] if place < len(node.args) else default
    return None


def is_in_evaluation(node: fx.Node) -> bool:
    """Whether a node is an operator of a layer that was not in training mode when it was called."""
    return mode_of(node) is False


def has_other_numbers(module: nn.Module, node: fx.Node) -> bool:
    """Whether a layer's operator was called with another number than the layer has now.

    Then the forward has set it for this call (`self.drop.p = 0.7`) and put it back.
    """
    if not isinstance(node.target, torch._ops.OpOverload) or isinstance(module, nn.LocalResponseNorm):
        return False  # it is several operators, whose alpha is not the layer's
    places = node.target._schema.arguments
    given = {place.name: place.default_value for place in places}
    given |= dict(zip(given, node.args, strict=False)) | node.kwargs
    return any(
        isinstance(own := vars(module).get(name), float) and isinstance(value, float | int) and own != value
        for name, value in given.items()
    )


def _has_its_own_weights(module: nn.Module) -> bool:
    """Whether a layer holds its weights as its constructor makes them.

    Weights may instead be computed in every call, from tensors that the layer or another module holds.
    """
    if any(isinstance(value, torch.Tensor) for value in vars(module).values()):
        return False
    if isinstance(module, nn.MultiheadAttention):
        return _attends_as_built(module)
    if norm_of(module) is not None:
        return isinstance(module, _WITH_WEIGHT)
    held = {name for name, parameter in module._parameters.items() if parameter is not None}
    if isinstance(module, nn.RNNBase):
        return held == set(module._flat_weights_names)
    if isinstance(module, RECURRENT_CELLS):
        return {"weight_ih", "weight_hh"} <= held <= {"weight_ih", "weight_hh", "bias_ih", "bias_hh"}
    return held <= {"weight", "bias"} and (not isinstance(module, _WITH_WEIGHT) or "weight" in held)


def _attends_as_built(module: nn.MultiheadAttention) -> bool:
    """Whether attention has the weights and numbers that its constructor gives it, for its arguments."""
    inner = module.out_proj
    if type(inner) is not nn.modules.linear.NonDynamicallyQuantizableLinear or hasattr(
        inner, "parametrizations"
    ):
        return False
    given = {name: value for name, value, _ in _attention(module)}
    try:
        built = nn.MultiheadAttention(**given, device="meta")
    except Exception:  # the constructor refuses arguments that were changed later
        return False
    weights, own = (dict(each.named_parameters(remove_duplicate=False)) for each in (built, module))
    numbers, has = (_numbers_of(each) for each in (built, module))
    is_shared = len(set(own.values())) < len(own)
    sizes, held = ({name: w.shape for name, w in each.items()} for each in (weights, own))
    return not is_shared and sizes == held and numbers == has and not any(True for _ in module.buffers())


def _numbers_of(module: nn.MultiheadAttention) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if isinstance(value, int | float)}


def _has_the_sizes_it_says(module: nn.Module) -> bool:
    """Whether a layer's weights have the sizes that its arguments say.

    Weights may be replaced by others with more rows or fewer channels, while the arguments stay the same.
    """
    sizes = _sizes_held(module)
    if not sizes:
        return True
    given = {name: value for name, value, _ in _arguments(module)}
    try:
        with warnings.catch_warnings(action="ignore"):  # torch warned when the model was built
            built = with_norm(layer_in(module)(**given, device="meta"), module)
    except Exception:  # the constructor refuses arguments that were changed later
        return False
    return _sizes_held(built) == sizes


def _sizes_held(module: nn.Module) -> dict[str, torch.Size]:
    parameters = module.named_parameters(remove_duplicate=False)
    return {name: tensor.shape for name, tensor in itertools.chain(parameters, module.named_buffers())}


def constructor(module: nn.Module) -> Call:
    """Returns `nn.Linear(768, 3072, bias=False)`; arguments that have their default are left out."""
    pairs = _arguments(module)
    parts = [Part(Leaf(a, value), a, default, by_name=a in _BY_NAME) for a, value, default in pairs]
    held = (*module.parameters(), *module.buffers())  # a norm without weights has statistics alone
    kinds = (tensor.dtype for tensor in held if tensor.is_floating_point() or tensor.is_complex())
    dtype = next(kinds, torch.float32)
    if dtype != torch.float32:
        parts.append(Part(Fixed(f"torch.{dtype_name(dtype)}"), "dtype", by_name=True))
    return normed(Call(f"nn.{_kind(module).__name__}", tuple(parts)), module)


def sequential(members: Mapping[str, Template]) -> Call:
    """Returns `nn.Sequential(nn.Linear(8, 8), nn.ReLU())`; members with names go into an OrderedDict."""
    if are_numbered(members):
        return Call("nn.Sequential", tuple(Part(member) for member in members.values()))
    named = tuple(Part(member, name, by_name=True) for name, member in members.items())
    return Call("nn.Sequential", (Part(Call("OrderedDict", named)),))


def is_idle(module: nn.Module) -> bool:
    """Whether a member of a sequence hands on what it is given: an identity, or an empty sequence."""
    return type(module) is nn.Identity or (type(module) is nn.Sequential and len(module) == 0)


def is_sequential(module: nn.Module) -> bool:
    """Whether a module runs as an nn.Sequential that `sequential` can build.

    Its members are numbered without gaps, or all of them have plain names.
    """
    names = [name for name, _ in module.named_children()]
    runs = isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward
    return runs and "forward" not in vars(module) and (are_numbered(names) or all(map(is_plain_name, names)))


def _arguments(module: nn.Module) -> list[tuple[str, Any, Any]]:
    """Lists the constructor's arguments with their values and defaults."""
    if isinstance(module, nn.MultiheadAttention):
        return _attention(module)
    return _recurrent(module) if isinstance(module, nn.RNNBase) else _by_signature(module)


def _by_signature(module: nn.Module) -> list[tuple[str, Any, Any]]:
    found = []
    for argument, parameter in inspect.signature(layer_in(module)).parameters.items():
        if argument in ("device", "dtype", "inplace") or argument.startswith("_"):
            continue
        if parameter.kind in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD):
            continue  # nn.Tanh and others take no arguments
        if parameter.default is None and not hasattr(module, argument):
            continue  # a former name of an argument
        value = getattr(module, argument)
        if (
            argument == "stride"
            and value == getattr(module, "kernel_size", None)
            and parameter.default is None
        ):
            value = None  # torch has put the kernel's size there
        if argument == "bias" and not isinstance(value, bool):
            if not getattr(module, "affine", True) or not getattr(module, "elementwise_affine", True):
                continue  # without a weight there is no bias
            value = value is not None
        keeps = argument in _SIZES_TO_KEEP and len(value) > 1
        found.append((argument, tuple(value) if keeps else _unpacked(value), parameter.default))
    return found


def _recurrent(module: nn.RNNBase) -> list[tuple[str, Any, Any]]:
    defaults = {"num_layers": 1, "bias": True, "batch_first": False, "dropout": 0.0, "bidirectional": False}
    pairs: list[tuple[str, Any, Any]] = [
        (name, getattr(module, name), defaults.get(name, NO_DEFAULT)) for name in _RECURRENT
    ]
    if isinstance(module, nn.RNN):
        pairs.append(("nonlinearity", module.nonlinearity, "tanh"))
    if module.proj_size:
        pairs.append(("proj_size", module.proj_size, 0))
    return pairs


def _attention(module: nn.MultiheadAttention) -> list[tuple[str, Any, Any]]:
    width = module.embed_dim
    return [
        ("embed_dim", width, NO_DEFAULT),
        ("num_heads", module.num_heads, NO_DEFAULT),
        ("dropout", module.dropout, 0.0),
        ("bias", module.in_proj_bias is not None, True),
        ("add_bias_kv", module.bias_k is not None, False),
        ("add_zero_attn", module.add_zero_attn, False),
        ("kdim", None if module.kdim == width else module.kdim, None),
        ("vdim", None if module.vdim == width else module.vdim, None),
        ("batch_first", module.batch_first, False),
    ]


def _unpacked(value: Any) -> Any:
    """Returns 3 for (3, 3), as it is usually written."""
    if isinstance(value, tuple) and value and all(type(v) is int and v == value[0] for v in value):
        return value[0]
    return tuple(value) if isinstance(value, tuple) else value
