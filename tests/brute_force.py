"""The exhaustive search that the planner is held against."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from pd2bw_fx.cluster import Cluster
from pd2bw_fx.costs import Kept
from pd2bw_fx.problem import Problem, Value


def brute_force(
    problem: Problem, cluster: Cluster, kept: Sequence[Kept], *, overlap: bool, recompute: Any
) -> float | None:
    """Returns the least bottleneck over all assignments of blocks and devices; None if none fits."""
    stage_of = _assignments(problem, num_stages=len(kept))
    best = math.inf
    for devices in itertools.permutations(range(len(cluster)), len(kept)):
        slowest = np.zeros(len(stage_of))
        for stage in range(len(kept)):
            one = _Stage(problem, cluster, stage_of, devices, stage)
            work_s = one.work_s(kept[stage], recompute)
            links_s, _ = one.crossings
            slowest = np.maximum(slowest, np.maximum(work_s, links_s) if overlap else work_s + links_s)
        best = min(best, float(slowest.min(initial=math.inf)))
    return None if math.isinf(best) else best


def _assignments(problem: Problem, num_stages: int) -> Any:
    """Returns the stage of each block, (assignments, blocks): no stage is empty, and no value goes back."""
    at = {block.name: position for position, block in enumerate(problem.blocks)}
    stage_of = np.array(list(itertools.product(range(num_stages), repeat=len(at))))
    keep = np.ones(len(stage_of), dtype=bool)
    for value in problem.values:
        for consumer in value.consumers:
            keep &= stage_of[:, at[value.producer]] <= stage_of[:, at[consumer]]
    for stage in range(num_stages):
        keep &= (stage_of == stage).any(axis=1)
    return stage_of[keep]


@dataclass(frozen=True)
class _Moment:
    """What a stage's memory holds at one moment, besides its weights."""

    in_flight: int  # microbatches
    gradients: int  # copies
    recomputed: int  # microbatches whose activations are there under recomputation
    working: Any  # bytes of temporaries


@dataclass(frozen=True)
class _Stage:
    """One stage under every assignment at once: what it returns has an entry for each of them."""

    problem: Problem
    cluster: Cluster
    stage_of: Any  # (assignments, blocks)
    devices: tuple[int, ...]  # of all stages
    stage: int

    def work_s(self, kept: Kept, recompute: Any) -> Any:
        """Returns the time of forward and backward, infinite where they do not fit in memory."""
        device = self.devices[self.stage]
        forward_s = self._sum([block.forward_s[device] for block in self.problem.blocks])
        backward_s = self._sum([block.backward_s[device] for block in self.problem.blocks])
        keeps, repeats = self._fits(kept)
        keeping_s = np.where(keeps, forward_s + backward_s, math.inf)
        repeating_s = np.where(repeats, 2 * forward_s + backward_s, math.inf)
        if recompute == "auto":
            return np.where(keeps, keeping_s, repeating_s)
        return repeating_s if recompute else keeping_s

    @cached_property
    def crossings(self) -> tuple[Any, Any]:
        """Seconds on this stage's links, and the bytes of the values that cross them."""
        links_s, num_bytes = np.zeros(len(self.stage_of)), np.zeros(len(self.stage_of))
        at = {block.name: position for position, block in enumerate(self.problem.blocks)}
        for value in self.problem.values:
            source = self.stage_of[:, at[value.producer]]
            readers = self.stage_of[:, [at[name] for name in value.consumers]]
            crosses = np.zeros(len(self.stage_of), dtype=bool)
            for other in set(range(len(self.devices))) - {self.stage}:
                sends = (source == self.stage) & (readers == other).any(axis=1)
                receives = (source == other) & (readers == self.stage).any(axis=1)
                links_s += sends * self._round_trip_s(self.stage, other, value)
                links_s += receives * self._round_trip_s(other, self.stage, value)
                crosses |= sends | receives
            num_bytes += value.bytes * crosses
        return links_s, num_bytes

    def _fits(self, kept: Kept) -> tuple[Any, Any]:
        """Returns where memory is enough to keep activations, and to recompute them in the backward.

        With momentum there are the weights' versions, a gradient and a moment, and while the optimizer steps
        a parameter, another copy of that one.
        """
        limit = self.cluster.devices[self.devices[self.stage]].memory_bytes
        saved = self._sum([block.saved_bytes for block in self.problem.blocks])
        _, crossing = self.crossings
        weights, gradients = self._weights_and_gradients(kept)
        keeps = repeats = np.ones(len(self.stage_of), dtype=bool)
        for moment in self._moments(kept):
            fixed = weights + moment.gradients * gradients + moment.in_flight * crossing + moment.working
            keeps = keeps & (fixed + moment.in_flight * saved <= limit)
            repeats = repeats & (fixed + moment.recomputed * saved <= limit)
        return keeps, repeats

    def _moments(self, kept: Kept) -> Iterator[_Moment]:
        """Yields the moments at which memory may be fullest."""
        blocks, n = self.problem.blocks, kept.in_flight
        workspace = self._most([block.workspace_bytes for block in blocks])
        if kept.gradients_wait:  # before, and after, the backward that makes the update's first gradients
            yield _Moment(n, 0, 1, workspace)
            yield _Moment(n - 1, 1, 0 if kept.updates_each else 1, workspace)
        else:
            yield _Moment(n, 1, 1, workspace)
        sizes = self.problem.parameters
        largest = [max((sizes[name].trainable_bytes for name in b.parameters), default=0) for b in blocks]
        yield _Moment(0 if kept.flushes else n - 1, 1, 0, self._most(largest))  # the optimizer steps

    def _weights_and_gradients(self, kept: Kept) -> tuple[Any, Any]:
        """Returns the bytes of weights with their moment, and of gradients; shared parameters count once."""
        weights, gradients = np.zeros(len(self.stage_of)), np.zeros(len(self.stage_of))
        for parameter, size in self.problem.parameters.items():
            users = [at for at, block in enumerate(self.problem.blocks) if parameter in block.parameters]
            is_here = self._is_here[:, users].any(axis=1)
            weights += is_here * ((kept.weight_versions + 1) * size.trainable_bytes + size.frozen_bytes)
            gradients += is_here * size.trainable_bytes
        return weights, gradients

    @property
    def _is_here(self) -> Any:
        return self.stage_of == self.stage

    def _sum(self, of_blocks: Sequence[float]) -> Any:
        return self._is_here @ np.array(of_blocks)

    def _most(self, of_blocks: Sequence[float]) -> Any:
        return (self._is_here * np.array(of_blocks)).max(axis=1)

    def _round_trip_s(self, source: int, target: int, value: Value) -> float:
        """Returns the seconds of a value from one stage to another, and of its gradient, if any, back."""
        start, end = self.devices[source], self.devices[target]
        latency_s, bytes_per_s = self.cluster.latency_s, self.cluster.bytes_per_s
        there_s = latency_s[start][end] + value.bytes / bytes_per_s[start][end]
        back_s = latency_s[end][start] + value.gradient_bytes / bytes_per_s[end][start]
        return there_s + (back_s if value.gradient_bytes else 0.0)
