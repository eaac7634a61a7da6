"""Does a simulated update take as long as a real one? Every method, on two processes of this machine.

    python benchmarks/simulated.py [--models gpt resnet] [--methods 2bw 1f1b] [--rounds 5] [-o simulated.json]

Every process has one thread. In a round, both processes profile the model's operators at the same time, as
they compute at the same time in training; a few updates of 1f1b, zb-h1 and chimera are recorded, which tell
what the engine takes besides (`calibrate`); then every method trains a few updates, one method after another.
The machine drifts by a tenth within seconds, so 1f1b is recorded again between any two methods, and each is
simulated with what the recordings right before and after it took. No other method is timed before it is
simulated. An update's time is one of the steady state, on the slower process: the median of a round's
updates; the ratio of the two is the median over rounds. Links are measured once for each model.

Exits with 1 if the median error is more than 5%, or if two methods whose times differ by more than 5% in the
same direction in every round are simulated in another order.
"""

from __future__ import annotations

import argparse
import functools
import gc
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from launch import told_under_torchrun
from rich import box
from rich.console import Console
from rich.table import Table
from torch import nn

import pd2bw_fx
from pd2bw_fx.costs import Calibration
from pd2bw_fx.metrics import timeline_of
from pd2bw_fx.models.encdec import EncDec, EncDecConfig
from pd2bw_fx.models.gpt import GPT, GPTConfig
from pd2bw_fx.models.resnet import ResNet, ResNetConfig
from pd2bw_fx.passes.profile import profile
from pd2bw_fx.passes.schedule import METHODS, schedule_of
from pd2bw_fx.passes.simulate import calibrate, simulate
from pd2bw_fx.passes.trace import trace
from pd2bw_fx.pipeline import Pipeline
from pd2bw_fx.plan import Plan
from pd2bw_fx.probe import probe
from pd2bw_fx.timeline import Timeline

TOLERANCE = 0.05
MODELS: Mapping[str, Callable[[], nn.Module]] = {
    "gpt": lambda: GPT(
        GPTConfig(512, sequence_length=64, num_layers=4, num_heads=4, width=192, dropout=0.0, tied=False)
    ),
    "resnet": lambda: ResNet(ResNetConfig(width=24, image_size=24)),
    "encdec": lambda: EncDec(EncDecConfig(512, width=192, source_length=24, target_length=20, dropout=0.0)),
}
MICROBATCH_SIZE = 4
UPDATES_SIMULATED = 8
RECORDED = ("1f1b", "zb-h1", "chimera")  # what tells of the engine, of halves and of all-reduces
OWN_PLAN = ("interleaved", "bapipe", "zb-auto", "ddp")  # the others train the stages of 2bw
RECORDED_CALLS = 8
OPTIMIZER = functools.partial(torch.optim.AdamW, lr=1e-4)


@dataclass(slots=True)
class Contender:
    """A method with its engine, and the pipeline that it is simulated on."""

    method: str
    pipe: Pipeline
    engine: pd2bw_fx.Engine


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    trained = [name for name, method in METHODS.items() if method.trains]
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--methods", nargs="+", choices=trained, default=trained)
    parser.add_argument("--microbatches", type=int, nargs="+", default=[4, 8])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--updates", type=int, default=3, help="updates of each method in a round")
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    if "RANK" in os.environ:
        work(options)
        return 0
    return judge(told_under_torchrun(__file__, 2, options.output))


def work(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    runs = []
    for name, m in itertools.product(options.models, options.microbatches):
        torch.manual_seed(0)
        gc.collect()  # with the engines of the last model their threads end
        for method, pairs in measured(MODELS[name](), m, options).items():
            runs.append({"model": name, "microbatches": m, "method": method, "pairs": pairs})
    if dist.get_rank() == 0:
        options.output.write_text(json.dumps(runs, indent=1))
    dist.destroy_process_group()


def measured(model: nn.Module, m: int, options: argparse.Namespace) -> dict[str, list[tuple[float, float]]]:
    """By method: simulated and real seconds of an update, for each round after a first that warms up."""
    example = model.example_inputs(batch_size=MICROBATCH_SIZE)  # type: ignore[operator]
    batch = model.example_inputs(batch_size=MICROBATCH_SIZE * m)  # type: ignore[operator]
    common = pd2bw_fx.split(model, example, cluster=probe("cpu"), costs="analytic", check=False)
    whole = trace(model, example, {}).call
    contenders = list(made(model, example, common, m, options.methods))
    plain, halves, sums = made(model, example, common, m, RECORDED)
    pairs: dict[str, list[tuple[float, float]]] = {each.method: [] for each in contenders}
    for number in range(options.rounds + 1):
        dist.barrier()
        costs = profile(
            common.graph, common.example, device=common.cluster.devices[0], method="measured", whole=whole
        )
        plan = priced(common.plan, costs)
        before = timeline_of_run(plain, batch, options.updates)
        of_halves = calibrate(plan, [before, timeline_of_run(halves, batch, options.updates)])
        of_sums = calibrate(plan, [before, timeline_of_run(sums, batch, options.updates)])
        for each in contenders:
            real_s = timed(each.engine, batch, options.updates)
            after = timeline_of_run(plain, batch, options.updates)
            known = replace(
                calibrate(plan, [before, after]),
                halves=of_halves.halves,
                weight_share=of_halves.weight_share,
                shared=of_sums.shared,
                ring_s_per_byte=of_sums.ring_s_per_byte,
            )
            if number > 0:
                pairs[each.method].append((update_s(simulated(each, costs, known)), real_s))
            before = after
    for each in (*contenders, plain, halves, sums):
        each.engine.close()  # each has threads that wake a hundred times a second
    return pairs


def made(
    model: nn.Module, example: Any, common: Pipeline, m: int, methods: Sequence[str]
) -> Iterator[Contender]:
    for method in methods:
        pipe = common
        if method in OWN_PLAN:
            pipe = pd2bw_fx.split(
                model,
                example,
                cluster=common.cluster,
                method=method,
                microbatches_per_update=m,
                costs=common.costs,
                check=False,
            )
        engine = pd2bw_fx.Engine.from_pipeline(
            pipe,
            optimizer=OPTIMIZER,
            microbatches_per_update=m,
            method=method,
            silence_s=0,
            record=RECORDED_CALLS,
        )
        yield Contender(method, pipe, engine)


def timeline_of_run(each: Contender, batch: Any, updates: int) -> Timeline:
    for _ in range(updates):
        each.engine.step(batch)
    each.engine.flush()
    m = each.engine.job.microbatches_per_update
    return timeline_of(each.engine.records(), method=each.method, microbatches_per_update=m)


def simulated(each: Contender, costs: pd2bw_fx.Costs, known: Calibration) -> Timeline:
    """The engine's own schedule on the plan with the round's times."""
    work, plan = each.engine.job.work, priced(each.pipe.plan, costs)
    schedule = schedule_of(work.method, work.shape, updates=range(UPDATES_SIMULATED), drain=True)
    return simulate(schedule, plan, each.pipe.cluster, calibration=known)


def priced(plan: Plan, costs: pd2bw_fx.Costs) -> Plan:
    stages = []
    for stage in plan.stages:
        own = [costs.operators[name] for name in stage.operators]
        forward_s, backward_s = sum(cost.forward_s for cost in own), sum(cost.backward_s for cost in own)
        stages.append(replace(stage, forward_s=forward_s, backward_s=backward_s))
    return replace(plan, stages=tuple(stages))


def update_s(timeline: Timeline) -> float:
    return timeline.microbatches_per_update / timeline.throughput


def timed(engine: pd2bw_fx.Engine, batch: Any, updates: int) -> float:
    """Seconds of a typical update on the slower process, its pipeline filled before the clock starts."""
    engine.step(batch)
    dist.barrier()
    clock = [time.perf_counter()]
    for _ in range(updates):
        engine.step(batch)
        clock.append(time.perf_counter())
    engine.flush()
    took = torch.tensor([statistics.median(b - a for a, b in itertools.pairwise(clock))])
    dist.all_reduce(took, op=dist.ReduceOp.MAX)
    return float(took)


def judge(runs: list[dict[str, Any]]) -> int:
    table = Table("model", "m", "method", "real ms", "simulated ms", "error", "rounds", box=box.MARKDOWN)
    errors, cases = [], dict[tuple[str, int], dict[str, list[tuple[float, float]]]]()
    for run in runs:
        ratios = [simulated_s / real_s - 1 for simulated_s, real_s in run["pairs"]]
        error = statistics.median(ratios)
        errors.append(abs(error))
        simulated_s, real_s = (statistics.median(column) for column in zip(*run["pairs"], strict=True))
        cases.setdefault((run["model"], run["microbatches"]), {})[run["method"]] = run["pairs"]
        table.add_row(
            run["model"],
            str(run["microbatches"]),
            run["method"],
            f"{real_s * 1e3:.1f}",
            f"{simulated_s * 1e3:.1f}",
            f"{error:+.1%}",
            f"{min(ratios):+.1%} to {max(ratios):+.1%}",
        )
    console = Console()
    console.print(table)
    judged, swapped = 0, list[str]()
    for (model, m), methods in cases.items():
        for (one, a), (other, b) in itertools.combinations(methods.items(), 2):
            real = [x[1] / y[1] for x, y in zip(a, b, strict=True)]
            if min(real) <= 1 + TOLERANCE and max(real) >= 1 / (1 + TOLERANCE):
                continue
            judged += 1
            simulated_ratio = statistics.median(x[0] / y[0] for x, y in zip(a, b, strict=True))
            if (simulated_ratio > 1) != (min(real) > 1):
                swapped.append(f"{model}, m = {m}: {one} and {other}")
    console.print(f"median error {statistics.median(errors):.1%}, worst {max(errors):.1%}")
    console.print(f"{judged} pairs of methods differ by more than {TOLERANCE:.0%} in every round")
    for pair in swapped:
        console.print(f"simulated in another order: {pair}")
    return int(statistics.median(errors) > TOLERANCE or bool(swapped))


if __name__ == "__main__":
    sys.exit(main())
