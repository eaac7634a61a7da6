"""Finds, before splitting, the microbatch size, stages and replicas that train a batch fastest."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from pd2bw_fx.arguments import (
    plain,
    require_choice,
    require_kind,
    require_search,
    require_whole_number,
    with_known_options,
)
from pd2bw_fx.cluster import Cluster
from pd2bw_fx.constraints import Constraints
from pd2bw_fx.containers import look_into_dataclasses
from pd2bw_fx.costs import MemoryModel
from pd2bw_fx.errors import InputError, Pd2bwError
from pd2bw_fx.problem import Problem
from pd2bw_fx.sweep import Sweep

from .coarsen import coarsen
from .partition import METHODS, sweep
from .trace import find_example_inputs
from .trace_and_profile import Inputs, Pricing, trace_and_profile


@with_known_options
def tune(
    model: nn.Module,
    example_args: Sequence[Any] | Tensor | None = None,
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    batch_size: int,
    microbatch_sizes: Sequence[int] | None = None,
    num_stages: Sequence[int] | None = None,
    num_replicas: Sequence[int] = (1,),
    loss_fn: Callable[..., Tensor] | None = None,
    example_targets: Any = None,
    cluster: Cluster | int | str | Path | None = None,
    method: str = "2bw",
    memory_model: MemoryModel | None = None,
    recompute: bool | Literal["auto"] = "auto",
    constraints: Constraints | None = None,
    costs: Literal["auto", "measured", "analytic"] = "auto",
    profile_cache: bool = True,
    max_gap: float = 0.01,
    time_limit_s: float = 120.0,
) -> Sweep:
    """Returns the fastest ways to train batches of `batch_size` samples that fit in memory, fastest first.

    - Example inputs are as `split` takes them. Dimension 0 of the first tensor is the batch. Tensors with the
      same dimension 0 are cut or repeated to each of the microbatch sizes.
    - `microbatch_sizes`: by default the powers of two that divide the batch, up to 32. The model is traced
      and profiled anew for each.
    - `num_stages` and `num_replicas`: the numbers to choose from. Replicas need equal devices and links.
    - `method`: "2bw", "1f1b" or "gpipe".

    Sizes of its own choice that the model cannot run, as BatchNorm cannot train on one sample, are left out,
    and stand in `Sweep.skipped` with the reason.

    Raises what `split` raises, and InputError where no size divides the batch into enough microbatches.
    """
    require_choice("method", method, *METHODS)
    require_search(max_gap, time_limit_s)
    chosen = Cluster.of(cluster)
    args, kwargs = _inputs(model, example_args, example_kwargs)
    given = _batch_size((args, kwargs))
    require_whole_number("batch_size", batch_size)
    batch_size = plain(batch_size)
    sizes = _powers_of_two(batch_size) if microbatch_sizes is None else _checked(microbatch_sizes)
    pricing = Pricing(costs, chosen.devices[0], profile_cache, chosen.threads_each)
    problems: dict[int, Problem] = {}
    refused: dict[int, Pd2bwError] = {}
    for size in sizes:
        sized_args, sized_kwargs, targets = _sized((args, kwargs, example_targets), given, size)
        inputs = Inputs(sized_args, sized_kwargs, loss_fn, targets, "auto")
        try:
            known = trace_and_profile(model, inputs, pricing)
        except Pd2bwError as error:
            if microbatch_sizes is not None:
                raise type(error)(f"with microbatches of {size}: {error}") from error
            refused[size] = error
        else:
            problems[size] = coarsen(known.graph, known.costs, chosen)
    if not problems:
        raise next(reversed(refused.values()))
    found = sweep(
        problems,
        chosen,
        batch_size=batch_size,
        num_stages=num_stages,
        num_replicas=num_replicas,
        method=method,
        memory_model=memory_model or MemoryModel(),
        recompute=recompute,
        constraints=constraints,
        max_gap=max_gap,
        time_limit_s=time_limit_s,
    )
    skipped = tuple((f"microbatches of {size}", str(error)) for size, error in refused.items())
    return replace(found, skipped=(*skipped, *found.skipped))


def _inputs(
    model: nn.Module, args: Sequence[Any] | Tensor | None, kwargs: Mapping[str, Any] | None
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(args, Tensor):
        return (args,), dict(kwargs or {})
    if args is not None or kwargs is not None:
        return tuple(args or ()), dict(kwargs or {})
    found = find_example_inputs(model)
    if found is None:
        raise InputError(
            "the microbatch's size cannot be chosen without example inputs: pass example_args=(...), or "
            "example_kwargs={...} for what the forward takes by name"
        )
    return found


def _batch_size(inputs: Any) -> int:
    look_into_dataclasses(inputs)
    for leaf in tree_leaves(inputs):
        if isinstance(leaf, Tensor) and leaf.dim() > 0:
            return leaf.shape[0]
    raise InputError("no example input is a tensor with a batch dimension, so there is nothing to size")


def _sized(inputs: Any, given: int, size: int) -> Any:
    """With `size` rows in place of `given`, the same ones again where there are too few."""

    def sized(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor) or leaf.dim() == 0 or leaf.shape[0] != given:
            return leaf
        return leaf[torch.arange(size, device=leaf.device) % given]

    return tree_map(sized, inputs)


def _checked(microbatch_sizes: Sequence[int]) -> list[int]:
    """Returns the sizes; raises InputError for anything but one number or more."""
    require_kind("microbatch_sizes", microbatch_sizes, Sequence, "a sequence of numbers")
    if not microbatch_sizes:
        raise InputError("microbatch_sizes is empty; at least one size was expected")
    for size in microbatch_sizes:
        require_whole_number("each of microbatch_sizes", size)
    return [plain(size) for size in microbatch_sizes]


def _powers_of_two(batch_size: int) -> list[int]:
    return [size for size in (1, 2, 4, 8, 16, 32) if batch_size % size == 0]
