"""Assignments that other planners would choose, priced with the same costs as ours.

Each rule cuts the program order into intervals and puts stage s on device s. What a rule does not look at
(memory, links, unlike devices) is priced all the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from pd2bw_fx.cluster import Cluster
from pd2bw_fx.costs import MemoryModel
from pd2bw_fx.errors import InputError
from pd2bw_fx.problem import Problem

from .instance import Floats, Integers, evaluate
from .memory_kept import kept_by
from .reader import Reader, check_problem, topological_order

RULES = ("equal", "parameters", "time", "pipedream")


@dataclass(frozen=True, slots=True)
class Baseline:
    """One rule's assignment, by block name. `fits` is False where some stage exceeds its device's memory."""

    rule: str
    stage_of: Mapping[str, int]
    bottleneck_s: float
    fits: bool


def baselines(
    problem: Problem,
    cluster: Cluster,
    *,
    num_stages: int | None = None,
    overlap: bool = False,
    recompute: bool | Literal["auto"] = False,
    layers: Sequence[Sequence[str]] | None = None,
) -> tuple[Baseline, ...]:
    """Returns the assignments of four rules, priced for 2BW; arguments are those of `partition`.

    - equal: as many layers on every stage, as the 2BW paper does (arXiv 2006.09503, section 3.3); a layer is
      one of `layers` (block names, in order), or one block where they are not given; with recompute="auto"
      all stages recompute if one has to, which is the paper's one flag;
    - parameters: the largest share of parameter bytes is smallest;
    - time: the largest share of forward and backward time is smallest, as torchgpipe does (arXiv 2004.09910);
    - pipedream: the dynamic program of PipeDream without replicas (arXiv 1806.03377, section 3.2): the
      slowest of all stages and links is fastest, links beside the work, memory not looked at.
    """
    check_problem(problem, cluster)
    k = len(cluster) if num_stages is None else num_stages
    if not 1 <= k <= min(len(cluster), len(problem.blocks)):
        raise InputError(f"{k} stages for {len(cluster)} devices and {len(problem.blocks)} blocks")
    instance = Reader(
        problem,
        cluster,
        memory_model=MemoryModel(),
        kept=kept_by("2bw", k, 2 * k),
        overlap=overlap,
        recompute=recompute,
    ).instance(tuple(range(k)))
    blocks = [problem.blocks[at] for at in topological_order(problem)]
    sizes = problem.parameters
    weights = np.array([float(sum(sizes[p].trainable_bytes for p in block.parameters)) for block in blocks])
    time_s = np.array([block.forward_s[0] + block.backward_s[0] for block in blocks])
    names = [block.name for block in blocks]
    cuts = {
        "equal": _equal(names, layers, k),
        "parameters": _balanced(weights, np.zeros(len(blocks) + 1), k),
        "time": _balanced(time_s, np.zeros(len(blocks) + 1), k),
        "pipedream": _balanced(time_s, _crossing_s(problem, cluster, names), k),
    }
    found = []
    for rule in RULES:
        loads = evaluate(instance, cuts[rule])
        if rule == "equal" and any(loads.recompute):
            loads = evaluate(replace(instance, recompute=True), cuts[rule])
        stage_of = dict(zip(names, cuts[rule].tolist(), strict=True))
        found.append(Baseline(rule, stage_of, loads.bottleneck_s, loads.fits))
    return tuple(found)


def _equal(names: Sequence[str], layers: Sequence[Sequence[str]] | None, num_stages: int) -> Integers:
    if layers is None or len(layers) < num_stages:
        return np.arange(len(names)) * num_stages // len(names)
    stage_of_name = {
        name: at * num_stages // len(layers) for at, layer in enumerate(layers) for name in layer
    }
    # Blocks outside of all layers (the embedding and the head) go to the stage of the block before them.
    stages, stage = [], 0
    for name in names:
        stage = max(stage, stage_of_name.get(name, stage))
        stages.append(stage)
    return np.array(stages)


def _balanced(amounts: Floats, crossing: Floats, num_stages: int) -> Integers:
    """Returns intervals whose largest sum or crossing cost is smallest; crossing[i] is for a cut before i."""
    n = len(amounts)
    sums = np.concatenate(([0.0], amounts.cumsum()))
    share = sums[None, :] - sums[:, None]
    share[np.tri(n + 1, dtype=bool)] = np.inf
    inner = np.array(crossing, dtype=float)
    inner[0] = 0.0
    share = np.maximum(share, inner[:, None])
    reached = np.full(n + 1, np.inf)
    reached[0] = 0.0
    cuts = []
    for _ in range(num_stages):
        through = np.maximum(reached[:, None], share)
        cuts.append(through.argmin(axis=0))
        reached = through.min(axis=0)
    stage_of = np.zeros(n, dtype=np.int64)
    end = n
    for stage in reversed(range(num_stages)):
        start = int(cuts[stage][end])
        stage_of[start:end] = stage
        end = start
    return stage_of


def _crossing_s(problem: Problem, cluster: Cluster, names: Sequence[str]) -> Floats:
    """Returns, for a cut at each position, the time of the slowest link for all that crosses it both ways."""
    position = {name: at for at, name in enumerate(names)}
    pairs = [(a, b) for a in range(len(cluster)) for b in range(len(cluster)) if a != b]
    slowest = min((cluster.bytes_per_s[a][b] for a, b in pairs), default=np.inf)
    crossing = np.zeros(len(names) + 1)
    for value in problem.values:
        last = max((position[name] for name in value.consumers), default=position[value.producer])
        crossing[position[value.producer] + 1 : last + 1] += (value.bytes + value.gradient_bytes) / slowest
    return crossing
