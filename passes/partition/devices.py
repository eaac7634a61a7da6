"""Lists the device orders to try: every order that is different in costs, or a sample of them."""

from __future__ import annotations

import itertools
import random
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from pd2bw_fx.cluster import Cluster
from pd2bw_fx.problem import Problem

_MOST_ORDERS = 6000  # enough for all orders of seven unlike devices, or of two hosts with six each
_DRAWN_ORDERS = 1000  # of more than that


@dataclass(frozen=True, slots=True)
class DeviceOrders:
    """Device indices by stage, and whether these are all the orders that there are."""

    orders: tuple[tuple[int, ...], ...]
    are_all: bool = True

    def __len__(self) -> int:
        return len(self.orders)

    def __getitem__(self, choice: int) -> tuple[int, ...]:
        return self.orders[choice]

    def __iter__(self) -> Iterator[tuple[int, ...]]:
        return iter(self.orders)


def device_orders(
    problem: Problem, cluster: Cluster, num_stages: int, *, pinned: Collection[int] = ()
) -> DeviceOrders:
    """Returns one order out of each set of orders that are equal up to swaps of interchangeable devices.

    If there are more than `_MOST_ORDERS`, it returns the devices as they are listed, fastest first, largest
    first, and from each device along the fastest links, and orders made from these by one or two swaps.
    Devices that the user names (`pinned`) are not interchangeable.
    """
    classes = classes_of(problem, cluster, pinned)
    every = _extend((), range(len(cluster)), classes, num_stages)
    found = tuple(itertools.islice(every, _MOST_ORDERS + 1))
    if len(found) <= _MOST_ORDERS:
        return DeviceOrders(found)
    distinct: dict[tuple[int, ...], tuple[int, ...]] = {}
    for order in _likely(problem, cluster):
        distinct.setdefault(tuple(classes[device] for device in order[:num_stages]), order)
    seeds, draw = list(distinct.values()), random.Random(0)
    while len(distinct) < _DRAWN_ORDERS:
        swapped = list(draw.choice(seeds))
        for _ in range(draw.randint(1, 2)):
            a, b = draw.sample(range(len(swapped)), 2)
            swapped[a], swapped[b] = swapped[b], swapped[a]
        distinct.setdefault(tuple(classes[device] for device in swapped[:num_stages]), tuple(swapped))
        seeds = seeds if len(distinct) % 100 else list(distinct.values())
    return DeviceOrders(tuple(order[:num_stages] for order in distinct.values()), are_all=False)


def _likely(problem: Problem, cluster: Cluster) -> Iterator[tuple[int, ...]]:
    """Yields orders of all devices that are likely to be good; the first `num_stages` of each are used."""
    devices = range(len(cluster))
    yield tuple(devices)
    work_s = [sum(block.forward_s[d] + block.backward_s[d] for block in problem.blocks) for d in devices]
    yield tuple(sorted(devices, key=lambda d: work_s[d]))
    yield tuple(sorted(devices, key=lambda d: -cluster.devices[d].memory_bytes))
    for first in devices:
        order = [first]
        while len(order) < len(devices):
            last, left = order[-1], [d for d in devices if d not in order]
            order.append(max(left, key=lambda d: (cluster.bytes_per_s[last][d], -work_s[d])))
        yield tuple(order)


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


def classes_of(problem: Problem, cluster: Cluster, pinned: Collection[int]) -> list[int]:
    """Returns the class of each device, as the index of the first one in it. Swapping two devices of one
    class changes no cost, memory or link."""
    classes: list[int] = []
    firsts: list[int] = []  # a device that can be swapped with the first of a class can with all of it
    for device in range(len(cluster)):
        is_free = device not in pinned
        same = (first for first in firsts if is_free and _swappable(problem, cluster, device, first))
        classes.append(next(same, device))
        if is_free and classes[device] == device:
            firsts.append(device)
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
