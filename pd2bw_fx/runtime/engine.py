"""The engine of one rank: batches in, losses out, and between them the actions of a method's schedule.

torchrun --nproc-per-node 2 train.py          every rank runs the same script:

pipe = pd2bw_fx.split(model, example_args, cluster=2)
engine = pipe.engine(optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-4))
for batch in batches:                         the same batches on every rank; each stage takes its part
    loss = engine.step(batch)
engine.flush()
"""

from __future__ import annotations

import atexit
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

import torch.distributed as dist
from torch import Tensor

from pd2bw_fx.actions import RunRequest
from pd2bw_fx.arguments import require_path, with_known_options
from pd2bw_fx.errors import InputError, WorkerError
from pd2bw_fx.metrics import Record
from pd2bw_fx.runtime.checkpoint import Checkpoint, Header, restore_random_state, save
from pd2bw_fx.runtime.engine_parts import EngineParts, close_at_exit
from pd2bw_fx.runtime.failure import name_peer_in_errors, share_failure
from pd2bw_fx.runtime.inference import ordinary_tensors, require_own_precision
from pd2bw_fx.runtime.job import merged_tensors
from pd2bw_fx.runtime.launcher import tell_launcher_of_errors
from pd2bw_fx.runtime.loss import Loss
from pd2bw_fx.runtime.optimizing import OptimizerFactory
from pd2bw_fx.runtime.options import EngineOptions
from pd2bw_fx.runtime.results import joined
from pd2bw_fx.runtime.stage_runner import Microbatch, sizes_of
from pd2bw_fx.runtime.world import World, collected, job_of_this_rank
from pd2bw_fx.units import counted, were

if TYPE_CHECKING:
    from pd2bw_fx.pipeline import Pipeline


class Engine(EngineParts):
    """Trains the stages of one rank of a pipeline; the other ranks have engines for the other stages.

    Every call is made on all ranks, in the same order.
    """

    @classmethod
    @with_known_options
    def from_pipeline(
        cls,
        pipeline: Pipeline | None,
        *,
        optimizer: OptimizerFactory,
        microbatches_per_update: int | None = None,
        method: str | None = None,
        slack: float | Literal["auto"] = "auto",
        replicas: int | tuple[int, ...] | None = None,
        vertical_sync: bool = False,
        silence_s: float = 8.0,
        **options: Any,
    ) -> Self:
        """Makes this rank's engine for rank 0's pipeline; other ranks may have split it too, or pass None.

        It joins the process group that torchrun describes, unless one is initialised already.

        What is trained, and how:

        - `optimizer` makes a torch optimizer from this rank's parameters, `lr_scheduler` a scheduler from the
          optimizer. Both step once an update; where fp16 leaves an update out, neither does.
          `parameter_options(name, parameter)` returns the options of a parameter's group, such as
          `{"weight_decay": 0.0}`, by its name in the model.
        - `max_gradient_norm` clips an update's gradient by the norm over the whole model.
        - `precision` "bf16" or "fp16" computes under autocast and keeps the weights in their own type; "fp16"
          has a loss scale, like torch.amp.GradScaler's. A cast of the model's own that does nothing without
          autocast, such as `.float()` in float32, is in the stages if it does something under autocast.
        - `weight_average` (a decay, such as 0.999) keeps an exponential moving average of the trained
          weights. It follows each update as torch.optim.swa_utils' `get_ema_multi_avg_fn(decay)` does, and
          takes the memory of these weights once more. `averaged_state_dict` returns it; checkpoints have it.
        - `compile` has torch.compile compile the stages, once for all weight versions: True, or its options
          as a mapping, such as `{"mode": "max-autotune-no-cudagraphs"}`. A compiled stage draws (dropout) by
          the microbatch and the stage, so a run repeats on the same stages only.
        - `method` and `microbatches_per_update` (of the whole update, over all replicas) are the plan's by
          default.
        - `slack` (2bw, 1f1b) lengthens the warm-up to (d - 1 - s)(1 + slack) forwards. With more microbatches
          in flight, no stage waits for a gradient that is late. "auto" takes up to 1 for 2bw, as far as two
          weight versions and the devices' memory allow. It changes no result.
        - `replicas` is the number of ranks of each stage, one number for all or one each; the ranks of a
          stage share its microbatches.
        - `vertical_sync` (pipedream): all stages use a version that every one of them has.
        - `corrections` (pb, pipemare) compensate for the delay; they are in `pd2bw_fx.runtime.corrections`.
          The default is none for pb, and `PipeMare()` for pipemare.

        What is reported, and when a run ends:

        - `on_report` is called on every rank with an `UpdateReport` for each update in order, once its loss
          has arrived: 4 updates later, or as many as there are ranks if that is more.
        - `stop_at_nan` ends the run as many updates after a loss that is not finite. If it is False, "fp16"
          leaves such an update out.
        - `silence_s`: a rank that gives no sign of life for so long ends the ranks that wait for it (three
          times as long while engines are made; 0: never, and only `timeout_s` counts).
        - `timeout_s` (600 by default) is the longest wait for anything that another rank has to send.
        - `record` is the number of last calls that `records` tells of.

        Where it runs:

        - `seed` (None: torch's initial seed on rank 0) determines dropout and everything else that the model
          draws, together with the microbatch and the operator: a run repeats whatever the number of stages
          and replicas. torch's own generator is not used.
        - `device` is this rank's device, in place of the one that the plan names.
        - `backend` moves tensors between ranks. "auto" is nccl where every rank has a GPU of its own, else
          gloo, through the host's memory; nccl is impossible where ranks share a GPU.

        Raises InputError on every rank where the number of processes is not what the method needs, where the
        method cannot use the numbers (fewer microbatches than stages for 2bw), where the pipeline has no
        loss, or where ranks are given different options.
        """
        with tell_launcher_of_errors():
            chosen = EngineOptions.of({"optimizer": optimizer, **options}, "silence_s")
            request = RunRequest(method, microbatches_per_update, slack, replicas, vertical_sync)
            world = World(timeout_s=chosen.timeout_s, silence_s=silence_s)
        try:
            with world.watch, ordinary_tensors():
                with tell_launcher_of_errors():
                    job = job_of_this_rank(pipeline, request)
                with share_failure(
                    job.rank,
                    job.described(),
                    lambda: "making its engine",
                    world.watch.lost,
                    named=job.name_of,
                ):
                    engine = cls(job, chosen, request)
        except BaseException:
            world.leave()
            raise
        engine._calls.join(world, engine.job.name_of, engine.doing)
        atexit.register(close_at_exit, weakref.ref(engine))
        return engine

    def step(self, batch: Any) -> Loss:
        """Makes one update: cuts the batch into microbatches and sends them through the pipeline.

        `Microbatches` is a batch that the caller has cut, into parts whose sizes may differ. Returns the mean
        loss of the batch, under the weights that its forwards ran on. With 2BW the pipeline stays filled:
        when this returns, some of the batch's backwards and the update itself are still to come.

        Raises InputError for a batch that does not look like the example inputs, cannot be cut into
        `microbatches_per_update` parts, or differs from the other ranks', and under a torch.autocast where
        the engine has no `precision`; where all ranks refuse it, the engine is as before. From the third
        update on, a batch that differs ends the run when its loss has come, some updates later. Raises
        WorkerError with the reason of a rank that failed.
        """
        require_own_precision(self._precision)
        with self._calls.reading_a_batch(f"in update {self.updates}", self.updates):
            microbatches = self._batches.of_update(batch)
        return self.step_microbatches(microbatches)

    def step_microbatches(self, microbatches: Sequence[Microbatch]) -> Loss:
        """Makes one update from microbatches that are cut already and have at least this stage's inputs.

        Raises InputError for another number of them than an update has.
        """
        update, expected = self.updates, self.job.microbatches_per_update
        if (given := len(microbatches)) != expected:
            raise InputError(f"{counted(given, 'microbatch')} {were(given)} given; an update has {expected}")
        with self._calls.shared(f"in update {update}", on=sizes_of(microbatches)):
            self._add(microbatches, training=True)
            actions = self._actions.next_update()
            peers = self._actions.peer_actions() if self._groups.is_nccl else None
            self._runner.run(actions, peers)
            return self._told(self._losses.of_update(update))

    def eval(self, batch: Any) -> Loss:
        """Returns the loss under the newest weights, in evaluation mode and without gradients.

        Flushes first. A batch that cannot be cut into `microbatches_per_update` parts goes through whole;
        `Microbatches` go through as they are, and there may be any number of them. Raises InputError where
        the model computes something else in evaluation mode than what was traced.
        """
        return self.eval_microbatches(self._pieces(batch, ()))

    def eval_microbatches(self, microbatches: Sequence[Microbatch]) -> Loss:
        """`eval` on microbatches that are cut already and have at least this stage's inputs."""
        loss, _ = self._evaluated(microbatches)
        return loss

    def outputs(self, batch: Any, *names: str) -> dict[str, Tensor]:
        """Returns the model's outputs for a batch by name, on the CPU of every rank; with `names` only those.

        It runs in evaluation mode, like `eval`. The microbatches' outputs are joined along their batch
        dimension; of single floats the mean is taken. For any other output, a count for example, the batch
        goes through whole.
        """
        unknown = [name for name in names if name not in self.job.outputs]
        if unknown:
            known = ", ".join(map(repr, self.job.outputs))
            raise InputError(f"the model returns no {unknown[0]!r}; its outputs are {known}")
        wanted = names or tuple(self.job.outputs)
        microbatches = self._pieces(batch, wanted)
        self._results.keep(wanted)
        _, numbers = self._evaluated(microbatches)
        with self._calls.shared("collecting what the model returns"):
            everyone = collected(self._results.take(), self._control)
        return joined(self.job, everyone, numbers, wanted)

    def _pieces(self, batch: Any, wanted: Sequence[str]) -> list[Microbatch]:
        self._require_evaluation()
        require_own_precision(self._precision)
        self.flush()
        with self._calls.reading_a_batch("in an evaluation", self.updates):
            return self._batches.of_evaluation(batch, wanted)

    def _evaluated(self, microbatches: Sequence[Microbatch]) -> tuple[Loss, range]:
        """Returns the loss of the microbatches, once it has arrived, and the numbers they were given."""
        self._require_evaluation()
        self.flush()
        with self._calls.shared("in an evaluation"):
            self._weights.train(on=False)
            numbers = self._add(microbatches, training=False)
            self._runner.run(self._actions.evaluation(numbers), training=False)
            self._runner.settle()
            self._weights.train(on=True)
            loss = self._losses.of_evaluation(self.updates)
            loss.wait()  # also where it is known: other ranks must have it before this program can end
            return self._told(loss), numbers

    def state_dict(self) -> dict[str, Tensor]:
        """Returns the newest weights of the whole model under its own names, on the CPU of every rank.

        Flushes first. All ranks must call it.
        """
        self.flush()
        with self._calls.shared("collecting the weights"):
            everyone = collected(self._weights.tensors(), self._control)
        return merged_tensors(self.job, [everyone])

    def averaged_state_dict(self) -> dict[str, Tensor]:
        """Returns the whole model with the moving average of its weights, on the CPU of every rank.

        Its names are the model's own. Buffers, and parameters that are not trained, are the newest. Flushes
        first. All ranks must call it. Raises InputError for an engine without `weight_average`.
        """
        self.flush()
        with self._calls.agreeing("collecting the averaged weights"):
            averages = self._weights.averages()
            if averages is None:
                raise InputError(
                    "the engine keeps no average of the weights; make it with weight_average=0.999, say"
                )
            everyone = collected(self._weights.tensors() | averages, self._control)
        return merged_tensors(self.job, [everyone])

    def save_checkpoint(self, folder: str | Path) -> None:
        """Writes a checkpoint of all ranks, from which training can go on. Flushes first.

        All ranks must call it. `folder` is on a file system that all ranks share, and keeps the last two
        checkpoints. A process that is killed at any moment leaves the last complete one. Raises InputError
        for an optimizer or scheduler whose options are not plain numbers and strings, and where the folder
        cannot be written; the engine is then as before. Raises WorkerError for weights that are not finite,
        unless `stop_at_nan` is False.
        """
        require_path("folder", folder)
        self.flush()
        with self._calls.agreeing("writing a checkpoint") as together:
            job = self.job
            broken = self._weights.first_not_finite() if self._stop_at_nan else None
            if broken is not None:
                raise WorkerError(
                    f"{broken!r} is not finite after {counted(self.updates, 'update')}, and is not "
                    "written over the checkpoints there are; try a lower learning rate, a warm-up or "
                    "max_gradient_norm, or go on regardless with stop_at_nan=False"
                )
            shape = job.shape
            header = Header(self.updates, job.method, shape.num_stages, job.num_ranks, self._seed)
            save(folder, header, self.rank, self._weights.state, together=together)

    def load_checkpoint(self, folder: str | Path) -> int:
        """Loads the newest checkpoint in `folder`; returns the number of updates before it. Flushes first.

        If the run then gets the batches from that update on, it equals the uninterrupted one bit for bit,
        dropout included; with another number of stages, up to rounding. The optimizer's options, the learning
        rate among them, are the checkpoint's. Parameters that were frozen when it was written begin with a
        new optimizer state.

        Raises InputError where there is no checkpoint; the engine is then as before. It cannot be used any
        more after InputError for another optimizer or scheduler or a method that kept fewer weight versions,
        and after PlanMismatchError for a checkpoint with a file missing, or with parameters or buffers that
        are not this model's by name and shape.
        """
        require_path("folder", folder)
        self.flush()
        with self._calls.reading_a_batch("looking for a checkpoint", self.updates):
            checkpoint = Checkpoint(folder, rank=self.rank)
        with self._calls.shared("reading a checkpoint"):
            header = checkpoint.header
            checkpoint.require_model(self.job.parameters, self.job.buffers)
            self._weights.load(checkpoint)
            if (header.num_stages, header.num_ranks) == (self.job.shape.num_stages, self.job.num_ranks):
                restore_random_state(checkpoint.random(self.rank), self.device)
            self._draw_by(header.seed)
            self._actions.go_on_after(header.updates)
            self._losses.flushed(self.updates)
            self._batches.compare_whole()  # ranks may have resumed their data at different places
            return header.updates

    def averages(self) -> dict[str, Tensor] | None:
        """Returns the averages of this rank's trainable weights, by name in the graph; None without any.

        Flushes first.
        """
        self.flush()
        return self._weights.averages()

    def tensors(self) -> dict[str, Tensor]:
        """Returns copies of this rank's newest weights and buffers, by name in the graph. Flushes first."""
        self.flush()
        return {name: tensor.clone() for name, tensor in self._weights.tensors().items()}

    def records(self) -> tuple[Record, ...]:
        """Returns the actions of all ranks in the last `record` calls of step, eval and flush.

        Times are by rank 0's clock. All ranks must call it. `pd2bw_fx.metrics.timeline_of` makes a timeline
        of them.
        """
        if not self._calls.is_closed and self._losses.may_be_held_up:
            self.flush()  # others may be in a step that needs what this one would do in its next
        with self._calls.shared("collecting the records"), name_peer_in_errors(None):
            gathered: list[Any] = [None] * self.job.num_ranks
            dist.all_gather_object(gathered, list(self._recorder or ()), group=self._control)
        return tuple(Record(*record) for records in gathered for record in records)

    def _require_evaluation(self) -> None:
        if self.job.evaluation:
            raise InputError(f"the stages are not for evaluation: {self.job.evaluation}")

    def _add(self, microbatches: Sequence[Microbatch], *, training: bool) -> range:
        """Gives each stage the microbatches of this update, or of an evaluation; returns their numbers."""
        numbers = range(self.updates * len(microbatches), (self.updates + 1) * len(microbatches))
        self._results.expect(self.updates, numbers, training=training)
        self._runner.add(numbers, microbatches, is_new=self._actions.is_new)
        return numbers

    def _told(self, loss: Loss) -> Loss:
        """Logs a loss for on_report and stop_at_nan, and returns it in the form that the caller reads."""
        self._log.add(loss)
        return loss.as_read()
