"""Compares a pipeline's stages with the original model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from pd2bw_fx.arguments import require_kind, require_not_negative
from pd2bw_fx.batch import TARGETS
from pd2bw_fx.errors import InputError
from pd2bw_fx.model_arguments import forward_signature
from pd2bw_fx.passes.trace.inputs import flatten_arguments
from pd2bw_fx.passes.trace.program import Program
from pd2bw_fx.passes.verify import Sides, Verification, verify
from pd2bw_fx.state import require_values

if TYPE_CHECKING:
    from pd2bw_fx.pipeline import Pipeline


def verify_pipeline(
    pipeline: Pipeline,
    model: nn.Module | None,
    *,
    example_args: Sequence[Any] | Tensor,
    example_kwargs: Mapping[str, Any] | None,
    loss_fn: Callable[..., Tensor] | None,
    example_targets: Any,
    example: Mapping[str, Tensor] | None,
    tolerance: float | None,
) -> Verification:
    """Implements `Pipeline.verify`."""
    example_args = (example_args,) if isinstance(example_args, Tensor) else example_args
    tensors = pipeline.tensors()
    plain = len(example_args) == 0 and example_kwargs is None
    if model is not None:
        require_kind("model", model, nn.Module, "the model that was split, an nn.Module")
    elif not plain or loss_fn is not None or example_targets is not None:
        raise InputError(
            "example_args, example_kwargs, loss_fn and example_targets are for the model that the stages "
            "are compared with: pass it too, or other inputs by name as example={..}"
        )
    if tolerance is not None:
        require_not_negative("tolerance", tolerance)
    if pipeline.example is None:
        raise InputError("comparing needs example inputs: split the model with example_args")
    require_values(pipeline.graph, tensors)
    own_example: Mapping[str, Tensor] = pipeline.example
    reference, original = pipeline.reference, pipeline.graph.root
    is_own = plain and loss_fn is None and model is original and reference is not None
    if model is not None and not is_own:
        kwargs = _plain_arguments(pipeline, model) if plain else example_kwargs or {}
        flat = flatten_arguments(model, example_args, kwargs, example_targets)
        program = Program(model, flat, loss_fn)
        program.record.loss_of_one = pipeline.graph.loss is not None
        reference, original = program.call, model
        given = dict(zip(flat.names, flat.tensors, strict=True))
        if example is None and not plain and given.keys() >= pipeline.graph.inputs.keys():
            example = given
        tensors, own_example = _beside(model, tensors), _beside(model, own_example)
    if reference is None or original is None:
        raise InputError(
            "a pipeline that was loaded, or split on the meta device, has no original model with values: "
            "pass the original model to verify()"
        )
    example = _named_inputs(pipeline, own_example if example is None else example)
    sides = Sides(pipeline.graph, pipeline.plan, pipeline.programs, example, original, reference)
    return verify(sides, tensors, tolerance=tolerance)


def _beside(model: nn.Module, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Returns tensors on the model's device: those that were loaded or made up are on the CPU."""
    own = next((t for t in (*model.parameters(), *model.buffers()) if not t.is_meta), None)
    return tensors if own is None else {name: tensor.to(own.device) for name, tensor in tensors.items()}


def _named_inputs(pipeline: Pipeline, example: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    inputs = pipeline.graph.inputs
    require_kind("example", example, Mapping, "a dict of tensors, by the names of the inputs,")
    if not inputs.keys() <= example.keys():
        found = ", ".join(example) or "nothing"
        raise InputError(f"example has {found}; the model's inputs were expected: {', '.join(inputs)}")
    for name in inputs:
        require_kind(f"example[{name!r}]", example[name], Tensor, "a tensor")
    if pipeline.batch_layout is not None:
        pipeline.batch_layout.cut({name: example[name] for name in inputs}, 1)  # refuses other batch sizes
    return {name: example[name] for name in inputs}


def _plain_arguments(pipeline: Pipeline, model: nn.Module) -> Mapping[str, Tensor]:
    """Returns the example inputs as keyword arguments of the model's forward."""
    assert pipeline.example is not None
    accepted = set(forward_signature(model).parameters)
    if pipeline.batch_layout is not None and pipeline.batch_layout.has_targets:
        accepted -= {TARGETS}  # the forward's own argument, not what loss_fn compares with
    strange = sorted(pipeline.example.keys() - accepted)
    if strange:
        raise InputError(
            f"input {strange[0]!r} is no argument of {type(model).__name__}.forward; either it is not "
            "the model that was split, or pass example_args, example_kwargs and loss_fn as they were then"
        )
    return pipeline.example
