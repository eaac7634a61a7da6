"""2BW beside the hardware's bound and beside torch's own engines, on the same stages, in one run.

    python benchmarks/runtime.py [--processes 2] [--microbatches 2 4 8] [--rounds 4] [--vocabulary 512]
        [--plot FILE] [-o FILE]

20 minutes for all; --only bound "torch 1F1B" takes a few. --only "2bw compiled" "torch 1F1B compiled" has
torch.compile compile the same stages for both, which takes a minute more.

Every process has one thread. In each round every contender trains the same number of updates, and 2BW does so
before and after each of them: what counts is a contender's time over 2BW's right beside it, so that drift of
the machine cancels, which is a tenth within seconds. Many short rounds (--rounds 20 --updates 3) are surer
than a few long ones. 2BW's pipeline stays filled while the others have their turn. A ratio of two contenders
is the median of its rounds.

"bound" is the stages' compute on all processes at once without any communication, "without messages" the
same in 2BW's order, with its microbatches in flight and its copy of the weights. Where stages differ, 1F1B
loses less than (m + 1) / m of it: the table says how much by the stages' times in the bound, for as many
processes as there are cores. The smaller the vocabulary, the smaller the head, by which they differ here.
"""

from __future__ import annotations

import argparse
import functools
import gc
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from launch import told_under_torchrun
from peers import (
    CONFIG,
    INTERLEAVED_PEERS,
    MICROBATCH,
    PLAIN_PEERS,
    Update,
    bound,
    data_parallel,
    make_engine,
    one_process,
    torch_pipeline,
    with_weights,
    without_messages,
)

import pd2bw_fx
from pd2bw_fx.models.gpt import GPT

RATIOS = (
    ("2bw", "bound"),
    ("2bw", "without messages"),
    ("without messages", "bound"),
    ("2bw", "torch 1F1B"),
    ("2bw", "torch GPipe"),
    ("2bw", "torch interleaved"),
    ("2bw", "torch interleaved ZB"),
    ("2bw", "DDP"),
    ("2bw", "one process"),
    ("1f1b", "torch 1F1B"),
    ("gpipe", "torch GPipe"),
    ("interleaved", "torch interleaved"),
    ("2bw compiled", "2bw"),
    ("2bw compiled", "torch 1F1B compiled"),
)
ONLY_IF_NAMED = ("2bw compiled", "torch 1F1B compiled")
WARM_UP = 1  # updates of a turn before the clock starts
Times = dict[str, list[float]]
Clock = Callable[[list[float]], float]  # what the processes' seconds count as
CLOCKS: dict[str, Clock] = {"slowest": max, "mean": statistics.mean}
Contender = tuple[Update, Update]  # one update, and what to do after the last round


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--microbatches", type=int, nargs="+", default=[2, 4, 8])
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--updates", type=int, default=8, help="updates of each contender in a round")
    parser.add_argument("--vocabulary", type=int, default=CONFIG.vocab_size, help="of the GPT")
    parser.add_argument("--layers", type=int, default=CONFIG.num_layers)
    parser.add_argument("--clock", choices=list(CLOCKS), default="slowest", help="of the processes")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="measure only these, and 2bw")
    parser.add_argument("--plot", type=Path, help="a picture of the ratios")
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    if "RANK" in os.environ:
        work(options)
        return
    answer = told_under_torchrun(__file__, options.processes, options.output)
    print_table(answer)
    if options.plot:
        plot(answer, options.plot)


def work(options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    config = replace(CONFIG, vocab_size=options.vocabulary, num_layers=options.layers)
    model = GPT.from_config(config)
    num_ranks = dist.get_world_size()
    whole, chunks = None, None
    if dist.get_rank() == 0:
        example = model.example_inputs(batch_size=MICROBATCH)
        whole = pd2bw_fx.split(model, example, cluster=num_ranks)
        chunks = pd2bw_fx.split(model, example, cluster=num_ranks, method="interleaved", chunks=2)
    runs = []
    for m in options.microbatches:
        if m >= num_ranks:
            engines: list[pd2bw_fx.Engine] = []
            makers = contenders(whole, chunks, model, m, engines)
            wanted = {"2bw", *(options.only or (n for n in makers if n not in ONLY_IF_NAMED))}
            made = {name: make() for name, make in makers.items() if name in wanted}
            seconds, beside, stages = measured(made, options.rounds, options.updates, CLOCKS[options.clock])
            runs.append({"microbatches": m, "seconds": seconds, "over 2bw": beside, "stages": stages})
            for engine in engines:
                engine.close()  # each has threads that wake a hundred times a second
            del made, makers, engines
            gc.collect()
    if dist.get_rank() == 0:
        answer = {"processes": num_ranks, "config": str(config), "runs": runs}
        options.output.write_text(json.dumps(answer, indent=1))
    dist.destroy_process_group()


def contenders(
    whole: pd2bw_fx.Pipeline | None,
    chunks: pd2bw_fx.Pipeline | None,
    model: GPT,
    m: int,
    engines: list[pd2bw_fx.Engine],
) -> dict[str, Callable[[], Contender]]:
    batch = model.example_inputs(batch_size=MICROBATCH * m)

    def ours(pipe: pd2bw_fx.Pipeline | None, method: str, **options: bool) -> Contender:
        engine = make_engine(pipe, method, m, **options)
        engines.append(engine)
        return functools.partial(engine.step, batch), engine.flush

    def theirs(kind: Any, pipe: pd2bw_fx.Pipeline | None, method: str, **options: bool) -> Contender:
        job = with_weights(make_engine(pipe, method, m))
        return torch_pipeline(kind, job, batch, m, **options), nothing

    def alone(compute: Callable[..., Update]) -> Contender:
        return compute(with_weights(make_engine(whole, "2bw", m)), batch, m), nothing

    made: dict[str, Callable[[], Contender]] = {
        method: functools.partial(ours, whole, method) for method in ("2bw", "1f1b", "gpipe")
    }
    for name, compute in (("bound", bound), ("without messages", without_messages)):
        made[name] = functools.partial(alone, compute)
    made["2bw compiled"] = functools.partial(ours, whole, "2bw", is_compiled=True)
    made["torch 1F1B compiled"] = functools.partial(
        theirs, PLAIN_PEERS["torch 1F1B"], whole, "1f1b", is_compiled=True
    )
    for name, kind in PLAIN_PEERS.items():
        made[name] = functools.partial(theirs, kind, whole, "1f1b")
    if m % dist.get_world_size() == 0:
        made["interleaved"] = functools.partial(ours, chunks, "interleaved")
        for name, kind in INTERLEAVED_PEERS.items():
            made[name] = functools.partial(theirs, kind, chunks, "interleaved")
        made["DDP"] = lambda: (data_parallel(model, batch, m), nothing)
    made["one process"] = lambda: (one_process(model, batch, m), nothing)
    return made


def nothing() -> None:
    """A synchronous contender has nothing left to do."""


def measured(
    contenders: dict[str, Contender], rounds: int, updates: int, clock: Clock
) -> tuple[Times, Times, list[list[float]]]:
    """For each round after a first, which fills the pipeline: seconds an update, these over 2BW's beside it,
    and of each process in the bound."""
    seconds: Times = {name: [] for name in contenders}
    beside: Times = {name: [] for name in contenders}
    stages: list[list[float]] = []
    others = [name for name in contenders if name != "2bw"]
    for number in range(rounds + 1):
        before_s = clock(seconds_of(contenders["2bw"][0], updates))
        own_s = [before_s]
        for name in others:
            of_processes_s = seconds_of(contenders[name][0], updates)
            took_s = clock(of_processes_s)
            after_s = clock(seconds_of(contenders["2bw"][0], updates))
            own_s.append(after_s)
            if number > 0:
                seconds[name].append(took_s)
                beside[name].append(2 * took_s / (before_s + after_s))
                if name == "bound":
                    stages.append(of_processes_s)
            before_s = after_s
        if number > 0:
            seconds["2bw"].append(statistics.median(own_s))
            beside["2bw"].append(1.0)
    for _, finish in contenders.values():
        finish()
    return seconds, beside, stages


def seconds_of(update: Update, updates: int) -> list[float]:
    """Seconds an update, of each process.

    Nobody flushes at the end: 2BW is timed in its steady state, with its pipeline as full as its last turn
    left it. Whose clock counts makes a difference where processes share cores: the last of the bound's
    processes, which wait for nobody, ends alone.
    """
    dist.barrier()
    for _ in range(WARM_UP):
        update()
    began = time.perf_counter()
    for _ in range(updates):
        update()
    took = torch.tensor([(time.perf_counter() - began) / updates], dtype=torch.float64)
    everyone = [torch.empty_like(took) for _ in range(dist.get_world_size())]
    dist.all_gather(everyone, took)
    return [float(each) for each in everyone]


def ideal_1f1b(run: dict[str, Any]) -> float:
    """An update of 1F1B over the slowest stage's own, by the stages' times in the bound.

    The first microbatch takes all stages' times, each of the others the slowest's.
    """
    m = run["microbatches"]
    return statistics.median((sum(s) + (m - 1) * max(s)) / (m * max(s)) for s in run["stages"])


def ratios(run: dict[str, Any], ours: str, theirs: str) -> list[float]:
    beside = run["over 2bw"]
    return [b / a for a, b in zip(beside[ours], beside[theirs], strict=True)]


def known_ratios(run: dict[str, Any]) -> list[tuple[str, str]]:
    return [(ours, theirs) for ours, theirs in RATIOS if {ours, theirs} <= run["seconds"].keys()]


def print_table(answer: dict[str, Any]) -> None:
    print(f"{answer['processes']} processes, one thread each; medians of ratios of speed, one round each")
    for run in answer["runs"]:
        seconds = run["seconds"]
        medians = ", ".join(f"{name} {statistics.median(t) * 1e3:.0f} ms" for name, t in seconds.items())
        print(f"\nm = {run['microbatches']}: {medians}")
        for ours, theirs in known_ratios(run):
            found = ratios(run, ours, theirs)
            spread = f"{min(found):.3f} to {max(found):.3f}"
            print(f"    {ours:>11} / {theirs:<20} {statistics.median(found):.3f}   ({spread})")
        if run["stages"] and answer["processes"] <= len(os.sched_getaffinity(0)):
            times = ", ".join(f"{statistics.median(s) * 1e3:.0f}" for s in zip(*run["stages"], strict=True))
            print(f"    the stages' own {times} ms an update; 1F1B ideally {ideal_1f1b(run):.3f} of that")


def plot(answer: dict[str, Any], path: Path) -> None:
    """2BW over each of the others, with the rounds' spread."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 3.2), layout="constrained")
    names = [theirs for ours, theirs in known_ratios(answer["runs"][0]) if ours == "2bw"]
    width = 0.8 / len(answer["runs"])
    for number, run in enumerate(answer["runs"]):
        found = [ratios(run, "2bw", name) for name in names]
        medians = [statistics.median(values) for values in found]
        spread = [
            [median - min(values) for median, values in zip(medians, found, strict=True)],
            [max(values) - median for median, values in zip(medians, found, strict=True)],
        ]
        places = [index + (number - (len(answer["runs"]) - 1) / 2) * width for index in range(len(names))]
        bars = axes.bar(places, medians, width * 0.9, label=f"m = {run['microbatches']}")
        axes.errorbar(places, medians, spread, fmt="none", ecolor="gray", elinewidth=1)
        axes.bar_label(bars, fmt="%.2f", fontsize=7, padding=2)
    axes.axhline(1.0, color="gray", linewidth=0.8)
    axes.set_xticks(range(len(names)), [name.replace("torch ", "torch\n") for name in names])
    axes.set_ylabel("speed of 2BW over")
    axes.set_title(f"{answer['processes']} processes")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    main()
