"""The whole compiler on one screen: `split` calls the passes in their order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from torch import Tensor, nn
from torch.export import ExportedProgram

from pd2bw_fx.arguments import require_choice, with_known_options
from pd2bw_fx.cluster import Cluster
from pd2bw_fx.constraints import Constraints
from pd2bw_fx.costs import Costs, MemoryModel
from pd2bw_fx.errors import InputError
from pd2bw_fx.modes import asking_for_mode, has_one_mode
from pd2bw_fx.pipeline import Pipeline
from pd2bw_fx.plan import Plan, Progress
from pd2bw_fx.program import one_at_a_time

from .coarsen import coarsen
from .codegen import generate
from .plan_request import PlanRequest
from .schedule import check_method, registered_method, schedule_of
from .split_onnx import takes_onnx_too
from .trace.eager_run import blaming_the_model
from .trace_and_profile import Inputs, Pricing, ProfiledModel, profile_of_pipeline, trace_and_profile
from .verify import (
    Sides,
    another_example,
    draws_in_evaluation,
    evaluation_of,
    note_on_fast_path,
    note_on_sums,
)

_UPDATES_SHOWN = 3


@takes_onnx_too
@with_known_options
@one_at_a_time
def split(
    model: nn.Module | ExportedProgram | Pipeline,
    example_args: Sequence[Any] | Tensor | None = None,
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    loss_fn: Callable[..., Tensor] | None = None,
    example_targets: Any = None,
    cluster: Cluster | int | str | Path | None = None,
    num_stages: int | Literal["auto"] | None = None,
    microbatches_per_update: int | None = None,
    method: str | None = None,
    chunks: int | None = None,
    replicas: int | Sequence[int] | Literal["auto"] | None = None,
    memory_model: MemoryModel | None = None,
    recompute: bool | Literal["auto"] = False,
    costs: Costs | Literal["auto", "measured", "analytic"] = "auto",
    profile_cache: bool = True,
    tracer: str = "auto",
    constraints: Constraints | None = None,
    plan: Plan | None = None,
    solver: str = "highs",
    max_gap: float = 1e-4,
    time_limit_s: float = 60.0,
    progress: Callable[[Progress], None] | None = None,
    check: bool | Literal["fast", "full"] = "fast",
) -> Pipeline:
    """Splits a model into pipeline stages: trace, profile, partition, generate, check.

    What is split:

    - `model`: a module; a `torch.fx.GraphModule` or ExportedProgram, taken as it is; the path of an ONNX
      file, split for inference with the options of `split_onnx`; or a Pipeline, which is planned again for
      another method or cluster without being traced and profiled a second time. The pipeline shares the
      model's tensors until it is trained or loaded. A model on the meta device gets its values later
      (`Pipeline.load_state_dict`).
    - `example_args`, `example_kwargs`: one microbatch, as the model's forward takes it. By default the
      model's own (`example_inputs()`, or `dummy_inputs` of a Hugging Face model). Without any, the model is
      traced symbolically, and costs are estimated from its parameters.
    - `loss_fn(output, targets)`, `example_targets`: compute the loss outside of the model. A loss that needs
      no targets is `loss_fn(output)`. By default the model returns its loss: as a scalar, as the entry `loss`
      of a dict or ModelOutput, or in a tuple as the first or the only scalar that has a gradient.
    - `tracer`: "auto" traces a program for any batch size. "export-sequence" leaves the length of token
      sequences open too, where the model allows it. A Python condition on values of tensors is refused,
      unless it is an `assert` or leads to a `raise`; "export-as-example" traces the branch that the example
      takes, and the stages assert that they are on it. `trace_report` tells what was decided.

    How it is planned:

    - `cluster`: a number of equal local devices (GPUs if there are enough, else CPU processes), a Cluster, or
      the path of a TOML file. By default the devices of this machine.
    - `num_stages`: one for each device by default, or "auto" for the fastest number, which may leave devices
      idle. `chunks`: the stages on each device under "interleaved", two by default.
    - `replicas`: the devices that share the microbatches of each stage: one number for all stages, one for
      each, or "auto" for the fastest (pipedream). Needs equal devices and links.
    - `microbatches_per_update`: over all replicas; by default two for each device in use, or one where the
      method updates after each microbatch.
    - `method`: a name in `passes.schedule.METHODS`; "2bw", or the plan's, by default.
    - `memory_model`: what optimizer and weight versions take; by default Adam, and the method's own versions
      and microbatches in flight. `recompute`: whether stages run their forward again in the backward.
    - `constraints`: pin operators and modules, keep them together, or cap a device's memory.
    - `costs`: measured on this machine by default, estimated from arithmetic and bytes ("analytic"), or those
      of another pipeline of this model. Measured times are cached by operator, shapes, device and torch
      version, unless `profile_cache` is False.
    - `solver`, `max_gap`, `time_limit_s`: the integer program's solver, the gap to prove, and when to stop
      with the best plan so far, as Ctrl-C does. `progress` is called with each step of the search.
    - `plan`: a plan that exists (`Plan.loads`), for instance edited. It is checked and priced, not solved,
      and other arguments must agree with it.

    How it is checked: `check="fast"` (or True) compares loss, gradients and buffers of the stages with the
    model's on the example inputs, and their outputs in evaluation. "full" also compares on other values, and
    at another batch size and length where these are open. With False no stage is run, unless one draws random
    numbers other than for dropout: it must not draw in evaluation where the model does not.

    Raises InputError for impossible arguments, TraceError naming the line that cannot be traced,
    ClusterError, SolverError for a solver that is unknown or not installed, PlanMismatchError for a `plan` of
    another model, InfeasibleError if no assignment fits in memory, VerificationError if the stages are wrong.
    """
    chosen = Cluster.of(cluster)
    request = PlanRequest(
        cluster=chosen,
        method=method,
        num_stages=num_stages,
        microbatches_per_update=microbatches_per_update,
        chunks=chunks,
        replicas=replicas,
        memory_model=memory_model or MemoryModel(),
        recompute=recompute,
        constraints=constraints,
        plan=plan,
        solver=solver,
        max_gap=max_gap,
        time_limit_s=time_limit_s,
        progress=progress,
    )
    require_choice("check", check, "fast", "full", True, False)
    inputs = Inputs(example_args, example_kwargs, loss_fn, example_targets, tracer)
    pricing = Pricing(costs, chosen.devices[0], profile_cache, chosen.threads_each)
    if isinstance(model, Pipeline):
        known = profile_of_pipeline(model, inputs, pricing)
    else:
        known = trace_and_profile(model, inputs, pricing)
    plan, shape = request.plan_and_shape(coarsen(known.graph, known.costs, chosen))
    schedule = schedule_of(plan.method, shape, updates=range(_UPDATES_SHOWN), drain=True)
    if registered_method(plan.method) is not None:
        check_method(plan.method, shape)  # tests hold ours to their rules
    pipeline = Pipeline(
        graph=known.graph,
        costs=known.costs,
        cluster=chosen,
        plan=plan,
        schedule=schedule,
        programs=generate(known.graph, plan),
        tensors=known.tensors,
        batch_layout=known.batch_layout,
        example=known.example,
        trace_report=known.trace_report,
        reference=known.reference,
        planning_options=request.explain_options(plan, shape),
    )
    _check(pipeline, known, check, is_new=not isinstance(model, Pipeline))
    return pipeline


def _check(pipeline: Pipeline, known: ProfiledModel, check: bool | str, *, is_new: bool) -> None:
    """Compares the stages with the model, and adds what it finds to the report.

    Evaluation is compared where the model is new, and not a pipeline that was checked before.
    Raises VerificationError.
    """
    if check and any(tensor.is_meta for tensor in pipeline.tensors().values()):
        _tell_of_the_meta_device(pipeline)
        return
    compares = bool(check) and known.reference is not None
    example = known.example if compares else None
    if example is not None:
        with blaming_the_model(known.graph.model_name, known.reference, example):
            pipeline.verify()
    if pipeline.graph.root is not None and has_one_mode(pipeline.graph.root):
        _tell_of_the_one_mode(pipeline)
    elif is_new and (compares or draws_in_evaluation(known.graph)):
        _tell_of_evaluation(pipeline)
    if example is not None and is_new:
        _tell_of_own_ways(pipeline)
    if example is not None and check == "full":
        try:
            _check_on(pipeline, known, another_example(known.graph, example))
        except InputError:  # the model does not take all values everywhere
            _check_on(pipeline, known, another_example(known.graph, example, by_column=True))


def _check_on(pipeline: Pipeline, known: ProfiledModel, other: Mapping[str, Tensor]) -> None:
    with blaming_the_model(known.graph.model_name, known.reference, other, **_OF_A_FULL_CHECK):
        pipeline.verify(example=other)


def _tell_of_the_meta_device(pipeline: Pipeline) -> None:
    if pipeline.trace_report is not None:
        note = (
            "weights on the meta device have no values: the stages were not compared with the model. "
            "load_state_dict gives them, and verify(model) compares"
        )
        notes = (*pipeline.trace_report.notes, note)
        pipeline.trace_report = replace(pipeline.trace_report, notes=notes)


_OF_A_FULL_CHECK = {
    "inputs": "other values of the inputs and another batch size, which check='full' makes up",
    "advice": "if it need not take all values, check='fast' compares on the example inputs alone",
}


def _tell_of_the_one_mode(pipeline: Pipeline) -> None:
    """Adds to the report that an exported program that draws or keeps statistics has no evaluation mode."""
    assert pipeline.trace_report is not None
    operators = pipeline.graph.operators.values()
    if any(operator.is_random or operator.writes_buffers for operator in operators):
        told = "a program that was exported already has one mode alone: split the model itself to evaluate"
        pipeline.trace_report = replace(pipeline.trace_report, evaluation=told)


def _tell_of_own_ways(pipeline: Pipeline) -> None:
    """Adds to the report what the model returns otherwise where torch takes a way of its own, and sums."""
    model, report, example = pipeline.graph.root, pipeline.trace_report, pipeline.example
    if model is None or pipeline.reference is None or report is None or example is None:
        return
    sides = Sides(pipeline.graph, pipeline.plan, pipeline.programs, example, model, pipeline.reference)
    tensors, m = pipeline.tensors(), pipeline.plan.microbatches_per_update
    notes = (note_on_fast_path(sides, tensors), note_on_sums(sides, tensors, m) if m > 1 else "")
    pipeline.trace_report = replace(report, notes=(*report.notes, *filter(None, notes)))


def _tell_of_evaluation(pipeline: Pipeline) -> None:
    """Adds to the report what the stages of a model in training mode do otherwise than it in evaluation."""
    model, report, example = pipeline.graph.root, pipeline.trace_report, pipeline.example
    if model is None or not model.training or pipeline.reference is None or report is None:
        return
    if example is None or any(tensor.is_meta for tensor in pipeline.tensors().values()):
        return
    sides = Sides(pipeline.graph, pipeline.plan, pipeline.programs, example, model, pipeline.reference)
    found = evaluation_of(sides, pipeline.tensors())
    pipeline.trace_report = report = replace(report, training_writes=found.writes)
    if not found.differs:
        return
    asking = asking_for_mode(model)
    asks = f"; {' and '.join(asking)} ask{'' if len(asking) > 1 else 's'} for the mode" if asking else ""
    told = (
        f"in evaluation mode {found.differs}{asks}. A trace has the branch of the mode that the model is in: "
        "split model.eval() to evaluate"
    )
    pipeline.trace_report = replace(report, evaluation=told)
