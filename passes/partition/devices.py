"""Which device takes which stage: every order of the devices that differs from the others."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from pd2bw_fx.cluster import Cluster
from pd2bw_fx.problem import Problem


def device_orders(
    problem: Problem, cluster: Cluster, num_stages: int, *, pinned: Collection[int] = ()
) -> Iterator[tuple[int, ...]]:
    """Device indices by stage, one order out of each set that swaps of interchangeable devices make equal.

    Devices that the user names (`pinned`) are like no other.
    """
    classes = _interchangeable(problem, cluster, pinned)
    yield from _extend((), range(len(cluster)), classes, num_stages)


def _extend(
    taken: tuple[int, ...], devices: Sequence[int], classes: list[int], num_stages: int
) -> Iterator[tuple[int, ...]]:
    if len(taken) == num_stages:
        yield taken
        return
    tried: set[int] = set()
    for device in devices:
        # Of equal devices the one with the lowest index goes first.
        if device in taken or classes[device] in tried:
            continue
        tried.add(classes[device])
        yield from _extend((*taken, device), devices, classes, num_stages)


def _interchangeable(problem: Problem, cluster: Cluster, pinned: Collection[int]) -> list[int]:
    """A class for each device: swapping two devices of one class changes no cost, memory or link."""
    classes: list[int] = []
    for device in range(len(cluster)):
        free = [] if device in pinned else [other for other in range(device) if other not in pinned]
        same = [other for other in free if _swappable(problem, cluster, device, other)]
        classes.append(classes[same[0]] if same else device)
    return classes


def _swappable(problem: Problem, cluster: Cluster, a: int, b: int) -> bool:
    if cluster.devices[a].memory_bytes != cluster.devices[b].memory_bytes:
        return False
    for block in problem.blocks:
        if block.forward_s[a] != block.forward_s[b] or block.backward_s[a] != block.backward_s[b]:
            return False
    for matrix in (cluster.bytes_per_s, cluster.latency_s):
        if matrix[a][b] != matrix[b][a]:
            return False
        for c in range(len(cluster)):
            if c not in (a, b) and (matrix[a][c] != matrix[b][c] or matrix[c][a] != matrix[c][b]):
                return False
    return True
