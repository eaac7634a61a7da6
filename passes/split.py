"""The whole compiler on one screen: the passes in their order."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from torch import Tensor, nn
from torch.export import ExportedProgram

from pd2bw_fx.arguments import require_choice
from pd2bw_fx.cluster import Cluster
from pd2bw_fx.constraints import Constraints
from pd2bw_fx.costs import Costs, MemoryModel
from pd2bw_fx.modes import asking_for_mode, has_one_mode
from pd2bw_fx.pipeline import Pipeline
from pd2bw_fx.plan import Plan, Progress
from pd2bw_fx.program import one_at_a_time

from .coarsen import coarsen
from .codegen import generate
from .plan_request import PlanRequest
from .schedule import check_schedule, registered_method, schedule_of
from .split_onnx import takes_onnx_too
from .trace.eager_run import blaming_the_model
from .trace_and_profile import Inputs, Pricing, profile_of_pipeline, trace_and_profile
from .verify import another_example, draws_in_evaluation, evaluation_of, note_on_fast_path

_UPDATES_SHOWN = 3


@takes_onnx_too
@one_at_a_time
def split(
    model: nn.Module | ExportedProgram | Pipeline,
    example_args: Sequence[Any] | Tensor | None = None,
    example_kwargs: Mapping[str, Any] | None = None,
    *,
    loss_fn: Callable[[Any, Any], Tensor] | None = None,
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
    """Split a model into pipeline stages: trace, profile, partition, generate, check.

    The example inputs are one microbatch, as the model's forward takes them; left out, the model's own
    (`example_inputs()`, or `dummy_inputs` of a Hugging Face model); without any, symbolic tracing and costs
    estimated from parameters, which the result says. The model returns its loss (a scalar, the entry `loss`
    of a dict or ModelOutput, in a tuple the first or the only scalar that has a gradient), or
    `loss_fn(output, targets)` computes it, with `example_targets` beside the example inputs.

    In place of the model may stand a `torch.fx.GraphModule` or an ExportedProgram (with the example inputs
    that it has), which are taken as they are; the path of an ONNX file, which is split for inference with the
    options of `split_onnx`; or a Pipeline that was split here, which is planned again, for another method or
    cluster, and neither traced nor profiled a second time.

    The pipeline has the model's own tensors until it is trained or loaded: what changes them in place changes
    both. A model on the meta device is given its values afterwards (`Pipeline.load_tensors`).

    Any batch size can be run later; of a model that asks for it in Python, all with the example's answer;
    with `tracer="export-sequence"` any length of token sequences too, where the model allows it, which
    `trace_report` says. A Python condition on the values of tensors is refused, unless it is an `assert` or
    leads to a `raise`, or `tracer="export-as-example"` allows it: then the way that the example inputs take
    is traced, and the stages assert that it is theirs.

    `cluster` is a count of equal local devices (GPUs if there are so many, else CPU processes), a Cluster or
    the path of a TOML file; left out, what this machine has. `constraints` pin operators and modules, keep
    them whole, or cap a device's memory. `plan` is one that is there already, edited perhaps
    (`Plan.loads`): it is checked and priced, not solved, and other arguments must agree with it.
    The solver proves the plan to within `max_gap` or stops after `time_limit_s`; `progress`
    hears how it stands, and Ctrl-C takes the best plan so far.

    There is a stage for every device unless `num_stages` says otherwise: a number, or "auto" for the fastest
    one, which leaves devices out that only slow the pipeline down.

    `method` is a name in `passes.schedule.METHODS`, "2bw" (or the plan's) unless said; `chunks` are the
    stages on each device of "interleaved" (two unless said), which has `num_stages` in all. `replicas` are
    the devices that run each stage, taking its microbatches in turn: as many for all, a number for each, or
    "auto" for the fastest (pipedream), on devices and links that are alike. The memory of the method's weight
    versions and of its activations in flight is planned for, with Adam's state, unless `memory_model` says
    otherwise.

    `costs` are measured on this machine where there is something to run, or estimated ("analytic") from each
    operator's arithmetic and bytes, or those of another pipeline of this model. Measured times are kept in
    the user's cache directory, by operator, shapes, device and torch version, unless `profile_cache=False`.
    `check="fast"` (or True) compares loss, gradients and buffers of the stages with the model's on the
    example inputs, and what they give in evaluation, "full" also on other values, in a batch of another size
    and of another length where they are open. With False no stage is run, but where some draw random numbers
    by something else than dropout: whether the model does so in evaluation, too, is asked.

    Raises InputError for arguments that cannot be, TraceError naming the line that cannot be traced,
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
        check_schedule(schedule)  # those of ours are held to their rules by tests
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
    if check and any(tensor.is_meta for tensor in pipeline.tensors().values()):
        _tell_of_the_meta_device(pipeline)
        return pipeline
    check = check if known.reference is not None else False
    if check and known.example is not None:
        with blaming_the_model(known.graph.model_name, known.reference, known.example):
            pipeline.verify()
    if pipeline.graph.root is not None and has_one_mode(pipeline.graph.root):
        _tell_of_the_one_mode(pipeline)
    elif not isinstance(model, Pipeline) and (check or draws_in_evaluation(known.graph)):
        _tell_of_evaluation(pipeline)
    if check and known.example is not None and not isinstance(model, Pipeline):
        _tell_of_the_fast_path(pipeline)
    if check == "full" and known.example is not None:
        other = another_example(known.graph, known.example)
        with blaming_the_model(known.graph.model_name, known.reference, other, **_OF_A_FULL_CHECK):
            pipeline.verify(example=other)
    return pipeline


def _tell_of_the_meta_device(pipeline: Pipeline) -> None:
    if pipeline.trace_report is not None:
        note = (
            "weights on the meta device have no values: the stages were not compared with the model. "
            "load_tensors gives them, and verify(model) compares"
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


def _tell_of_the_fast_path(pipeline: Pipeline) -> None:
    """Adds to the report what the model returns otherwise where torch takes a way of its own."""
    model, report, example = pipeline.graph.root, pipeline.trace_report, pipeline.example
    if model is None or pipeline.reference is None or report is None or example is None:
        return
    note = note_on_fast_path(
        pipeline.graph,
        pipeline.programs,
        pipeline.tensors(),
        example,
        model=model,
        forward=pipeline.reference,
    )
    if note:
        pipeline.trace_report = replace(report, notes=(*report.notes, note))


def _tell_of_evaluation(pipeline: Pipeline) -> None:
    """Adds to the report what the stages of a model in training mode do otherwise than it in evaluation."""
    model, report = pipeline.graph.root, pipeline.trace_report
    if model is None or not model.training or pipeline.reference is None or report is None:
        return
    if pipeline.example is None or any(tensor.is_meta for tensor in pipeline.tensors().values()):
        return
    found = evaluation_of(
        pipeline.graph,
        pipeline.plan,
        pipeline.programs,
        pipeline.tensors(),
        pipeline.example,
        model=model,
        forward=pipeline.reference,
    )
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
