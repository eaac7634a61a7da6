"""The pipeline: every result of `split`, and what can be done with it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Unpack

from torch import Tensor, nn

from pd2bw_fx.actions import RunRequest, Shape
from pd2bw_fx.arguments import (
    options_of,
    plain,
    require_choice,
    require_kind,
    require_known_options,
    require_path,
    require_whole_number,
    with_known_options,
)
from pd2bw_fx.cluster import Cluster
from pd2bw_fx.costs import Calibration
from pd2bw_fx.errors import ExportError, InputError
from pd2bw_fx.explanation import Explanation
from pd2bw_fx.files import writing
from pd2bw_fx.folder import read_pipeline, require_plan_of_stages, save_pipeline
from pd2bw_fx.metrics import Metrics
from pd2bw_fx.passes.check_given_plan import check_given_plan
from pd2bw_fx.passes.coarsen import coarsen
from pd2bw_fx.passes.export_onnx import EXTERNAL_ABOVE_BYTES, Form, Original, export_onnx
from pd2bw_fx.passes.partition import explain
from pd2bw_fx.passes.schedule import Placing, keeping, keeping_copies, method_of
from pd2bw_fx.passes.simulate import calibrate, simulate
from pd2bw_fx.passes.verify import Verification
from pd2bw_fx.plan import Plan
from pd2bw_fx.report import Part, is_page
from pd2bw_fx.report.notebook import pipeline_html
from pd2bw_fx.report.page import page_html
from pd2bw_fx.report.parts import picture_of
from pd2bw_fx.report.picture import Picture
from pd2bw_fx.report.table import plan_table
from pd2bw_fx.runtime.engine import Engine
from pd2bw_fx.runtime.local import train_local
from pd2bw_fx.runtime.local_run import TrainResult
from pd2bw_fx.runtime.options import LocalOptions, RankOptions
from pd2bw_fx.simulation import shape_for, simulate_pipeline, simulated_peak_bytes
from pd2bw_fx.split_model import SplitModel
from pd2bw_fx.state import require_values
from pd2bw_fx.timeline import Timeline

if TYPE_CHECKING:
    from torch.optim import Optimizer

_UPDATES_COMPARED = 8  # enough for a steady state


class Pipeline(SplitModel):
    """A model split into stages. Print it to see the plan; `stages[i].source` is the code of one stage.

    Its attributes are `graph`, `costs`, `cluster`, `plan`, `schedule`, `stages`, `programs` and
    `trace_report` (None for a pipeline that was not made of a traced model). Only the weights ever change:
    training replaces them, and `state_dict()` returns them under the original model's names.
    """

    def explain(self, **options: Any) -> Explanation:
        """Explains the plan: each cut and the next best one, which constraints bind, what would help.

        Every alternative is planned again on the same costs. `options` are those of
        `passes.partition.explain` (`time_limit_s`, `max_gap`, ..).

        Raises InputError for another option, and for a method with several stages on a device.
        """
        if method_of(self.plan.method).placing in (Placing.ROUND, Placing.BOTH_WAYS):
            raise InputError(
                f"{self.plan.method} has several stages on a device, and explain is for plans with one; "
                "explain the plan of 1f1b, which cuts by the same rules"
            )
        require_known_options("explain", options, options_of(explain))
        problem = coarsen(self.graph, self.costs, self.cluster)
        method = self.plan.method
        kept = keeping(method, self.shape()) if self.plan.replicas is None else keeping_copies(method)
        return explain(self.plan, problem, self.cluster, **{"kept": kept, **self.planning_options, **options})

    @with_known_options
    def check_plan(self, plan: Plan) -> Plan:
        """Returns another plan for this model, edited by hand say, with its costs on this cluster.

        The memory model and the constraints are those that the pipeline was split with. Raises
        PlanMismatchError, InfeasibleError and InputError for an impossible plan, as `split(plan=..)` does.
        """
        require_kind("plan", plan, Plan, "a Plan (Plan.loads(text) reads one)")
        problem = coarsen(self.graph, self.costs, self.cluster)
        known = self.planning_options
        priced_with = {name: known[name] for name in ("memory_model", "constraints") if name in known}
        return check_given_plan(plan, problem, self.cluster, **priced_with)

    @with_known_options
    def verify(
        self,
        model: nn.Module | None = None,
        *,
        example_args: Sequence[Any] | Tensor = (),
        example_kwargs: Mapping[str, Any] | None = None,
        loss_fn: Callable[..., Tensor] | None = None,
        example_targets: Any = None,
        example: Mapping[str, Tensor] | None = None,
        tolerance: float | None = None,
    ) -> Verification:
        """Compares the stages with the original model: outputs, every gradient and every buffer.

        The stages run one after another, on the same inputs as the model. A pipeline that was loaded does not
        have the model: pass it, and, where its inputs are not plain arguments of its forward, the example
        arguments and the loss_fn that it was split with. The model is given the pipeline's weights for the
        comparison and gets its own back afterwards. `example` holds other inputs to compare on, by their
        names in `graph.inputs`.

        `tolerance` is relative to each tensor's largest entry. None allows what suits the type (equal bits
        are expected, 1e-12 in float64 is allowed), or four times the change in the model's own results when
        its weights are rounded.

        Raises VerificationError naming the first tensor that differs by more, and InputError where the model
        is needed and missing, or arguments for it are given without it.
        """
        from pd2bw_fx.verification import verify_pipeline  # with the tracer, which nothing else here needs

        return verify_pipeline(
            self,
            model,
            example_args=example_args,
            example_kwargs=example_kwargs,
            loss_fn=loss_fn,
            example_targets=example_targets,
            example=example,
            tolerance=tolerance,
        )

    @with_known_options
    def save(self, folder: str | Path) -> None:
        """Writes sources, weights (safetensors), plan and schedule (JSON) and a manifest with hashes.

        The folder appears only when it is complete. A folder that `save` wrote before is written anew, and
        other files in it stay. Raises InputError for a folder that is not a pipeline's, or that was edited by
        hand since.
        """
        save_pipeline(self, folder)

    @with_known_options
    def export_onnx(
        self,
        folder: str | Path,
        *,
        form: Form = "stages",
        opset: int = 20,
        training: bool = False,
        tolerance: float | None = None,
        external_above_bytes: int = EXTERNAL_ABOVE_BYTES,
    ) -> dict[str, Any]:
        """Writes ONNX files and `manifest.json`, which says what connects to what; returns the manifest.

        `form` is "stages", one file a stage; "annotated", the whole model in one file with every node's stage
        in the standard's multi-device annotation (IR version 11); or "both". `training` exports batch norm as
        it computes in training; a model that draws random numbers in training (dropout) is refused.
        `tolerance` is how far results may be apart, relative to a tensor's largest entry (None: what suits
        its type). A file with more than `external_above_bytes` of parameters has them in another file.

        Before the folder appears, the files run in onnxruntime, one after another and at two batch sizes, and
        are compared with the stages and, if the pipeline has it, the original model. Raises ExportError, and
        leaves nothing, if they differ or cannot be written.
        """
        require_choice("training", training, True, False)
        require_whole_number("external_above_bytes", external_above_bytes, least=0)
        if self.example is None:
            raise InputError("exporting needs shapes: split the model with example_args")
        require_values(self.graph, self._tensors)
        told = "" if training or self.trace_report is None else self.trace_report.evaluation
        if told:
            raise ExportError(f"the stages are not for evaluation: {told}, or export with training=True")
        return export_onnx(
            self.programs,
            [stage.module for stage in self._built()],
            self.example,
            folder,
            original=Original(self.graph, self.plan, self.graph.root, self.reference),
            form=form,
            opset=plain(opset),
            training=training,
            tolerance=plain(tolerance),
            external_above_bytes=plain(external_above_bytes),
        )

    def simulate(
        self,
        *,
        method: str | None = None,
        microbatches_per_update: int | None = None,
        num_updates: int | None = None,
        slack: float | Literal["auto"] = 0.0,
        replicas: int | Sequence[int] | None = None,
        vertical_sync: bool = False,
        cluster: Cluster | int | str | Path | None = None,
        **options: Any,
    ) -> Timeline:
        """Simulates the plan's stages under the pipeline's own schedule, or another one.

        `slack` is the engine's (see `Engine.from_pipeline`), but its default is 0, with which the plan counts
        memory. `replicas` is the number of ranks of each stage, one number for all or one each, on devices
        like those of the plan. `method="ddp"` joins the stages and puts a copy of the whole on each device of
        the plan. `cluster` may have other links than the one that was planned for. `options` are those of
        `passes.simulate.simulate` (`links`, `jitter`, `seed`, `update_s`, and `calibration`: what the engine
        takes besides the operators, see `calibration`).

        Raises InputError for an unknown option, an impossible schedule, such as fewer microbatches than
        stages for 2bw, or a method that needs another plan (interleaved).
        """
        own = [*options_of(Pipeline.simulate), *options_of(simulate)]
        require_known_options("simulate", options, [name for name in own if name != "trainable_bytes"])
        return simulate_pipeline(
            self,
            RunRequest(method, microbatches_per_update, slack, replicas, vertical_sync),
            num_updates=num_updates,
            cluster=self.cluster if cluster is None else Cluster.of(cluster),
            **options,
        )

    def calibration(self, *timelines: Timeline | None) -> Calibration:
        """Returns how measured runs of this pipeline differ from its profile, for `simulate` of any method.

        `timelines` come from `TrainResult.metrics` or `Engine.records`, recorded (`record=4`) under methods
        with one stage on a rank: 1f1b, say, and zb-h1 if zero-bubble methods are to be simulated. Raises
        InputError for None, which `Metrics.timeline` is where nothing was recorded.
        """
        recorded = [timeline for timeline in timelines if timeline is not None]
        if len(recorded) < len(timelines):
            raise InputError("a timeline is None: nothing was recorded of that run; train with record=8, say")
        return calibrate(self.plan, recorded)

    def peak_memory_bytes(self, timeline: Timeline) -> tuple[int, ...]:
        """Returns what each rank of a timeline from `simulate` holds at its worst moment.

        That is the plan's sizes times the weight versions and microbatches that the timeline has at one time.
        The timeline must have three updates or more.
        """
        return simulated_peak_bytes(self, timeline)

    def shape(self, request: RunRequest | None = None) -> Shape:
        """Returns what the schedule is built for, as planned, or as a request asks for.

        For a request that differs from the plan, zb-auto searches for its order with the plan's times.
        """
        return shape_for(self, request or RunRequest(), self.plan)

    @with_known_options
    def report(self, path: str | Path, *, metrics: Metrics | None = None) -> None:
        """Writes one HTML page that needs no network: the plan, its graph, its time and memory, its code.

        `metrics` (of `TrainResult`, or `Metrics.load(folder)`) are shown beside the predictions.
        Raises InputError for a name that does not end with .html, and where the file cannot be written.
        """
        require_path("path", path)
        if not is_page(Path(path)):
            raise InputError(
                f"path is {str(path)!r}; the page is HTML: a name that ends with .html was expected"
            )
        page = page_html(
            self.graph, self.costs, self.plan, self.programs, self._timeline_of(metrics), metrics=metrics
        )
        with writing(path) as file:
            file.write_text(page, encoding="utf-8")

    @with_known_options
    def draw(self, part: Part, path: str | Path | None = None, *, metrics: Metrics | None = None) -> Picture:
        """Returns one of the report's pictures, which a notebook shows, and writes it to `path`, if given.

        `part` is "graph", "timeline", "time" or "memory", or, for the metrics of a training run, "measured"
        or "loss". `path` ends with .svg or .png, for timelines also with .json (for Perfetto).

        Raises InputError for another part or file type, where "measured" or "loss" has no `metrics`, and
        where the file cannot be written.
        """
        timeline = self._timeline_of(metrics)
        drawn = picture_of(part, graph=self.graph, plan=self.plan, timeline=timeline, metrics=metrics)
        if path is not None:
            drawn.save(path)
        return drawn

    def _timeline_of(self, metrics: Metrics | None) -> Timeline:
        """Returns the simulated timeline, with the method and sizes of the measured run if there is one."""
        if metrics is None:
            return self.simulate()
        require_kind("metrics", metrics, Metrics, "a Metrics (of a TrainResult, or Metrics.load(folder))")
        return self.simulate(
            method=metrics.method,
            microbatches_per_update=metrics.microbatches_per_update,
            replicas=metrics.replicas,
            num_updates=_UPDATES_COMPARED,
            slack="auto",
        )

    @with_known_options
    def engine(
        self,
        *,
        optimizer: Callable[[Any], Optimizer],
        microbatches_per_update: int | None = None,
        method: str | None = None,
        **options: Unpack[RankOptions],
    ) -> Engine:
        """Returns the engine that trains this rank's part, under torchrun with one process a rank.

        A rank has one stage, unless the method gives it several (chunks) or several ranks have copies of it.
        `engine.step(batch) -> loss` trains one update, `engine.eval(batch)` evaluates the newest weights,
        `engine.flush()` drains the pipeline. The pipeline of rank 0 is the one that is trained. `options` are
        those of `Engine.from_pipeline`: `lr_scheduler`, `parameter_options`, `max_gradient_norm`, `slack`,
        `device`, `timeout_s` and others.
        """
        return Engine.from_pipeline(
            self,
            optimizer=optimizer,
            microbatches_per_update=microbatches_per_update,
            method=method or self.plan.method,
            **options,
        )

    @with_known_options
    def train_local(
        self,
        batches: Iterable[Any],
        *,
        optimizer: Callable[[Any], Optimizer],
        microbatches_per_update: int | None = None,
        method: str | None = None,
        **options: Unpack[LocalOptions],
    ) -> TrainResult:
        """Trains on this machine with one local process a rank: one update for each batch, then a flush.

        It works from a plain script or a notebook. The pipeline has the trained weights afterwards, also
        where a batch was wrong, `on_update` raised an error or returned False, or Ctrl-C was pressed. Every
        call begins with a new optimizer and with the seed's first random numbers: give it the batches of all
        epochs. No process outlives the call.

        `options` are those of `Engine.from_pipeline` (`lr_scheduler`, `max_gradient_norm`, .., but not
        `silence_s`: workers are always watched) and of `runtime.local.train_local` (`on_update`, `seed`,
        `threads_per_worker`). `on_update(update, loss)` is called in this process as losses come back; where
        it returns False, no further batch is asked for. `on_report` is called in every worker, on a copy of
        it, so that only what it writes or prints has an effect. `threads_per_worker` is an equal share of
        the cores by default.

        Raises InputError for a pipeline without a loss, for a batch that does not fit, and where `batches` is
        empty or a single batch. Raises WorkerError with the failing rank's own error, and leaves the weights
        as they were.
        """
        result = train_local(
            self,
            batches,
            optimizer=optimizer,
            microbatches_per_update=microbatches_per_update,
            method=method,
            **options,
        )
        self._take(result.tensors)
        return result

    def __str__(self) -> str:
        notes = () if self.trace_report is None else self.trace_report.notes
        return "\n".join(
            [plan_table(self.graph, self.costs, self.plan), *(f"traced: {note}" for note in notes)]
        )

    def _repr_html_(self) -> str:
        """Returns what a notebook shows: the plan, the timeline of the schedule, and each device's memory."""
        return pipeline_html(self.graph, self.costs, self.plan, self.simulate())

    def __repr__(self) -> str:
        return f"<Pipeline of {self.graph.model_name}: {self.plan.num_stages} stages>"


@with_known_options
def load(folder: str | Path, *, edited: bool = False) -> Pipeline:
    """Loads a pipeline that `Pipeline.save` wrote; it does not need the original model's code.

    Files are checked against the manifest's hashes first; `edited=True` accepts stages changed by hand. A
    plan that was changed needs other stages: give it to `split`. Raises InputError where there is no folder,
    and PlanMismatchError naming the file that is missing, altered, or made for another model.
    """
    read = read_pipeline(folder, edited=edited)
    require_plan_of_stages(folder)
    return Pipeline(**read)
