"""Training on this machine: one worker process a rank, started and ended here.

this process --(socket pair)-- worker 0        batches go out as they are asked for, losses come back;
             --(socket pair)-- worker 1        between themselves the workers use torch.distributed
"""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch

from pd2bw_fx.actions import RunRequest
from pd2bw_fx.arguments import plain, require_function, require_kind, require_whole_number
from pd2bw_fx.errors import InputError, WorkerError
from pd2bw_fx.machine import cores_each
from pd2bw_fx.module import require_operators
from pd2bw_fx.passes.schedule import registered_method
from pd2bw_fx.process_settings import ProcessSettings
from pd2bw_fx.runtime.custom_operators import custom_operators
from pd2bw_fx.runtime.groups import require_gpus
from pd2bw_fx.runtime.inference import require_own_precision
from pd2bw_fx.runtime.job import jobs, work_for
from pd2bw_fx.runtime.local_run import LocalRun, TrainResult
from pd2bw_fx.runtime.messages import Start
from pd2bw_fx.runtime.nursery import nursery, require_no_worker
from pd2bw_fx.runtime.optimizing import OptimizerFactory
from pd2bw_fx.runtime.options import EngineOptions
from pd2bw_fx.runtime.world import local_device
from pd2bw_fx.units import counted, were

if TYPE_CHECKING:
    from pd2bw_fx.pipeline import Pipeline

_LOST = "the pipeline has the weights from before this run; what it trained is lost"


def train_local(
    pipeline: Pipeline,
    batches: Iterable[Any],
    *,
    optimizer: OptimizerFactory,
    microbatches_per_update: int | None = None,
    method: str | None = None,
    on_update: Callable[[int, float], bool | None] | None = None,
    threads_per_worker: int | None = None,
    seed: int | None = None,
    slack: float | Literal["auto"] = "auto",
    replicas: int | tuple[int, ...] | None = None,
    vertical_sync: bool = False,
    **options: Any,
) -> TrainResult:
    """Trains with local worker processes, one update for each batch, and flushes the pipeline at the end.

    `method` None is the plan's. `on_update(update, loss)` is called here as losses come back, from update 0
    on; where it returns False, no further batch is asked for. The random numbers that the model draws depend
    on `seed` (None: torch's in this process), the microbatch and the operator. `threads_per_worker` None
    divides the cores among the workers. `options` are the engine's (`Engine.from_pipeline`).

    Raises InputError for a batch that does not fit, PlanMismatchError for an operator that nothing has
    registered (a loaded pipeline's), WorkerError with the failing worker's own traceback. Both
    leave no process behind. After a wrong batch, an error of `batches` or of `on_update`, and Ctrl-C the
    pipeline has the weights so far; a second Ctrl-C does not wait for them.
    """
    require_no_worker("train_local")
    _require_arguments(batches, on_update, threads_per_worker)
    work = work_for(pipeline, RunRequest(method, microbatches_per_update, slack, replicas, vertical_sync))
    prepared = jobs(pipeline, work)
    prepared[0].layout.require_batches(batches)
    for program in pipeline.programs:
        require_operators(program)
    drawn = torch.initial_seed() % 2**32 if seed is None else plain(seed)
    chosen = EngineOptions.of(
        {"optimizer": optimizer, "seed": drawn, **options}, "on_update", "threads_per_worker"
    )
    require_own_precision(chosen.precision)
    devices = [local_device(job.device, chosen.device) for job in prepared]
    require_gpus(chosen.backend, [device if device.type == "cuda" else None for device in devices])
    given = _some(batches)  # before any worker is started
    with tempfile.TemporaryDirectory(prefix="pd2bw_fx_") as folder:
        starts = [
            Start(
                job=job,
                options=chosen,
                rendezvous=str(Path(folder) / "rendezvous"),
                seed=drawn,
                num_threads=threads_per_worker or cores_each(len(prepared)),
                settings=ProcessSettings.of_this_process(),
                custom_operators=custom_operators(
                    (program.source for program in job.programs), pipeline.graph.root
                ),
                method=registered_method(work.method),
            )
            for job in prepared
        ]
        with nursery() as ready:
            return _trained(pipeline, LocalRun(starts, on_update, ready), given)


def _require_arguments(
    batches: Iterable[Any],
    on_update: Callable[[int, float], bool | None] | None,
    threads_per_worker: int | None,
) -> None:
    if threads_per_worker is not None:
        require_whole_number("threads_per_worker", threads_per_worker)
    if on_update is not None:
        require_function(
            "on_update", on_update, "a function of the update's number and its loss", num_arguments=2
        )
    require_kind("batches", batches, Iterable, "an iterable of batches, one for each update")


def _some(batches: Iterable[Any]) -> Iterable[Any]:
    """Returns all of the batches. Raises InputError where there are none."""
    coming = iter(batches)
    first = list(itertools.islice(coming, 1))
    if not first:
        raise InputError(
            "batches gave none; a generator can be gone through only once: make one for each call"
        )
    return itertools.chain(first, coming)


def _trained(pipeline: Pipeline, run: LocalRun, batches: Iterable[Any]) -> TrainResult:
    """Gives the run its batches and ends its workers, whatever happens."""
    try:
        for batch in batches:
            run.step(batch)
            if run.is_told_to_stop:
                break
        return run.finish()
    except WorkerError as error:
        if run.has_trained:
            error.add_note(_LOST)
        raise
    except BaseException as error:
        _keep_weights(pipeline, run, error)
        raise
    finally:
        run.end()


def _keep_weights(pipeline: Pipeline, run: LocalRun, error: BaseException) -> None:
    """Gives the pipeline what was trained before a wrong batch, an error of the caller's own or Ctrl-C."""
    if not run.num_given:
        return
    try:
        result = run.finish_after_error()
    except WorkerError as lost:
        error.add_note(f"{_LOST}: {lost}")
    except BaseException as another:  # a second Ctrl-C
        another.add_note(_LOST)
        raise
    else:
        pipeline.load_state_dict(result.tensors)
        given = len(result.losses)
        error.add_note(
            f"the pipeline has the weights after the {counted(given, 'update')} that {were(given)} given"
        )
