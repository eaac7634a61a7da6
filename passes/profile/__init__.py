"""profile: prices every operator.

- measured (`measured.py`): each operator is run and timed on a device of this machine, on the example's
  values;
- analytic (`analytic.py`): operations and bytes over a device's rates, from shapes alone, for other devices;
- from parameters (here): where symbolic tracing left no shapes.

`walk.py` goes through the program for both of the first two, `keys.py` tells calls apart, `cache.py` keeps
measured times on disk, and `tape.py` has what autograd recorded of a call.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
)

from pd2bw_fx.costs import Costs, OperatorCost
from pd2bw_fx.device import Device
from pd2bw_fx.errors import InputError, shown
from pd2bw_fx.graph import OperatorGraph
from pd2bw_fx.untraced_operands import NAMESPACE

from .analytic import Estimator
from .cache import ProfileCache, default_cache_folder
from .measured import Stopwatch, clock_for, state_as_it_was
from .walk import Walk

Forward = Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]

__all__ = ["METHODS", "clock_for", "default_cache_folder", "profile"]

METHODS = ("auto", "measured", "analytic")

_NAMED = 3  # examples that a note names
_TOO_LONG = 1.5  # operators together over the model: measured at one time, the ratio is within 1.2


def profile(
    graph: OperatorGraph,
    inputs: Mapping[str, Tensor] | None,
    *,
    device: Device,
    method: Literal["auto", "measured", "analytic"] = "auto",
    whole: Forward | None = None,
    cache: Path | None = None,
    num_threads: int | None = None,
) -> Costs:
    """Returns the costs of every operator on `device`, for one microbatch of the size of `inputs`.

    "auto" measures if this machine has a device of that kind and the tensors hold values, and estimates
    otherwise; `Costs.origin` and `Costs.note` say what was done. Measuring leaves buffers and random state as
    they were. `whole` runs the model on the inputs. An operator that is repeated alone finds its operands in
    the processor's cache, so all measured times are scaled alike to add up to the time of the whole model.
    `cache` is a folder with times measured before, on the same device with the same torch. Operators in it
    are not timed again, and others are added. A CPU is measured with `num_threads`, by default as many as
    torch has now.

    Raises InputError for an unknown method, and for measuring what cannot be run here.
    """
    if method not in METHODS:
        raise InputError(
            f"costs={shown(method)} is unknown; known are {', '.join(METHODS)}, and the costs of a pipeline, "
            "changed or not: dataclasses.replace(pipe.costs, operators=..)"
        )
    here = device.kind == "cpu" or (device.kind == "cuda" and torch.cuda.is_available())
    has_values = inputs is not None and _has_values(graph, inputs)
    if inputs is None:
        if method == "measured":
            raise InputError('costs="measured" needs something to run: pass example_args')
        return _from_parameters(graph, device)
    if method == "measured" and not here:
        raise InputError(f'no device of kind {device.kind!r} is at hand to measure on; use costs="analytic"')
    if method == "measured" and not has_values:
        raise InputError(
            "the model or its example inputs hold no values (meta or fake tensors), so nothing can be timed; "
            'use costs="analytic", or build the model with its weights'
        )
    if method == "analytic" or not here or not has_values:
        return _estimated(graph, inputs, device, has_values=has_values)
    try:
        with _threads(num_threads):
            return _measured(graph, inputs, device, whole, cache)
    except torch.OutOfMemoryError:
        if method == "measured":
            raise InputError(
                f"the model does not fit on one {device.kind} device, where its operators are timed; pass a "
                'smaller microbatch, or costs="analytic"'
            ) from None
    if device.kind == "cuda":
        torch.cuda.empty_cache()
    estimated = _estimated(graph, inputs, device, has_values=has_values)
    note = f"the model does not fit on one {device.kind} device, so nothing was measured: {estimated.note}"
    return replace(estimated, note=note)


def _measured(
    graph: OperatorGraph,
    inputs: Mapping[str, Tensor],
    device: Device,
    whole: Forward | None,
    cache: Path | None,
) -> Costs:
    where = _where(device, inputs)
    known = None if cache is None else ProfileCache(cache, where)
    with _gpu(where):
        costs, are_outdated = _timed(graph, inputs, where, whole, known)
        if known is not None and are_outdated:
            known.forget()
            costs, _ = _timed(graph, inputs, where, whole, known)
    return Costs(costs, device.kind, _microbatch_size(graph, inputs), origin="measured")


def _where(device: Device, inputs: Mapping[str, Tensor]) -> torch.device:
    """Returns the GPU that has the inputs, or else the GPU of this process, because all ranks of torchrun may
    measure at once."""
    if device.kind != "cuda":
        return torch.device(device.kind)
    there = next((tensor.device for tensor in inputs.values() if tensor.device.type == "cuda"), None)
    if there is not None:
        return there
    own = int(os.environ.get("LOCAL_RANK", "0")) % torch.cuda.device_count()
    return torch.device("cuda", torch.cuda.current_device() or own)


@contextmanager
def _gpu(where: torch.device) -> Iterator[None]:
    """Frees the GPU's memory afterwards: the stage that will run there counts on it."""
    if where.type != "cuda":
        yield
        return
    try:
        with torch.cuda.device(where):
            yield
    finally:
        torch.cuda.empty_cache()


@contextmanager
def _threads(number: int | None) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(number or before)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _timed(
    graph: OperatorGraph,
    inputs: Mapping[str, Tensor],
    where: torch.device,
    whole: Forward | None,
    known: ProfileCache | None,
) -> tuple[dict[str, OperatorCost], bool]:
    """Returns the costs, and whether times from the cache cannot be right."""
    with Stopwatch(graph, where, known) as stopwatch:
        walk = Walk(graph, stopwatch)
        costs = walk.run(inputs)
        if whole is None or any(tensor.device.type != where.type for tensor in inputs.values()):
            return costs, False
        seconds = stopwatch.whole(lambda: whole(inputs), key=("whole", walk.keys))
    total_s = sum(cost.forward_s + cost.backward_s for cost in costs.values())
    return _scaled(costs, *seconds), stopwatch.knew_some and total_s > _TOO_LONG * stopwatch.takes_s


def _scaled(
    costs: Mapping[str, OperatorCost], forward_s: float, backward_s: float
) -> dict[str, OperatorCost]:
    forward = forward_s / (sum(cost.forward_s for cost in costs.values()) or 1.0)
    backward = backward_s / (sum(cost.backward_s for cost in costs.values()) or 1.0)
    return {
        name: replace(cost, forward_s=cost.forward_s * forward, backward_s=cost.backward_s * backward)
        for name, cost in costs.items()
    }


def _estimated(
    graph: OperatorGraph, inputs: Mapping[str, Tensor], device: Device, *, has_values: bool
) -> Costs:
    uncounted = _uncounted(graph)
    try:
        with Estimator(device) as estimator:
            costs = Walk(graph, estimator).run(inputs)
    except (DynamicOutputShapeException, DataDependentOutputException):  # sizes that depend on values
        if not has_values:
            raise InputError(
                "sizes within the model depend on values, and the model or its example inputs hold none "
                "(meta or fake tensors); build the model with its weights"
            ) from None
        with state_as_it_was(graph), Estimator(device, on_values=True) as estimator:
            costs = Walk(graph, estimator).run(inputs)
        uncounted = []
    note = (
        f"times are estimates, at {device.flops_per_s:.3g} operations and "
        f"{device.memory_bytes_per_s:.3g} bytes a second; measure on the device itself for better ones"
    )
    size = _microbatch_size(graph, inputs)
    return Costs(costs, device.kind, size, origin="analytic", note="; ".join([note, *uncounted]))


def _uncounted(graph: OperatorGraph) -> list[str]:
    """Returns a note on what cannot be known from tensors without values."""
    targets = [operator.target for operator in graph.operators.values()]
    told = []
    if any(kind in target.lower() for target in targets for kind in ("lstm", "gru", "rnn")):
        told.append("what recurrent layers keep for their backward besides operands is not counted")
    parts = list(dict.fromkeys(t.split(".")[1] for t in targets if t.startswith(f"{NAMESPACE}.")))
    if parts:
        names = ", ".join([*parts[:_NAMED], *["others"] * (len(parts) > _NAMED)])
        told.append(
            f"what is untraced ({names}) is not run for them, so that neither its arithmetic nor what it "
            'keeps for its backward is counted; costs="measured" runs it'
        )
    return told


def _from_parameters(graph: OperatorGraph, device: Device) -> Costs:
    """Estimates from parameters: each is read once in the forward and twice in the backward, and every
    operator costs a launch."""
    costs = {}
    for operator in graph.operators.values():
        num_bytes = sum(
            graph.parameters[name].spec.num_bytes for name in operator.parameters if name in graph.parameters
        )
        forward_s = 1e-6 + num_bytes / device.memory_bytes_per_s
        costs[operator.name] = OperatorCost(
            forward_s, 2 * forward_s, forward_work=(0.0, num_bytes), backward_work=(0.0, 2 * num_bytes)
        )
    return Costs(
        costs,
        device.kind,
        microbatch_size=None,
        origin="parameters",
        note="no example inputs, so no shapes: costs are estimates from parameter sizes alone; activations "
        "and transfers count as nothing; for real ones pass example_args=(...) to "
        "split, or give the model a method example_inputs()",
    )


def _has_values(graph: OperatorGraph, inputs: Mapping[str, Tensor]) -> bool:
    parameters = graph.root.parameters() if graph.root is not None else ()
    return not any(
        tensor.is_meta or isinstance(tensor, FakeTensor) for tensor in (*inputs.values(), *parameters)
    )


def _microbatch_size(graph: OperatorGraph, inputs: Mapping[str, Tensor]) -> int | None:
    for name, spec in graph.inputs.items():
        if spec.shape and spec.shape[0] == graph.batch_symbol:
            return inputs[name].shape[0]
    sizes = [tensor.shape[0] for tensor in inputs.values() if tensor.dim() > 0]
    return sizes[0] if sizes else None
