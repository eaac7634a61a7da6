"""Traces a model and prices its operators: all that `split` does before it plans."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import Tensor, nn
from torch.export import ExportedProgram

from pd2bw_fx.arguments import require_choice
from pd2bw_fx.batch import BatchLayout
from pd2bw_fx.costs import Costs
from pd2bw_fx.device import Device
from pd2bw_fx.errors import InputError
from pd2bw_fx.graph import OperatorGraph
from pd2bw_fx.model_arguments import accepts, require_loss_function
from pd2bw_fx.pipeline import Pipeline
from pd2bw_fx.program import tensors
from pd2bw_fx.size_range import SizeRange
from pd2bw_fx.traced import Traced, TraceReport

from .normalise import normalise
from .profile import default_cache_folder, profile
from .trace import find_example_inputs, trace
from .trace.eager_run import blaming_the_model
from .verify import Forward


@dataclass(frozen=True, slots=True)
class ProfiledModel:
    """A traced and priced model, from which it can be planned any number of times.

    `reference` runs the live model eagerly; it takes tensors by input name and returns results by output
    name.
    """

    graph: OperatorGraph
    costs: Costs
    tensors: Mapping[str, Tensor]
    batch_layout: BatchLayout | None
    example: Mapping[str, Tensor] | None
    trace_report: TraceReport | None
    reference: Forward | None


@dataclass(frozen=True, slots=True)
class Inputs:
    """The arguments of `split` that a model is traced with."""

    args: Sequence[Any] | Tensor | None
    kwargs: Mapping[str, Any] | None
    loss_fn: Callable[..., Tensor] | None
    targets: Any
    tracer: str

    @property
    def are_given(self) -> bool:
        given = (self.args, self.kwargs, self.loss_fn, self.targets)
        return self.tracer != "auto" or any(each is not None for each in given)


@dataclass(frozen=True, slots=True)
class Pricing:
    """Where costs come from: measured on `device`, estimated for it, or those of another pipeline."""

    costs: Costs | Literal["auto", "measured", "analytic"]
    device: Device
    uses_cache: bool
    num_threads: int  # of a process on it, where the device is a CPU

    def __post_init__(self) -> None:
        require_choice("profile_cache", self.uses_cache, True, False)


def trace_and_profile(model: nn.Module | ExportedProgram, inputs: Inputs, pricing: Pricing) -> ProfiledModel:
    """Traces the model, puts it in normal form and prices every operator. Raises InputError, TraceError."""
    args, kwargs = _example_inputs(model, inputs.args, inputs.kwargs)
    if inputs.loss_fn is not None:
        require_loss_function("loss_fn", inputs.loss_fn)
    needs_targets = inputs.loss_fn is not None and not accepts(inputs.loss_fn, 1)
    if needs_targets and inputs.targets is None and args is not None:
        raise InputError(
            "loss_fn was given without example_targets; pass the targets of the example inputs, or a "
            "loss_fn(output) that needs none"
        )
    if inputs.loss_fn is None and inputs.targets is not None:
        raise InputError(
            "example_targets were given without loss_fn; pass the loss that compares the output with them, "
            "or leave them out"
        )
    traced = trace(model, args, kwargs, loss_fn=inputs.loss_fn, targets=inputs.targets, tracer=inputs.tracer)
    graph = normalise(traced)
    example = traced.examples or None
    with blaming_the_model(graph.model_name, traced.call, example):
        costs = _priced(graph, example, traced.call, pricing)
    return ProfiledModel(
        graph=graph,
        costs=costs,
        tensors=tensors(graph),
        batch_layout=None if args is None else _layout(traced, args, kwargs, inputs.targets, graph),
        example=example,
        trace_report=traced.report,
        reference=traced.call,
    )


def profile_of_pipeline(pipeline: Pipeline, inputs: Inputs, pricing: Pricing) -> ProfiledModel:
    """Returns the traced and priced model of a pipeline, with the weights that it has now.

    Costs are found again if they were found for a device of another speed. Raises InputError for a pipeline
    that was loaded, and for inputs, which it has been traced with already.
    """
    if pipeline.graph.fx is None:
        raise InputError(
            "the pipeline was loaded from a folder, which holds stages and not the program that they were "
            "made from; split the model itself"
        )
    if inputs.are_given:
        raise InputError(
            "the pipeline was traced already, with its inputs and its loss; to trace with others, split the "
            "model itself"
        )
    known, device = pipeline.costs, pipeline.cluster.devices[0]
    same_threads = pricing.num_threads == pipeline.cluster.threads_each
    if pricing.costs in ("auto", known.origin) and _alike(device, pricing.device) and same_threads:
        pricing = replace(pricing, costs=known)
    return ProfiledModel(
        graph=pipeline.graph,
        costs=_priced(pipeline.graph, pipeline.example, pipeline.reference, pricing),
        tensors=pipeline.tensors(),
        batch_layout=pipeline.batch_layout,
        example=pipeline.example,
        trace_report=pipeline.trace_report,
        reference=pipeline.reference,
    )


def _alike(one: Device, other: Device) -> bool:
    """Returns whether operators take as long on both devices."""
    return replace(one, name="", memory_bytes=0, host="") == replace(other, name="", memory_bytes=0, host="")


def _priced(
    graph: OperatorGraph, example: Mapping[str, Tensor] | None, reference: Forward | None, pricing: Pricing
) -> Costs:
    if isinstance(pricing.costs, Costs):
        unknown = sorted(graph.operators.keys() ^ pricing.costs.operators.keys())
        if unknown:
            raise InputError(f"the costs are another model's: operator {unknown[0]!r} is in one of them only")
        return pricing.costs
    return profile(
        graph,
        example,
        device=pricing.device,
        method=pricing.costs,
        whole=reference,
        cache=default_cache_folder() if pricing.uses_cache else None,
        num_threads=pricing.num_threads,
    )


def _layout(
    traced: Traced,
    args: Sequence[Any],
    kwargs: Mapping[str, Any] | None,
    targets: Any,
    graph: OperatorGraph,
) -> BatchLayout:
    # A program of torch.fx asks for sizes when it runs; an exported one has them as numbers.
    report = traced.report
    sizes = _fixed_sizes(graph) if report.tracer.startswith("export") else {}
    layout = BatchLayout.of(
        traced.model, args, kwargs, targets, microbatch_sizes=graph.batch_sizes, sizes=sizes
    )
    tried = {report.tracer, *(attempt.tracer for attempt in report.attempts)}
    layout = replace(layout, lengths_asked="export-sequence" in tried)
    shapes = [spec.shape for spec in graph.inputs.values()]
    if any(shape is None or any(isinstance(size, str) for size in shape) for shape in shapes):
        return layout
    # All sizes are numbers: the program is for the example's sizes alone.
    batches = {int(spec.shape[0]) for spec in graph.inputs.values() if spec.shape}
    return replace(layout, microbatch_sizes=SizeRange.only(batches.pop())) if len(batches) == 1 else layout


def _fixed_sizes(graph: OperatorGraph) -> dict[str, tuple[int | None, ...]]:
    """Returns the shape of each input, with None for sizes that are names in the program."""
    return {
        name: tuple(size if isinstance(size, int) else None for size in spec.shape)
        for name, spec in graph.inputs.items()
        if spec.shape is not None
    }


def _example_inputs(
    model: nn.Module | ExportedProgram, args: Sequence[Any] | Tensor | None, kwargs: Mapping[str, Any] | None
) -> tuple[Sequence[Any] | None, Mapping[str, Any] | None]:
    """Returns the inputs to trace with: the user's, else the model's own, else none."""
    if isinstance(model, ExportedProgram):
        if args is not None or kwargs is not None:
            raise InputError(
                "an ExportedProgram is split with the example inputs that it was exported with; leave "
                "example_args and example_kwargs out"
            )
        return model.example_inputs or ((), {})
    if not isinstance(model, nn.Module):
        raise InputError(f"model is a {type(model).__name__}; an nn.Module was expected")
    if isinstance(args, Tensor):
        return (args,), kwargs
    if args is not None or kwargs is not None:
        return () if args is None else args, {} if kwargs is None else kwargs
    found = find_example_inputs(model)
    return (None, None) if found is None else found
