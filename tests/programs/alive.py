"""What an engine really holds: weights that its microbatches need, and graphs that await a backward."""

from __future__ import annotations

import weakref
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

import pd2bw_fx
from pd2bw_fx.actions import Action, Kind
from pd2bw_fx.runtime.stage_runner import StageRunner


class _Saved:
    """A tensor that autograd keeps for a backward; it is gone when the graph is.

    (Without its own graph: some operators keep their output, which would hold itself.)
    """

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()


@dataclass
class Alive:
    """Of one stage on one rank, while it trains.

    `held` are distinct storages that forwards have run on; `needed` the most at one time that microbatches
    in flight or the newest weights lie in; `in_flight` the most microbatches at one time with anything saved,
    and `of_rank` those of all stages of the rank, which `on_rank` lists.
    """

    runner: StageRunner
    on_rank: list[Alive]
    held: set[int] = field(default_factory=set)
    needed: int = 0
    in_flight: int = 0
    of_rank: int = 0
    _saved: Counter[int] = field(default_factory=Counter)
    _storages: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        performs = dict(self.runner._performs)
        performs[Kind.FORWARD] = lambda _, action: self._forward(action)
        self.runner._performs = performs  # type: ignore[misc]  # this one's alone

    def _forward(self, action: Action) -> None:
        k = action.microbatch

        def pack(tensor: Tensor) -> _Saved:
            saved = _Saved(tensor)
            self._saved[k] += 1
            weakref.finalize(saved, self._saved.subtract, {k: 1}).atexit = False
            return saved

        with saved_tensors_hooks(pack, lambda saved: saved.tensor):
            self.runner._forward(action)
        self._storages[k] = self._storage(action.version)
        self.held.add(self._storages[k])
        self.look()

    def look(self) -> None:
        flying = self.flying()
        self.in_flight = max(self.in_flight, len(flying))
        self.of_rank = max(self.of_rank, sum(len(stage.flying()) for stage in self.on_rank))
        newest = self._storage(self.runner.weights.newest)
        self.needed = max(self.needed, len({newest, *(self._storages[k] for k in flying)}))

    def flying(self) -> list[int]:
        return [k for k, count in self._saved.items() if count > 0]

    def _storage(self, version: int) -> int:
        module = self.runner.weights.module(self.runner.program.stage, version)
        return min(p.untyped_storage().data_ptr() for p in module.parameters() if p.requires_grad)


def measured(engine: pd2bw_fx.Engine, batches: list[Any]) -> dict[int, list[int]]:
    """Train on the batches; by stage: versions held, needed, microbatches in flight, those of the rank."""
    together: list[Alive] = []
    watched = {stage: Alive(runner, together) for stage, runner in engine._runner._stages.items()}
    together += watched.values()
    update = engine._runner._update

    def updated(action: Action) -> None:
        update(action)
        watched[action.stage].look()

    engine._runner._update = updated  # type: ignore[method-assign]
    for batch in batches:
        engine.step(batch)
    engine.flush()
    return {
        stage: [len(seen.held), seen.needed, seen.in_flight, seen.of_rank] for stage, seen in watched.items()
    }
