"""The module that is traced: flat tensors in, flat named tensors out, the user's model inside."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn

from pd2bw_fx.errors import InputError
from pd2bw_fx.names import free_name
from pd2bw_fx.traced import name_beside
from pd2bw_fx.units import counted

from .checks.remade_parameters import Remade, copied, require_no_gradient, require_values
from .checks.tensor_attributes import carry_attributes
from .checks.watch import Watch
from .inputs import FlatArguments, common_batch_size
from .patches.checkpointing import skip_checkpointing
from .patches.conditions import Conditions
from .patches.loss_numbers import noting_numbers
from .patches.size_answers import SizeAnswers

MODEL_PREFIX = "model."


@dataclass(slots=True)
class TraceOptions:
    """What a front end decides before it traces the program."""

    conditions: Conditions = field(default_factory=Conditions)  # what a trace assumes of values
    as_uncompiled: bool = (
        False  # whether torch.compiler.is_compiling() is false to the model: see compiling.py
    )
    multiple_of: int = 1  # what batches of an open size are multiples of


@dataclass(slots=True)
class Record:
    """What a run of the program found out about its results, its state and its loss."""

    output_names: tuple[str, ...] = ()
    loss: str | None = None
    loss_place: int | None = None  # among the leaves of a tuple
    other_losses: tuple[str, ...] = ()  # leaves of the tuple that could be trained too
    loss_of_one: bool | None = None  # whether the model's own loss may have dimensions, of size 1
    left_out: tuple[str, ...] = ()  # leaves of the results that are no tensors
    rebound: frozenset[str] = frozenset()  # state that the forward made anew in its old shape
    resized: tuple[str, ...] = ()  # buffers that the forward made anew in another shape
    reached_loss: bool = False  # whether the model itself has run and loss_fn has begun
    numbers_of_loss: list[str] = field(default_factory=list)  # lines of loss_fn that make numbers of tensors
    has_checkpoints: bool = False  # activations that the model would compute again in its backward


class Program(nn.Module):
    """Calls the model as the user would, on flat tensors, and records the names of the flat results.

    `options` goes in: front ends set it before they trace. `record`, `watch` and `answers` come out, and are
    filled in by the last run or trace. Each is an object of its own, since export undoes what a forward
    assigns to a module.

    For the same reason a buffer that the forward assigns anew (`self.count = self.count + 1`) is written back
    in place here, and a parameter is too (see remade_parameters.py). A buffer that the forward makes in
    another shape, such as a cache of what follows from the sizes, is made again in every call.
    """

    def __init__(self, model: nn.Module, flat: FlatArguments, loss_fn: Callable[..., Any] | None) -> None:
        super().__init__()
        self.model = model
        self.loss_fn = loss_fn
        self.flat = flat
        self.options = TraceOptions()
        self.record = Record()
        self.watch = Watch()
        self.answers = SizeAnswers()
        self.training = model.training
        self.originals = self._state()  # tracers put other tensors in their places

    def forward(self, *tensors: torch.Tensor) -> tuple[Any, ...]:
        _take_for_one_batch(tensors, self.options.multiple_of)
        before, remade = self._state(), list[Remade]()
        with carry_attributes(self.originals, before):
            self.watch.before(self.model, self.loss_fn)
            with self.options.conditions.assumed(tensors, self.flat.tensors):
                results = self._run(tensors, before, remade)
            self.watch.after(self.model, self.loss_fn, results)
        require_no_gradient(remade, results)
        return results

    def _state(self) -> dict[str, torch.Tensor]:
        return dict(self.named_parameters(remove_duplicate=False)) | dict(self.named_buffers())

    def call(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Runs the model on copies of the tensors, which it may write, and returns results by output name.

        The loss_fn's buffers, by their names in the operator graph, may be among the tensors.
        """
        given = [tensors[name].clone() for name in self.flat.names]
        before = self._state()
        # A backward may read the old values of these, and the next call begins with the same buffers of the
        # loss as this one.
        apart = [
            name
            for name, tensor in before.items()
            if name in self.record.rebound
            or not (name.startswith(MODEL_PREFIX) or isinstance(tensor, nn.Parameter))
        ]
        for name in apart:
            own = name_beside(self.model, name)
            self._set(name, copied(before[name], tensors.get(own, before[name])))
        try:
            results = self._run(given, before, keeps_loss=True)
        finally:
            for name, tensor in before.items():
                if name in apart or not name.startswith(MODEL_PREFIX):
                    self._set(name, tensor)
        return dict(zip(self.record.output_names, results, strict=True))

    def _run(
        self,
        tensors: Any,
        before: Mapping[str, torch.Tensor],
        remade: list[Remade] | None = None,
        *,
        keeps_loss: bool = False,
    ) -> tuple[Any, ...]:
        """Runs the model and its loss; adds to `remade` the parameters that the forward has replaced."""
        remade = [] if remade is None else remade
        args, kwargs, targets = self.flat.rebuild(tensors)
        self.record.reached_loss = False
        with skip_checkpointing(self._found_a_checkpoint):
            output = self.model(*args, **kwargs)
            own = {name: t for name, t in before.items() if name.startswith(MODEL_PREFIX)}
            self._write_back(own, remade)
            self.record.reached_loss = self.loss_fn is not None
            compared = () if targets is None else (targets,)
            with noting_numbers(self.record.numbers_of_loss):
                loss = None if self.loss_fn is None else self.loss_fn(output, *compared)
            if not keeps_loss:
                self._write_back(before, remade)
        if self.loss_fn is not None:
            loss = _one_element(loss)
            _check_loss(loss)
            named = [("loss", loss), *named_outputs(output, has_loss=False)]
        else:
            # Without gradients a tuple does not show which element is the loss; an earlier run did.
            place = loss_place(output) if torch.is_grad_enabled() else self.record.loss_place
            self.record.loss_place = place
            of_one = self.record.loss_of_one
            knows = of_one is None and self._are_several(tensors)
            named = named_outputs(output, has_loss=True, place=place, of_one=knows or bool(of_one))
            if place is not None and torch.is_grad_enabled():
                others = [name for name, value in named[1:] if _is_scalar(value) and value.requires_grad]
                self.record.other_losses = tuple(others)
            if knows:
                self.record.loss_of_one = "loss" in dict(named)
        kept = [(name, value) for name, value in named if _is_value(value)]
        self.record.left_out = tuple(
            f"{name} ({type(value).__name__})"
            for name, value in named
            if not _is_value(value) and value is not None
        )
        names: list[str] = []
        for name, _ in kept:
            names.append(free_name(name, names, first=1))
        self.record.output_names = tuple(names)
        self.record.loss = "loss" if names and names[0] == "loss" else None
        return tuple(value for _, value in kept)

    def _are_several(self, tensors: Any) -> bool:
        """Whether there are several samples.

        With a single sample, a result of one element may be a value for each sample and no loss. torch.fx
        knows no shapes, so its trace decides for the runs that are compared with it.
        """
        if any(isinstance(tensor, fx.Proxy) for tensor in tensors):
            self.record.loss_of_one = False
        if not self.flat.tensors or self.record.loss_of_one is False:
            return False
        batched = self.flat.batched(common_batch_size(self.flat))
        pairs = zip(self.flat.names, tensors, strict=True)
        sizes: list[Any] = [tensor.shape[0] for name, tensor in pairs if name in batched]
        return not any(type(size) is int and size == 1 for size in sizes)

    def _found_a_checkpoint(self) -> None:
        self.record.has_checkpoints = True

    def _write_back(self, before: Mapping[str, torch.Tensor], remade: list[Remade]) -> None:
        after = self._state()
        changed = [name for name, tensor in before.items() if after.get(name, tensor) is not tensor]
        for name in changed:
            tensor, own = before[name], name.removeprefix(MODEL_PREFIX)
            if isinstance(tensor, nn.Parameter):
                remade.append(Remade(own, tensor, after[name]))
                tied = [other for other, value in before.items() if value is tensor]
                apart = [other for other in tied if after.get(other) is not after[name]]
                require_values(remade[-1], [other.removeprefix(MODEL_PREFIX) for other in apart])
        for name in changed:
            tensor, own = before[name], name.removeprefix(MODEL_PREFIX)
            _require_shape(name, after[name])
            if after[name].shape == tensor.shape:
                self.record.rebound |= {name}
                with torch.no_grad():
                    tensor.copy_(after[name])
            elif own not in self.record.resized:
                self.record.resized += (own,)
            self._set(name, tensor)

    def _set(self, name: str, tensor: torch.Tensor) -> None:
        path, _, attribute = name.rpartition(".")
        setattr(self.get_submodule(path), attribute, tensor)


def _require_shape(name: str, value: Any) -> None:
    """Raises ValueError for a proxy of torch.fx's, which may stand for another shape than the buffer's."""
    if isinstance(value, fx.Proxy):
        own = name.removeprefix(MODEL_PREFIX)
        raise ValueError(
            f"the forward assigns the buffer {own!r} anew, and torch.fx does not know of which shape; write "
            f"it in place, self.{own}.copy_(..)"
        )


def _take_for_one_batch(tensors: Sequence[torch.Tensor], multiple_of: int) -> None:
    """Tells torch that the batch sizes of all inputs are one: each input has a symbol of its own for it."""
    sizes: list[Any] = [t.shape[0] for t in tensors if isinstance(t, torch.Tensor) and t.dim()]
    symbols = [size for size in sizes if isinstance(size, torch.SymInt)]
    for symbol in symbols:
        torch._check(symbol == symbols[0])  # type: ignore[no-untyped-call]
    if symbols and multiple_of > 1:
        torch._check(symbols[0] % multiple_of == 0)  # type: ignore[no-untyped-call]


def loss_place(output: Any) -> int | None:
    """Returns which leaf of a tuple is the loss, or None.

    That is the tuple's first leaf, if it is a scalar with a gradient, or else the only such scalar.
    """
    if _is_value(output) or _has_keys(output):
        return None
    leaves = [value for _, value in _leaves(output, ())]
    places = [at for at, value in enumerate(leaves) if _is_scalar(value) and value.requires_grad]
    return places[0] if places and (places[0] == 0 or len(places) == 1) else None


def named_outputs(
    output: Any, *, has_loss: bool, place: int | None = None, of_one: bool = False
) -> list[tuple[str, Any]]:
    """Returns every leaf of what the model returned with its name, the loss first.

    With `has_loss`, one of them may be the model's own loss: a scalar returned alone, the entry "loss" of a
    dict, the leaf of a tuple at `place`. `of_one`: a loss that is no leaf of a tuple may have dimensions, of
    size 1.
    """
    if _is_value(output):
        output = _one_element(output) if of_one else output
        return [("loss" if has_loss and _is_scalar(output) else "output", output)]
    keyed = _has_keys(output)
    named = [("_".join(p if keyed else ("output", *p)), value) for p, value in _leaves(output, ())]
    if not has_loss:
        return [("output_loss" if name == "loss" else name, value) for name, value in named]
    if not keyed:
        return named if place is None else [("loss", named.pop(place)[1]), *named]
    if of_one:
        named = [(name, _one_element(value) if name == "loss" else value) for name, value in named]
    losses = [(name, value) for name, value in named if name == "loss" and _may_be_loss(value)]
    others = [
        ("output_loss" if name == "loss" else name, value)
        for name, value in named
        if not losses or name != "loss"
    ]
    return [*losses, *others]


def _is_value(value: Any) -> bool:
    return isinstance(value, (torch.Tensor, fx.Proxy, fx.Node))


def _is_scalar(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 0 and value.is_floating_point()


def _may_be_loss(value: Any) -> bool:
    """Whether the entry "loss" may be one. A proxy of torch.fx has no shape yet; its key is enough."""
    return _is_scalar(value) or isinstance(value, (fx.Proxy, fx.Node))


def _one_element(loss: Any) -> Any:
    """Returns a loss of one element as a scalar: one that was added up in torch.zeros(1), for example.

    backward() takes it either way.
    """
    if not isinstance(loss, torch.Tensor) or not loss.dim() or not loss.is_floating_point():
        return loss
    return loss.reshape(()) if all(type(size) is int and size == 1 for size in loss.shape) else loss


def _check_loss(loss: Any) -> None:
    if _may_be_loss(loss):
        return
    found, advice = f"a {type(loss).__name__}", "return the loss"
    if isinstance(loss, (int, float, torch.SymInt, torch.SymFloat)):
        found, advice = "a Python number", "return the tensor itself, without item() or float()"
    elif isinstance(loss, torch.Tensor):
        found = f"a {loss.dtype} tensor of {counted(loss.dim(), 'dimension')}"
        advice = "try a mean over the batch"
    elif _has_keys(loss) or isinstance(loss, (tuple, list)):
        names = ["".join(path[:1]) for path, _ in _leaves(loss, ())]
        found += f" of {', '.join(map(repr, names)) if _has_keys(loss) else len(loss)}"
        advice = (
            "return the entry that is the loss alone; numbers to report beside it are what the model's own "
            "forward returns, {'loss': .., 'error': ..}, without a loss_fn"
        )
    raise InputError(f"loss_fn returned {found}, expected a floating-point scalar; {advice}")


def _has_keys(output: Any) -> bool:
    return isinstance(output, Mapping) or (dataclasses.is_dataclass(output) and not isinstance(output, type))


def _leaves(value: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(item, (*path, str(key)))
    elif isinstance(value, (tuple, list)):
        for position, item in enumerate(value):
            yield from _leaves(item, (*path, str(position)))
    elif _has_keys(value):
        for entry in dataclasses.fields(value):
            yield from _leaves(getattr(value, entry.name), (*path, entry.name))
    else:
        yield path, value
