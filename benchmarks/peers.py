"""What 2BW is measured against: stages without links, torch's pipelines, data parallelism, one process.

Each maker gives a function that makes one update with the stages, optimizer and batch of the engines.
"""

from __future__ import annotations

import collections
import copy
import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleGPipe,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)
from torch.nn.parallel import DistributedDataParallel

import pd2bw_fx
from pd2bw_fx.models.gpt import GPT, GPTConfig
from pd2bw_fx.runtime.job import Job
from pd2bw_fx.stage import StageProgram, build_module

# Untied, because torch.distributed.pipelining does not add up the gradients of shared parameters.
CONFIG = GPTConfig(
    vocab_size=512, sequence_length=128, num_layers=8, num_heads=8, width=256, dropout=0.0, tied=False
)
MICROBATCH = 2
OPTIMIZER = functools.partial(torch.optim.AdamW, lr=1e-4, fused=True)
Batch = tuple[Tensor, ...]
Update = Callable[[], Any]


def make_engine(
    pipe: pd2bw_fx.Pipeline | None, method: str, m: int, *, is_compiled: bool = False
) -> pd2bw_fx.Engine:
    return pd2bw_fx.Engine.from_pipeline(
        pipe, optimizer=OPTIMIZER, microbatches_per_update=m, method=method, silence_s=0, compile=is_compiled
    )


def with_weights(engine: pd2bw_fx.Engine) -> Job:
    """The engine's job, with the weights that it was given; the engine itself is given up."""
    job = replace(engine.job, tensors=engine.tensors())
    engine.close()
    return job


class _Alone:
    """This rank's stage without its peers, on microbatches of a batch."""

    def __init__(self, job: Job, batch: Batch, m: int) -> None:
        self.program = job.programs[0]
        self.module = build_module(self.program, job.tensors)
        self.optimizer = OPTIMIZER(self.module.parameters())
        self.pieces = [dict(zip(("tokens", "targets"), parts, strict=True)) for parts in chunked(batch, m)]

    def forward(self, piece: dict[str, Tensor]) -> list[Tensor]:
        arguments = []
        for port in self.program.inputs:
            if port.source is None:
                arguments.append(piece[port.value])
                continue
            shape = [MICROBATCH if not isinstance(size, int) else size for size in port.spec.shape]
            arguments.append(torch.zeros(shape, requires_grad=port.needs_gradient))
        returned = self.module(*arguments)
        return [returned] if isinstance(returned, Tensor) else list(returned)

    @staticmethod
    def backward(outputs: Sequence[Tensor]) -> None:
        torch.autograd.backward(outputs, [torch.ones_like(output) for output in outputs])


def bound(job: Job, batch: Batch, m: int) -> Update:
    """The compute of this rank's stage, one microbatch after another."""
    alone = _Alone(job, batch, m)

    def run() -> None:
        for piece in alone.pieces:
            alone.backward(alone.forward(piece))

    return functools.partial(step, alone.optimizer, run)


def without_messages(job: Job, batch: Batch, m: int) -> Update:
    """The bound's compute in 2BW's order, with its microbatches in flight and its copy of the weights."""
    alone = _Alone(job, batch, m)
    parameters = [parameter.detach() for parameter in alone.module.parameters()]
    other_version = [torch.empty_like(parameter) for parameter in parameters]
    in_flight = collections.deque[list[Tensor]]()
    most = job.work.rules.in_flight(job.shape, job.stages[0])

    def run() -> None:
        for piece in alone.pieces:
            in_flight.append(alone.forward(piece))
            if len(in_flight) == most:
                alone.backward(in_flight.popleft())
        torch._foreach_copy_(other_version, parameters)

    return functools.partial(step, alone.optimizer, run)


class TorchStage(nn.Module):
    """A generated stage as torch.distributed.pipelining calls it: targets by keyword."""

    def __init__(self, program: StageProgram, job: Job) -> None:
        super().__init__()
        self.stage = build_module(program, job.tensors)
        self.names = [port.value for port in program.inputs]

    def forward(self, *arguments: Tensor, **targets: Tensor) -> Tensor:
        received = iter(arguments)
        given: Tensor = self.stage(*(targets[n] if n in targets else next(received) for n in self.names))
        return given if given.dim() else given.reshape(1)  # outputs are concatenated


def torch_pipeline(kind: Any, job: Job, batch: Batch, m: int, *, is_compiled: bool = False) -> Update:
    """A schedule of torch's on this rank's stages, of which interleaved ones have several."""
    modules = [TorchStage(program, job) for program in job.programs]
    if is_compiled:
        for module in modules:
            module.stage.compile()
    optimizer = OPTIMIZER([p for module in modules for p in module.parameters()])
    last = job.shape.num_stages - 1
    stages = [
        PipelineStage(module, program.stage, last + 1, torch.device("cpu"))
        for module, program in zip(modules, job.programs, strict=True)
    ]
    several = kind in (ScheduleInterleaved1F1B, ScheduleInterleavedZeroBubble)
    schedule = kind(stages if several else stages[0], m, loss_fn=lambda output, target: output.sum())
    tokens, targets = batch

    def run() -> None:
        if 0 in job.stages:
            schedule.step(tokens)
        elif last in job.stages:
            schedule.step(target=targets, targets=targets)
        else:
            schedule.step()

    return functools.partial(step, optimizer, run)


def data_parallel(model: GPT, batch: Batch, m: int) -> Update:
    """The same global batch: each process has a share of the microbatches, gradients are reduced once."""
    replica = DistributedDataParallel(copy.deepcopy(model))
    optimizer = OPTIMIZER(replica.parameters())
    pieces = chunked(batch, m)[dist.get_rank() :: dist.get_world_size()]

    def run() -> None:
        for piece in pieces[:-1]:
            with replica.no_sync():
                replica(*piece).backward()
        replica(*pieces[-1]).backward()

    return functools.partial(step, optimizer, run)


def one_process(model: GPT, batch: Batch, m: int) -> Update:
    """The whole update on rank 0, while the others have nothing to do."""
    if dist.get_rank() > 0:
        return lambda: None
    alone = copy.deepcopy(model)
    pieces = chunked(batch, m)
    return functools.partial(
        step, OPTIMIZER(alone.parameters()), lambda: [alone(*piece).backward() for piece in pieces]
    )


def step(optimizer: torch.optim.Optimizer, run: Callable[[], Any]) -> None:
    optimizer.zero_grad()
    run()
    optimizer.step()


def chunked(batch: Batch, m: int) -> Sequence[Batch]:
    return list(zip(*(tensor.chunk(m) for tensor in batch), strict=True))


PLAIN_PEERS = {"torch 1F1B": Schedule1F1B, "torch GPipe": ScheduleGPipe}
INTERLEAVED_PEERS = {
    "torch interleaved": ScheduleInterleaved1F1B,
    "torch interleaved ZB": ScheduleInterleavedZeroBubble,
}
