"""Parameters of a small model, optimizers of its ranks, and what these save."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from pd2bw_fx.graph import ParameterSpec, TensorSpec
from pd2bw_fx.runtime.checkpoint import Checkpoint, Header, RankState, save
from pd2bw_fx.runtime.optimizing import RankOptimizer

SHAPES = {"embedding": (4, 3), "norm": (3,), "head": (3, 4), "bias": (4,)}


def specs(shapes: Mapping[str, tuple[int, ...]]) -> list[ParameterSpec]:
    of = {name: TensorSpec(shape, torch.float32, example_shape=shape) for name, shape in shapes.items()}
    return [ParameterSpec(name, spec) for name, spec in of.items()]


EVERYWHERE = specs(SHAPES)


def parameters(*names: str) -> dict[str, nn.Parameter]:
    return {name: nn.Parameter(torch.full(SHAPES[name], 1.0)) for name in names}


def by_dimensions(name: str, parameter: nn.Parameter) -> dict[str, Any]:
    return {"lr": 0.1} if parameter.dim() > 1 else {"lr": 0.4}


class Momentous(torch.optim.Optimizer):
    """Keeps a Python number beside its tensors."""

    def __init__(self, groups: Any, lr: float = 0.1) -> None:
        super().__init__(groups, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                kept = self.state[parameter]
                kept["scale"] = kept.get("scale", 1.0) / 3
                kept["sum"] = kept.get("sum", torch.zeros_like(parameter)) + parameter.grad
                parameter -= group["lr"] * kept["scale"] * kept["sum"]


def one_group_each(given: list[nn.Parameter]) -> torch.optim.Optimizer:
    rates = {2: 0.1, 1: 0.4}
    return Momentous([{"params": [p], "lr": rates[p.dim()]} for p in given])


def run(made: RankOptimizer, weights: Mapping[str, nn.Parameter], num_steps: int) -> None:
    assert made.optimizer is not None
    for _ in range(num_steps):
        for parameter in weights.values():
            parameter.grad = parameter.detach() * 0.5
        made.optimizer.step()
        made.step_scheduler()


def saved(folder: Path, ranks: list[tuple[RankOptimizer, dict[str, nn.Parameter]]]) -> Checkpoint:
    meeting = threading.Barrier(len(ranks))

    @contextmanager
    def together() -> Iterator[None]:
        yield
        meeting.wait()

    def write(rank: int) -> None:
        made, weights = ranks[rank]
        tensors, plain = made.state()
        tensors |= {f"weights_0/{name}": parameter.detach() for name, parameter in weights.items()}
        state = RankState(tensors, **plain, loss_scale=None, random={})
        header = Header(3, "1f1b", len(ranks), len(ranks), 0)
        save(folder, header, rank, lambda: state, together=together)

    threads = [threading.Thread(target=write, args=(rank,)) for rank in range(len(ranks))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return Checkpoint(folder)
