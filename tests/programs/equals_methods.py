"""Run by torchrun: trains with every method and compares with a reference of the method's own rule.

torchrun --nproc-per-node N equals_methods.py RESULT.json [once] [FOLDER]

once    each method once with each model, for what depends on the order of messages alone
FOLDER  of the pipelines, as `save_pipelines` has left them; without it rank 0 splits the models
"""

import copy
import functools
import gc
import json
import os
import sys
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

import pd2bw_fx
from pd2bw_fx.models.gpt import GPT, GPTConfig
from pd2bw_fx.runtime.corrections import PipeMare, SpikeCompensation, WeightPrediction
from pd2bw_fx.runtime.reference import train_reference
from tests.programs.alive import measured
from tests.programs.delayed_reference import DelayedReference
from tests.programs.equals_reference import AGAINST_THE_DELAY, OPTIMIZERS, difference, model_of
from tests.readers import FAR, readers, readers_in_stages, shared_rows, shared_rows_in_stages

UPDATES = 7
ALL_OPTIMIZERS = OPTIMIZERS | AGAINST_THE_DELAY


@dataclass(frozen=True)
class Run:
    """`stages` of the cut; the options are the engine's."""

    name: str
    method: str
    stages: int
    m: int
    model: str = "mlp"
    optimizer: str = "momentum"
    options: dict[str, Any] = field(default_factory=dict)
    chunks: int = 1
    replicas: tuple[int, ...] | None = None


def wanted(n: int, *, once: bool) -> list[Run]:
    return once_each(runs(n)) if once else list(runs(n))


def runs(n: int) -> Iterator[Run]:
    """Optimizers on two ranks, corrections on two and four: three have what an odd number may bring."""
    for optimizer in ("sgd", "momentum", "adamw") if n == 2 else ("momentum",):
        yield Run(f"pipedream {optimizer}", "pipedream", n, 1, optimizer=optimizer)
        yield Run(f"pb {optimizer}", "pb", n, 1, optimizer=optimizer)
    yield Run("pipedream gpt", "pipedream", n, 1, model="gpt", optimizer="adamw")
    yield Run("pipedream m=2", "pipedream", n, 2)
    yield Run("pb m=2", "pb", n, 2)
    yield Run("vertical sync", "pipedream", n, 1, options={"vertical_sync": True})
    yield Run("spike compensation", "pb", n, 1, options={"corrections": [SpikeCompensation()]})
    yield Run("pipemare", "pipemare", n, 1)
    if n != 3:
        yield from corrected_runs(n)
    for method in ("zb-h1", "zb-h2"):
        yield Run(f"{method} gpt", method, n, 2 * n, model="gpt", optimizer="adamw")
        yield Run(f"{method} resnet", method, n, n, model="resnet")
    yield Run("zb-auto", "zb-auto", n, 4, model="gpt", optimizer="adamw")
    yield Run("bapipe", "bapipe", n, n, model="gpt", optimizer="adamw")
    yield Run("ddp", "ddp", 1, 2 * n, model="gpt", optimizer="adamw", replicas=(n,))
    if n % 2 == 0:
        yield Run("chimera", "chimera", n, n, model="gpt", optimizer="adamw")
        yield Run("interleaved", "interleaved", 2 * n, 2 * n, model="gpt", optimizer="adamw", chunks=2)
        clipped = {"max_gradient_norm": 0.5}
        yield Run("chimera 2n", "chimera", n, 2 * n, options=clipped)
    if n == 2:
        yield Run("2bw nadamw", "2bw", n, n, optimizer="nadamw")
        yield Run("2bw muon", "2bw", n, n, optimizer="muon")
    if n == 3:
        yield Run("unequal replicas", "pipedream", 2, 2, replicas=(2, 1))
        yield Run("zb-h1 weights handed on", "zb-h1", n, n, model="shared rows")
    if n == 4:
        for method in ("2bw", "zb-h1"):
            yield Run(f"{method} handed on", method, n, n, model="readers")
        yield Run("2bw replicas", "2bw", 2, 4, model="gpt", optimizer="adamw", replicas=(2, 2))
        yield Run("1f1b replicas", "1f1b", 2, 4, replicas=(2, 2), options={"max_gradient_norm": 0.5})


def once_each(every: Iterator[Run]) -> list[Run]:
    first: dict[tuple[str, str], Run] = {}
    for run in every:
        first.setdefault((run.method, run.model), run)
    return list(first.values())


def corrected_runs(n: int) -> Iterator[Run]:
    for form in ("velocity", "weights"):
        yield Run(f"prediction {form}", "pb", n, 1, options={"corrections": [WeightPrediction(form)]})
    both = [SpikeCompensation(), WeightPrediction()]
    yield Run("both", "pb", n, 1, options={"corrections": both})
    yield Run("pipemare slower", "pipemare", n, 1, options={"corrections": [PipeMare(rescale_updates=4)]})
    warm = PipeMare(rescale_updates=3, synchronous_updates=3)
    yield Run("pipemare warm-up", "pipemare", n, 1, options={"corrections": [warm]})


@functools.cache
def model_for(name: str, *, tied: bool) -> nn.Module:
    if name == "readers":
        return readers()
    if name == "shared rows":
        return shared_rows()
    if name != "gpt" or tied:
        return model_of(name)
    torch.manual_seed(0)
    config = GPTConfig(num_layers=3, width=32, num_heads=2, sequence_length=16, dropout=0.0, tied=False)
    return GPT.from_config(config).double()


@functools.cache
def traced(model: nn.Module) -> pd2bw_fx.Pipeline:
    return pd2bw_fx.split(model, cluster=1, costs="analytic", check=False)


@dataclass(frozen=True)
class Cut:
    """What a pipeline depends on: the same for many runs."""

    model: str
    tied: bool
    stages: int
    chunks: int
    method: str
    m: int | None

    @property
    def folder(self) -> str:
        return "-".join(map(str, (self.model, self.tied, self.stages, self.chunks, self.method, self.m)))

    def split(self) -> pd2bw_fx.Pipeline:
        if self.model == "readers":
            return readers_in_stages(FAR, check=False)[1]
        if self.model == "shared rows":
            return shared_rows_in_stages()
        pipe = pd2bw_fx.split(
            traced(model_for(self.model, tied=self.tied)),
            cluster=self.stages,
            costs="analytic",
            check=False,
            num_stages=self.stages,
            method=self.method,
            microbatches_per_update=self.m,
        )
        if self.chunks > 1:
            ranks = self.stages // self.chunks
            placed = tuple(replace(stage, device=stage.stage % ranks) for stage in pipe.plan.stages)
            pipe.plan = replace(pipe.plan, stages=placed)
        return pipe


def cut_of(run: Run) -> Cut:
    if run.method in ("zb-auto", "bapipe"):  # plans that are found with their schedules
        return Cut(run.model, is_tied(run), run.stages, 1, run.method, run.m)
    return Cut(run.model, is_tied(run), run.stages, run.chunks, "2bw", None)


def is_tied(run: Run) -> bool:
    """A tied weight has one version in one process, and several in stages."""
    return run.method not in ("pipedream", "pb", "pipemare")


def save_pipelines(num_ranks: int, folder: Path, *, once: bool) -> None:
    """Traces each model once in this process, whatever the number of ranks."""
    for cut in {cut_of(run) for run in wanted(num_ranks, once=once)}:
        cut.split().save(folder / cut.folder)


@functools.cache
def pipeline_for(cut: Cut, folder: Path | None) -> pd2bw_fx.Pipeline:
    return cut.split() if folder is None else pd2bw_fx.load(folder / cut.folder)


def expected(run: Run, pipe: pd2bw_fx.Pipeline, model: nn.Module, batches: Any) -> tuple[Any, Any]:
    if run.method not in ("pipedream", "pb", "pipemare"):
        given = {k: v for k, v in run.options.items() if k == "max_gradient_norm"}
        reference = train_reference(
            model,
            batches,
            optimizer=ALL_OPTIMIZERS[run.optimizer],
            microbatches_per_update=run.m,
            method="2bw" if run.method == "2bw" else "synchronous",
            **given,
        )
        return reference.losses, reference.state_dict
    held = {name: program.stage for program in pipe.programs for name in program.parameters}
    stage_of = {name: held[name] for name, _ in model.named_parameters()}
    rule = "vertical" if run.options.get("vertical_sync") else run.method
    delayed = DelayedReference(
        copy.deepcopy(model),
        stage_of,
        rule,
        run.m,
        ALL_OPTIMIZERS[run.optimizer],
        run.replicas or (1,) * run.stages,
        run.options.get("corrections", [PipeMare()] if run.method == "pipemare" else ()),
    )
    weights = delayed.train(batches)
    return delayed.losses, weights


def main() -> None:
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    result, *more = sys.argv[1:]
    folder = next((Path(word) for word in more if word != "once"), None)
    results = {}
    for run in wanted(num_ranks, once="once" in more):
        model = model_for(run.model, tied=is_tied(run))
        pipe = pipeline_for(cut_of(run), folder) if rank == 0 else None
        gc.freeze()  # what there is by now need not be looked through after the run
        drawn = model.example_inputs(batch_size=UPDATES * 2 * run.m)  # type: ignore[operator]
        batches = list(zip(*(tensor.split(2 * run.m) for tensor in drawn), strict=True))
        engine = pd2bw_fx.Engine.from_pipeline(
            pipe,
            optimizer=ALL_OPTIMIZERS[run.optimizer],
            microbatches_per_update=run.m,
            method=run.method,
            replicas=run.replicas,
            **run.options,
        )
        losses = [float(engine.step(batch)) for batch in batches]
        weights = engine.state_dict()
        alive: list[Any] = [None] * num_ranks
        torch.distributed.all_gather_object(alive, measured(engine, batches))
        job, held = engine.job, weakref.ref(engine._weights)
        engine.close()
        del engine
        gc.collect()  # `measured` is in a circle with the engine
        if pipe is not None:
            known, state = expected(run, pipe, model, batches)
            loss = max(abs(a - b) / abs(b) for a, b in zip(losses, known, strict=True))
            results[run.name] = {
                "loss": loss,
                "weights": difference(weights, state),
                "alive": alive,
                "work": [job.method, job.shape.to_json()],
                "is_freed": held() is None,
            }
    if rank == 0:
        Path(result).write_text(json.dumps(results, indent=1))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
