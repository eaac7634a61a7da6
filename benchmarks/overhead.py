"""The engine's own time for an action, in microseconds: Python and bookkeeping around what torch does.

    python benchmarks/overhead.py [--updates 100]

Two processes train stages that are far too small. From the time of each action those of the calls are taken
off that any engine has to make: the module's forward, autograd's backward, the optimizer's step, and the
calls of torch.distributed. Times are of this thread's work (`time.thread_time`): neither waiting for messages
nor other processes on the machine count.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from launch import under_torchrun
from torch import nn

import pd2bw_fx
from pd2bw_fx.actions import Action
from pd2bw_fx.models import build
from pd2bw_fx.runtime.channel import Route
from pd2bw_fx.runtime.rank_runner import RankRunner
from pd2bw_fx.runtime.stage_runner import StageRunner
from pd2bw_fx.runtime.weights import WeightStore

M, ROWS, WARM_UP = 8, 4, 5


class Watch:
    """Seconds of each action outside of the calls that are not the engine's."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, list[float]] = defaultdict(list)
        self._elsewhere_s = 0.0

    def excluded(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            began_s = time.thread_time()
            try:
                return function(*args, **kwargs)
            finally:
                self._elsewhere_s += time.thread_time() - began_s

        return timed

    def watched(self, perform: Callable[[Any, Action], None]) -> Callable[[Any, Action], None]:
        def timed(runner: Any, action: Action) -> None:
            self._elsewhere_s = 0.0
            began_s = time.thread_time()
            perform(runner, action)
            own_s = time.thread_time() - began_s - self._elsewhere_s
            self.seconds[str(action.kind)].append(own_s)

        return timed

    def put_on(self) -> None:
        """Into this process's engines."""
        for name in ("isend", "irecv", "wait", "shared_buffer"):
            setattr(Route, name, self.excluded(getattr(Route, name)))
        torch.autograd.backward = self.excluded(torch.autograd.backward)
        torch.optim.SGD([nn.Parameter(torch.zeros(1))])  # torch wraps the class's step with the first one
        step = self.excluded(torch.optim.SGD.step)
        step.hooked = True  # type: ignore[attr-defined]
        torch.optim.SGD.step = step  # type: ignore[method-assign]
        StageRunner.perform = self.watched(StageRunner.perform)  # type: ignore[method-assign]
        RankRunner._update = self.watched(RankRunner._update)  # type: ignore[method-assign]
        begin = WeightStore.begin_forward

        def begin_forward(store: WeightStore, *args: Any, **kwargs: Any) -> Any:
            module: nn.Module = begin(store, *args, **kwargs)
            if "forward" not in vars(module):
                module.forward = self.excluded(module.forward)
            return module

        WeightStore.begin_forward = begin_forward  # type: ignore[method-assign]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--updates", type=int, default=100)
    options = parser.parse_args()
    if "RANK" in os.environ:
        work(options.updates)
        return
    under_torchrun(__file__, 2)


def work(updates: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    watch = Watch()
    watch.put_on()
    model = build("mlp")
    pipe = pd2bw_fx.split(model, cluster=2, costs="analytic", check=False) if dist.get_rank() == 0 else None
    engine = pd2bw_fx.Engine.from_pipeline(
        pipe,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0),
        microbatches_per_update=M,
        silence_s=0,
    )
    batch = model.example_inputs(batch_size=M * ROWS)
    for update in range(WARM_UP + updates):
        if update == WARM_UP:
            watch.seconds.clear()
        engine.step(batch)
    engine.flush()
    for rank in range(2):
        dist.barrier()
        if engine.rank == rank:
            print_table(rank, watch.seconds)
    dist.destroy_process_group()


def print_table(rank: int, seconds: dict[str, list[float]]) -> None:
    told = ", ".join(f"{kind} {statistics.median(found) * 1e6:.0f}" for kind, found in seconds.items())
    all_ = [own_s for found in seconds.values() for own_s in found]
    print(f"rank {rank}: {told}; mean of all {statistics.fmean(all_) * 1e6:.0f} us an action", flush=True)


if __name__ == "__main__":
    main()
