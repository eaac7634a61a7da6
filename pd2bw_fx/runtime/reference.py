"""The update rules on the whole model in one process: what a pipeline's losses and weights must equal.

    2bw           W(t+1) = W(t) - lr * grad f(W(max(t-1, 0)))      the gradient is one update late
    synchronous   W(t+1) = W(t) - lr * grad f(W(t))

It is written from the rule alone, with two copies of the model and an ordinary optimizer; it knows no
schedule, no stages and no weight store.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler
from torch.utils import _pytree as pytree

from pd2bw_fx.batch import Microbatches
from pd2bw_fx.containers import look_into_dataclasses
from pd2bw_fx.errors import InputError
from pd2bw_fx.model_arguments import accepts
from pd2bw_fx.units import counted, were


@dataclass(frozen=True, slots=True)
class ReferenceResult:
    """The mean loss of every update, and the weights after the last."""

    losses: tuple[float, ...]
    state_dict: dict[str, Tensor]


def train_reference(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    optimizer: Callable[[Any], Optimizer],
    microbatches_per_update: int,
    method: str = "2bw",
    lr_scheduler: Callable[[Optimizer], LRScheduler] | None = None,
    parameter_options: Callable[[str, nn.Parameter], Mapping[str, Any]] | None = None,
    max_gradient_norm: float | None = None,
    loss_fn: Callable[..., Tensor] | None = None,
    on_update: Callable[[int, float], None] | None = None,
) -> ReferenceResult:
    """Trains a copy of the model, one update for each batch; the model itself does not change.

    Batches are as for the pipeline: a tuple of the forward's arguments (targets last where there is a
    loss_fn that takes them), a dict of them (targets under "targets"), or one tensor.
    `method` is "2bw" or "synchronous".

    Raises InputError for another method, a batch with fewer rows than microbatches, and with 2bw for a model
    that writes a parameter in its forward.
    """
    if method not in ("2bw", "synchronous"):
        raise InputError(f"method is {method!r}; the reference knows '2bw' and 'synchronous'")
    newest = copy.deepcopy(model)  # W(t): what the optimizer steps
    # The weights that gradients are computed on: W(max(t-1, 0)), or W(t).
    differentiated = _another_version(model, newest) if method == "2bw" else newest
    trained = {name: parameter for name, parameter in newest.named_parameters() if parameter.requires_grad}
    options = parameter_options or (lambda name, parameter: {})
    stepped = optimizer([{"params": [p], **options(name, p)} for name, p in trained.items()])
    scheduler = None if lr_scheduler is None else lr_scheduler(stepped)
    both = zip(newest.parameters(), differentiated.parameters(), strict=True)
    pairs = [(one, other) for one, other in both if one is not other]
    losses: list[float] = []
    for update, batch in enumerate(batches):
        differentiated.zero_grad(set_to_none=True)
        given = [other.detach().clone() for _, other in pairs]
        total = 0.0
        for microbatch in _cut(batch, microbatches_per_update):
            loss = _loss(differentiated, microbatch, loss_fn) / microbatches_per_update
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.item()
        _require_unwritten(differentiated, [other for _, other in pairs], given)
        before = [parameter.detach().clone() for parameter, _ in pairs]
        for parameter, source in pairs:
            parameter.grad = source.grad
        if max_gradient_norm is not None:
            nn.utils.clip_grad_norm_(trained.values(), max_gradient_norm)
        stepped.step()
        if scheduler is not None:
            scheduler.step()
        with torch.no_grad():
            for (_, target), value in zip(pairs, before, strict=True):
                target.copy_(value)
        losses.append(total)
        if on_update is not None:
            on_update(update, total)
    return ReferenceResult(tuple(losses), _merged(newest, differentiated))


def _another_version(model: nn.Module, newest: nn.Module) -> nn.Module:
    """Returns a copy that shares the frozen parameters: what no optimizer steps has only one version."""
    both = zip(model.parameters(), newest.parameters(), strict=True)
    return copy.deepcopy(model, {id(own): copied for own, copied in both if not own.requires_grad})


def _require_unwritten(model: nn.Module, versioned: list[nn.Parameter], given: list[Tensor]) -> None:
    for parameter, value in zip(versioned, given, strict=True):
        if not torch.equal(parameter.detach().nan_to_num(), value.nan_to_num()):
            name = next(name for name, own in model.named_parameters() if own is parameter)
            raise InputError(
                f"the forward writes parameter {name!r}, of which 2bw has two versions; its rule is of "
                "weights that the optimizer alone changes"
            )


def _cut(batch: Any, num_parts: int) -> list[Any]:
    """Returns equal parts of every tensor in the batch along dimension 0; other values go to every part.

    `Microbatches` are cut already.
    """
    if isinstance(batch, Microbatches):
        if len(batch) != num_parts:
            raise InputError(
                f"{counted(len(batch), 'microbatch')} {were(len(batch))} given, and an update has {num_parts}"
            )
        return list(batch)
    look_into_dataclasses(batch)
    leaves, shape = pytree.tree_flatten(batch)
    pieces = [
        leaf.chunk(num_parts) if isinstance(leaf, Tensor) and leaf.dim() else (leaf,) * num_parts
        for leaf in leaves
    ]
    if any(len(parts) != num_parts for parts in pieces):
        raise InputError(
            f"the batch cannot be cut into {counted(num_parts, 'microbatch')}; pass a larger one"
        )
    return [pytree.tree_unflatten(list(parts), shape) for parts in zip(*pieces, strict=True)]


def _loss(model: nn.Module, batch: Any, loss_fn: Callable[..., Tensor] | None) -> Tensor:
    has_targets = loss_fn is not None and accepts(loss_fn, 2) is not False
    targets = []
    if isinstance(batch, Mapping):
        arguments = dict(batch)
        if has_targets:
            targets.append(arguments.pop("targets"))
        output = model(**arguments)
    else:
        positional = [batch] if isinstance(batch, Tensor) else list(batch)
        if has_targets:
            targets.append(positional.pop())
        output = model(*positional)
    if loss_fn is not None:
        return loss_fn(output, *targets)
    if isinstance(output, Mapping):
        output = output["loss"]
    elif isinstance(output, tuple | list):
        output = next((entry for entry in output if _may_be_a_loss(entry)), output[0])
    assert isinstance(output, Tensor)
    return output


def _may_be_a_loss(entry: Any) -> bool:
    return isinstance(entry, Tensor) and entry.numel() == 1 and entry.requires_grad


def _merged(newest: nn.Module, forwarded: nn.Module) -> dict[str, Tensor]:
    """Returns parameters of the newest weights, and running statistics of the copy that ran the forwards."""
    parameters = {name for name, _ in newest.named_parameters(remove_duplicate=False)}
    running = forwarded.state_dict()
    return {
        name: value.detach().clone() if name in parameters else running[name].detach().clone()
        for name, value in newest.state_dict().items()
    }
