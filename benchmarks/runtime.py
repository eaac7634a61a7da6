"""2BW beside the hardware's bound and beside torch's own engines, on the same stages, in one run.

    python benchmarks/runtime.py [--processes 2] [--microbatches 2 4 8] [--rounds 9] [-o runtime.json]

Every process has one thread. In each round every contender trains the same number of updates, one after the
other; a ratio is the median over rounds of the two times of the same round, so that drift of the machine
cancels. "bound" is the stages' compute on all processes at once without any communication.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.nn.parallel import DistributedDataParallel

import pd2bw_fx
from pd2bw_fx.models.gpt import GPT, GPTConfig
from pd2bw_fx.runtime.job import Job
from pd2bw_fx.stage import build_module

# Untied, because torch.distributed.pipelining does not add up the gradients of shared parameters.
CONFIG = GPTConfig(
    vocab_size=512, sequence_length=128, num_layers=8, num_heads=8, width=256, dropout=0.0, tied=False
)
MICROBATCH = 2
RATIOS = (
    ("2bw", "bound"),
    ("2bw", "torch 1F1B"),
    ("2bw", "torch GPipe"),
    ("2bw", "DDP"),
    ("1f1b", "torch 1F1B"),
    ("gpipe", "torch GPipe"),
)
OPTIMIZER = functools.partial(torch.optim.AdamW, lr=1e-4)
Update = Callable[[], Any]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--microbatches", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--updates", type=int, default=4, help="updates of each contender in a round")
    parser.add_argument("--only", nargs="+", help="measure only these contenders")
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    if "RANK" in os.environ:
        work(options)
        return
    with tempfile.TemporaryDirectory() as folder:
        output = options.output or Path(folder) / "runtime.json"
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(options.processes)]
        command += [__file__, *sys.argv[1:], "-o", str(output)]
        subprocess.run(command, check=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
        print_table(json.loads(output.read_text()))


def work(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = GPT.from_config(CONFIG)
    example = model.example_inputs(batch_size=MICROBATCH)
    pipe = None
    if dist.get_rank() == 0:
        pipe = pd2bw_fx.split(model, example, cluster=dist.get_world_size())
    results = []
    for m in options.microbatches:
        if m < dist.get_world_size():
            continue
        contenders = made(pipe, model, m)
        if options.only:
            contenders = {name: contenders[name] for name in options.only}
        times = measured(contenders, options.rounds, options.updates)
        results.append({"microbatches": m, "seconds": times})
    if dist.get_rank() == 0:
        answer = {"processes": dist.get_world_size(), "config": str(CONFIG), "runs": results}
        options.output.write_text(json.dumps(answer, indent=1))
    dist.destroy_process_group()


def made(pipe: pd2bw_fx.Pipeline | None, model: GPT, m: int) -> dict[str, tuple[Update, Update]]:
    """Each contender: one update, and what to do at the end of a round."""
    engines = {
        method: pd2bw_fx.Engine.from_pipeline(
            pipe, optimizer=OPTIMIZER, microbatches_per_update=m, method=method, silence_s=0
        )
        for method in ("2bw", "1f1b", "gpipe")
    }
    job = replace(engines["2bw"].job, tensors=engines["2bw"].tensors())
    batch = model.example_inputs(batch_size=MICROBATCH * m)
    contenders: dict[str, tuple[Update, Update]] = {
        method: (functools.partial(engine.step, batch), engine.flush) for method, engine in engines.items()
    }
    contenders["bound"] = alone(job, batch, m), lambda: None
    contenders["torch 1F1B"] = torch_pipeline(job, batch, m, Schedule1F1B), lambda: None
    contenders["torch GPipe"] = torch_pipeline(job, batch, m, ScheduleGPipe), lambda: None
    if m % dist.get_world_size() == 0:
        contenders["DDP"] = data_parallel(model, batch, m), lambda: None
    return contenders


def alone(job: Job, batch: tuple[Tensor, ...], m: int) -> Update:
    """This stage's compute without its peers."""
    module = build_module(job.programs[0], job.tensors)
    optimizer = OPTIMIZER(module.parameters())
    pieces = [dict(zip(("tokens", "targets"), parts, strict=True)) for parts in chunked(batch, m)]

    def run(piece: dict[str, Tensor]) -> None:
        arguments = []
        for port in job.programs[0].inputs:
            if port.source is None:
                arguments.append(piece[port.value])
                continue
            shape = [MICROBATCH if not isinstance(size, int) else size for size in port.spec.shape]
            arguments.append(torch.zeros(shape, requires_grad=port.needs_gradient))
        returned = module(*arguments)
        outputs = [returned] if isinstance(returned, Tensor) else list(returned)
        torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])

    def update() -> None:
        optimizer.zero_grad()
        for piece in pieces:
            run(piece)
        optimizer.step()

    return update


class TorchStage(nn.Module):
    """A generated stage as torch.distributed.pipelining calls it: targets by keyword."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.stage = build_module(job.programs[0], job.tensors)
        self.names = [port.value for port in job.programs[0].inputs]

    def forward(self, *arguments: Tensor, **targets: Tensor) -> Tensor:
        received = iter(arguments)
        given: Tensor = self.stage(*(targets[n] if n in targets else next(received) for n in self.names))
        return given if given.dim() else given.reshape(1)  # outputs are concatenated


def torch_pipeline(job: Job, batch: tuple[Tensor, ...], m: int, kind: Any) -> Update:
    module = TorchStage(job)
    optimizer = OPTIMIZER(module.parameters())
    stage = PipelineStage(module, job.stages[0], job.num_ranks, torch.device("cpu"))
    schedule = kind(stage, m, loss_fn=lambda output, target: output.sum())
    tokens, targets = batch

    def update() -> None:
        optimizer.zero_grad()
        if job.stages[0] == 0:
            schedule.step(tokens)
        elif job.stages[0] == job.num_ranks - 1:
            schedule.step(target=targets, targets=targets)
        else:
            schedule.step()
        optimizer.step()

    return update


def data_parallel(model: GPT, batch: tuple[Tensor, ...], m: int) -> Update:
    """The same global batch: each process has a share of the microbatches, gradients are reduced once."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    replica = DistributedDataParallel(GPT.from_config(CONFIG))
    optimizer = OPTIMIZER(replica.parameters())
    pieces = chunked(batch, m)[rank::world_size]

    def update() -> None:
        optimizer.zero_grad()
        for piece in pieces[:-1]:
            with replica.no_sync():
                replica(*piece).backward()
        replica(*pieces[-1]).backward()
        optimizer.step()

    return update


def chunked(batch: tuple[Tensor, ...], m: int) -> list[tuple[Tensor, ...]]:
    return list(zip(*(tensor.chunk(m) for tensor in batch), strict=True))


def measured(
    contenders: dict[str, tuple[Update, Update]], rounds: int, updates: int
) -> dict[str, list[float]]:
    """Seconds an update of the slowest process, for each round after a first that warms up.

    2BW is timed over updates in the steady state: its pipeline is filled before the clock starts.
    """
    times: dict[str, list[float]] = {name: [] for name in contenders}
    for number in range(rounds + 1):
        for name, (update, finish) in contenders.items():
            update()
            dist.barrier()
            update()
            began = time.perf_counter()
            for _ in range(updates):
                update()
            took = torch.tensor([time.perf_counter() - began])
            dist.all_reduce(took, op=dist.ReduceOp.MAX)
            finish()
            if number > 0:
                times[name].append(float(took) / updates)
    return times


def print_table(answer: dict[str, Any]) -> None:
    print(f"{answer['processes']} processes, one thread each; medians of ratios of speed, one round each")
    for run in answer["runs"]:
        seconds = run["seconds"]
        medians = ", ".join(f"{name} {statistics.median(t) * 1e3:.0f} ms" for name, t in seconds.items())
        print(f"\nm = {run['microbatches']}: {medians}")
        for ours, theirs in RATIOS:
            if ours in seconds and theirs in seconds:
                ratios = [b / a for a, b in zip(seconds[ours], seconds[theirs], strict=True)]
                spread = f"{min(ratios):.3f} to {max(ratios):.3f}"
                print(f"    {ours:>6} / {theirs:<12} {statistics.median(ratios):.3f}   ({spread})")


if __name__ == "__main__":
    main()
