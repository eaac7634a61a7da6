"""What slack is worth on slow, uneven links: 4 stages in the simulator and in the engine, side by side.

    python benchmarks/slack.py [--latency 0.1] [--microbatches 8] [--rounds 3] [-o slack.json]

Every message arrives late by `latency` of a forward and by the size of a normal number with that deviation.
The engine is the real one on 4 processes, with two things put in its way: a forward and a backward also sleep
for 40 and 80 ms, which stand for devices that compute (four processes need not share two cores then), and a
message waits in a thread before torch.distributed gets it. A share of 1 is the stages' time alone, as long as
the slowest of them has slept: a process may be woken late.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import random
import statistics
import threading
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from launch import told_under_torchrun
from torch import Tensor

import pd2bw_fx
from pd2bw_fx.actions import Action, Kind, Shape
from pd2bw_fx.models import build
from pd2bw_fx.passes.schedule import schedule_of
from pd2bw_fx.passes.simulate import Durations, LinkTimes, simulate_durations
from pd2bw_fx.runtime import setup
from pd2bw_fx.runtime.channel import Route
from pd2bw_fx.runtime.stage_runner import StageRunner

STAGES = 4
FORWARD_S, BACKWARD_S = 0.04, 0.08
UPDATES = 6


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--latency", type=float, default=0.1, help="shares of a forward")
    parser.add_argument("--microbatches", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    if "RANK" in os.environ:
        work(options)
        return
    print_table(told_under_torchrun(__file__, STAGES, options.output), options)


class LateRoute:
    """Hands messages to torch.distributed when they would have arrived, one thread for each direction."""

    def __init__(self, late_s: float) -> None:
        self._late_s = late_s
        self._noise = random.Random(int(os.environ["RANK"]))
        self._queues: dict[Any, queue.SimpleQueue[Any]] = {}

    def isend(self, route: Route, tensor: Tensor, tag: int) -> Any:
        to = (route.peer, route.group)
        if to not in self._queues:
            self._queues[to] = queue.SimpleQueue()
            threading.Thread(target=self._deliver, args=(self._queues[to],), daemon=True).start()
        sent = Sent()
        due_s = time.perf_counter() + self._late_s + abs(self._noise.gauss(0.0, self._late_s))
        self._queues[to].put((due_s, route, tensor, tag, sent))
        return sent

    @staticmethod
    def _deliver(waiting: queue.SimpleQueue[Any]) -> None:
        while True:
            due_s, route, tensor, tag, sent = waiting.get()
            time.sleep(max(0.0, due_s - time.perf_counter()))
            dist.send(tensor, route.peer, group=route.group, tag=tag)
            sent.arrived.set()


class Sent:
    def __init__(self) -> None:
        self.arrived = threading.Event()

    def wait(self) -> None:
        self.arrived.wait()


def slow_down(late_s: float) -> list[float]:
    """Put sleeps into this process's engines; all messages go the way on which they are late.

    Returns a list that gets the seconds of each forward and backward.
    """
    slept_s: list[float] = []
    setup.ranks_in_reach = lambda *_: frozenset()
    links = LateRoute(late_s)
    Route.isend = lambda route, tensor, tag: links.isend(route, tensor, tag)  # type: ignore[method-assign]
    perform = StageRunner.perform

    def slowly(runner: StageRunner, action: Action) -> None:
        began_s = time.perf_counter()
        perform(runner, action)
        whole_s = {Kind.FORWARD: FORWARD_S, Kind.BACKWARD: BACKWARD_S}.get(action.kind)
        if whole_s is not None:
            time.sleep(max(0.0, whole_s - (time.perf_counter() - began_s)))
            slept_s.append(time.perf_counter() - began_s)

    StageRunner.perform = slowly  # type: ignore[method-assign]
    return slept_s


def work(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    slept_s = slow_down(options.latency * FORWARD_S)
    model, m = build("mlp"), options.microbatches
    pipe = None
    if dist.get_rank() == 0:
        pipe = pd2bw_fx.split(model, cluster=STAGES, num_stages=STAGES, costs="analytic", check=False)
    batch = model.example_inputs(batch_size=m)
    engines = {
        f"{method} {slack}": pd2bw_fx.Engine.from_pipeline(
            pipe,
            optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.01),
            microbatches_per_update=m,
            method=method,
            slack=slack,
            silence_s=0,
        )
        for method, slack in usable(m)
    }
    shares: dict[str, list[float]] = {name: [] for name in engines}
    for _ in range(options.rounds):
        for name, engine in engines.items():
            for _ in range(2):
                engine.step(batch)
            slept_s.clear()
            began_s = time.perf_counter()
            for _ in range(UPDATES):
                engine.step(batch)
            own_and_all = torch.tensor([sum(slept_s), time.perf_counter() - began_s])
            dist.all_reduce(own_and_all, op=dist.ReduceOp.MAX)
            engine.flush()
            shares[name].append(float(own_and_all[0] / own_and_all[1]))
    if dist.get_rank() == 0:
        options.output.write_text(json.dumps({"microbatches": m, "shares": shares}, indent=1))
    dist.destroy_process_group()


def usable(m: int) -> list[tuple[str, float]]:
    """As far as two weight versions allow, in the steps that the engine takes by itself."""
    least = STAGES - 1
    return [("1f1b", 0.0), *(("2bw", more / least) for more in range(min(least, m - least) + 1))]


def simulated(method: str, slack: float, m: int, latency: float) -> float:
    """The same share by the simulator, in the steady state."""
    links = tuple(LinkTimes(s, s + 1, latency_s=latency * FORWARD_S) for s in range(STAGES - 1))
    durations = Durations((FORWARD_S,) * STAGES, (BACKWARD_S,) * STAGES, (0.0,) * STAGES, links)
    schedule = schedule_of(method, Shape(STAGES, m, slack), updates=range(40), drain=True)
    timeline = simulate_durations(schedule, durations, link_jitter_s=latency * FORWARD_S)
    ends_s = [e.end_s for e in timeline.events if e.rank == STAGES - 1 and e.kind is Kind.UPDATE]
    return 30 * m * (FORWARD_S + BACKWARD_S) / (ends_s[35] - ends_s[5])


def print_table(answer: dict[str, Any], options: argparse.Namespace) -> None:
    m = answer["microbatches"]
    print(f"4 stages, m = {m}, messages late by {options.latency} F and a normal number of that deviation;")
    print("share of the stages' own speed, the engine's by the median of its rounds")
    for method, slack in usable(m):
        found = answer["shares"][f"{method} {slack}"]
        spread = f"({min(found):.3f} to {max(found):.3f})"
        model = simulated(method, slack, m, options.latency)
        told = f"engine {statistics.median(found):.3f} {spread}"
        print(f"    {method:<4} slack {slack:.2f}   simulated {model:.3f}   {told}")


if __name__ == "__main__":
    main()
