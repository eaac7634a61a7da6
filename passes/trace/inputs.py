"""Example inputs: found, bound to the forward's arguments, flattened and named."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from pd2bw_fx.containers import hidden_tensor, look_into_dataclasses, step_of
from pd2bw_fx.errors import InputError
from pd2bw_fx.model_arguments import forward_signature
from pd2bw_fx.names import free_name, name_of_path


@dataclass(frozen=True, slots=True)
class FlatArguments:
    """A call of the model, with its tensors taken out: `rebuild` puts the same number of tensors back.

    Everything that is not a tensor is a constant of the trace.
    """

    names: tuple[str, ...]
    tensors: tuple[torch.Tensor, ...]
    leaves: tuple[Any, ...]  # the flattened call; tensors stand as their position in `tensors`
    spec: pytree.TreeSpec

    def batched(self, batch_size: int) -> frozenset[str]:
        """Returns the inputs whose dimension 0 is the batch."""
        pairs = zip(self.names, self.tensors, strict=True)
        return frozenset(name for name, t in pairs if t.dim() > 0 and t.shape[0] == batch_size)

    def lengths(self, batch_size: int) -> dict[str, str]:
        """Returns names for the lengths of inputs of whole numbers (batch, length), by input.

        These are tokens, their labels and masks. Inputs of the same length share a name. A length of 1 is not
        a sequence but a column.
        """
        found: dict[int, str] = {}
        named: dict[str, str] = {}
        batched = self.batched(batch_size)
        for name, tensor in zip(self.names, self.tensors, strict=True):
            if (
                name in batched
                and tensor.dim() == 2
                and tensor.shape[1] > 1
                and not (tensor.is_floating_point() or tensor.is_complex())
            ):
                number = len(found) + 1
                length = found.setdefault(
                    tensor.shape[1], "sequence" if number == 1 else f"sequence_{number}"
                )
                named[name] = length
        return named

    def rebuild(self, tensors: Sequence[Any]) -> tuple[tuple[Any, ...], dict[str, Any], Any]:
        leaves = [tensors[leaf.index] if isinstance(leaf, _Slot) else leaf for leaf in self.leaves]
        args, kwargs, targets = pytree.tree_unflatten(leaves, self.spec)
        return args, kwargs, targets

    @property
    def has_targets(self) -> bool:
        """Whether the loss compares the output with something."""
        _, _, targets = pytree.tree_unflatten(self.leaves, self.spec)
        return targets is not None


@dataclass(frozen=True, slots=True)
class _Slot:
    index: int


def find_example_inputs(model: nn.Module) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Returns the model's own `example_inputs()`, or a Hugging Face model's `dummy_inputs`, or None.

    They are moved to the GPU if all of the model is there. A language model's dummy tokens serve as its
    labels too, since without labels it would have no loss to train on.
    """
    offered = _offered(model)
    devices = {tensor.device for tensor in (*model.parameters(), *model.buffers())}
    if offered is None or len(devices) != 1 or next(iter(devices)).type in ("cpu", "meta"):
        return offered
    (device,) = devices
    moved: tuple[tuple[Any, ...], dict[str, Any]] = pytree.tree_map(
        lambda leaf: leaf.to(device) if isinstance(leaf, torch.Tensor) else leaf, offered
    )
    return moved


def _offered(model: nn.Module) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    offer = getattr(model, "example_inputs", None)
    if callable(offer):
        return _as_call(offer())
    dummy = getattr(model, "dummy_inputs", None)
    if not isinstance(dummy, Mapping):
        return None
    accepted = forward_signature(model).parameters
    kwargs = {name: value for name, value in dummy.items() if name in accepted}
    if not kwargs:
        return None
    if "use_cache" in accepted:
        kwargs["use_cache"] = False
    tokens, kind = kwargs.get("input_ids"), type(model).__name__
    takes_tokens_as_labels = kind.endswith(
        ("LMHeadModel", "ForCausalLM", "ForMaskedLM", "ForConditionalGeneration")
    )
    if "labels" in accepted and isinstance(tokens, torch.Tensor) and takes_tokens_as_labels:
        kwargs["labels"] = tokens.clone()
    return (), kwargs


def without_cache(model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any] | None:
    """Returns the keyword arguments with `use_cache=False`; None if that is not for the caller to add.

    A model in training gets it where it takes the argument and the call does not give it. Hugging Face models
    would otherwise keep keys and values for generating. For a sliding window they keep the last ones, by
    slices that allow only some lengths.
    """
    accepted = list(forward_signature(model).parameters)
    if not model.training or "use_cache" not in accepted or "use_cache" in kwargs:
        return None
    return {**kwargs, "use_cache": False} if accepted.index("use_cache") >= len(args) else None


def _as_call(offered: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(offered, Mapping):
        return (), dict(offered)
    if isinstance(offered, tuple) and [type(part) for part in offered] == [tuple, dict]:
        return offered[0], dict(offered[1])
    if isinstance(offered, (tuple, list)):
        return tuple(offered), {}
    return (offered,), {}


def flatten_arguments(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], targets: Any = None
) -> FlatArguments:
    """Flattens a call: its tensors in the order of the forward's signature, then those of the targets.

    A tensor nested in an argument is named by the path to it: `batch_pixels`, `state_0`. Tensors are copied,
    since a model may write to its inputs, and a tracer would take two that share memory for one.
    """
    if not isinstance(args, (tuple, list)):
        by_name = " or, where it holds the forward's arguments by name, example_kwargs=x"
        raise InputError(
            f"example_args is a {type(args).__name__}, expected a tuple of the forward's positional "
            f"arguments; try example_args=(x,){by_name if isinstance(args, Mapping) else ''}"
        )
    signature = forward_signature(model)
    try:
        bound = signature.bind(*args, **kwargs)
    except TypeError as error:
        raise InputError(
            f"{type(model).__name__}.forward{signature} cannot take these example inputs: {error}"
        ) from error
    call = (bound.args, _in_order(bound.kwargs, signature), targets)
    look_into_dataclasses(call)
    leaves, spec = pytree.tree_flatten(call)
    paths = [*_named_arguments(bound), *_paths("targets", targets)]
    names: list[str] = []
    tensors: list[torch.Tensor] = []
    for position, (path, leaf) in enumerate(zip(paths, leaves, strict=True)):
        if not isinstance(leaf, torch.Tensor):
            _require_plain(path, leaf)
            continue
        leaves[position] = _Slot(len(tensors))
        names.append(free_name(path, names, first=1))
        tensors.append(leaf.detach().clone())
    return FlatArguments(tuple(names), tuple(tensors), tuple(leaves), spec)


def _require_plain(path: str, leaf: Any) -> None:
    if hasattr(leaf, "__array__") and getattr(leaf, "shape", None):
        raise InputError(
            f"input {path} is a {type(leaf).__name__}, which the trace would keep as a constant; expected a "
            "tensor: torch.as_tensor(..) of it"
        )
    place = hidden_tensor(leaf)
    if place is not None:
        raise InputError(
            f"input {path} is a {type(leaf).__name__} with a tensor in it ({path}{place}), which the trace "
            "would keep as a constant; expected tensors in tuples, lists, dicts or dataclasses, or in a "
            "class that torch.utils._pytree.register_pytree_node was told of"
        )


def arguments_without_examples(model: nn.Module, *, has_targets: bool) -> FlatArguments:
    """Returns a call with a tensor for each argument that has no default."""
    signature = forward_signature(model)
    variable = {inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD}
    needed = [p for p in signature.parameters.values() if p.default is p.empty and p.kind not in variable]
    names = [parameter.name for parameter in needed]
    slots = {name: _Slot(position) for position, name in enumerate(names)}
    positional = [p.name for p in needed if p.kind is not p.KEYWORD_ONLY]
    keywords = {p.name: slots[p.name] for p in needed if p.kind is p.KEYWORD_ONLY}
    targets = _Slot(len(names)) if has_targets else None
    leaves, spec = pytree.tree_flatten((tuple(slots[name] for name in positional), keywords, targets))
    return FlatArguments((*names, "targets") if has_targets else tuple(names), (), tuple(leaves), spec)


def common_batch_size(flat: FlatArguments) -> int:
    """Returns the size of dimension 0 that most tensors share, or else that of the first tensor."""
    sizes = Counter(tensor.shape[0] for tensor in flat.tensors if tensor.dim() > 0)
    if not sizes:
        raise InputError(
            f"no example input has a batch dimension (found {_listing(flat)}); expected tensors whose "
            "dimension 0 counts the samples"
        )
    batch_size = max(sizes, key=lambda size: sizes[size])
    if batch_size == 0:
        raise InputError(f"the example batch is empty (found {_listing(flat)}); expected at least one sample")
    return batch_size


def _listing(flat: FlatArguments) -> str:
    found = [f"{name}: {tuple(t.shape)}" for name, t in zip(flat.names, flat.tensors, strict=True)]
    return ", ".join(found) or "no tensor at all"


def _in_order(kwargs: Mapping[str, Any], signature: inspect.Signature) -> dict[str, Any]:
    order = [name for name in signature.parameters if name in kwargs]
    return {name: kwargs[name] for name in (*order, *(name for name in kwargs if name not in order))}


def _named_arguments(bound: inspect.BoundArguments) -> list[str]:
    paths: list[str] = []
    kinds = {name: parameter.kind for name, parameter in bound.signature.parameters.items()}
    keywords = _in_order(bound.kwargs, bound.signature)
    for name, value in bound.arguments.items():
        if kinds[name] is inspect.Parameter.VAR_POSITIONAL:
            paths += [path for i, item in enumerate(value) for path in _paths(f"{name}_{i}", item)]
        elif name not in keywords and kinds[name] is not inspect.Parameter.VAR_KEYWORD:
            paths += _paths(name, value)
    for name, value in keywords.items():
        paths += _paths(name, value)
    return paths


def _paths(root: str, value: Any) -> list[str]:
    keyed, _ = pytree.tree_flatten_with_path(value)
    return [name_of_path(root, [_step(key) for key in path]) for path, _ in keyed]


def _step(key: Any) -> str | int:
    step = step_of(key)
    return str(key) if step is None else step
