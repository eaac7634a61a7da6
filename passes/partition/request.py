"""What the planner is asked for, and the instances to search for it; also with more memory or stages."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from pd2bw_fx.cluster import Cluster
from pd2bw_fx.costs import Kept, MemoryModel
from pd2bw_fx.errors import InputError
from pd2bw_fx.problem import Problem

from .choices import Choices
from .constrain import Pin
from .devices import DeviceOrders, classes_of, device_orders
from .reader import Reader

# Takes a number of stages, and returns what the method keeps at each of them.
Keeping: TypeAlias = Callable[[int], Sequence[Kept]]


@dataclass(frozen=True, slots=True)
class SearchRequest:
    """A problem that the user's constraints have been applied to, and how to plan it.

    `order` is the device of each stage, or None where the planner is free to choose.
    """

    problem: Problem
    cluster: Cluster
    num_stages: int
    keeping: Keeping
    pins: tuple[Pin, ...] = ()
    memory_model: MemoryModel = MemoryModel()  # noqa: RUF009 - frozen
    overlap: bool = False
    recompute: bool | Literal["auto"] = False
    order: tuple[int, ...] | None = None

    @property
    def kept(self) -> tuple[Kept, ...]:
        """What the method keeps at each stage. Raises InputError where it cannot have so many stages."""
        kept = tuple(self.keeping(self.num_stages))
        if len(kept) != self.num_stages:
            raise InputError(
                f"kept gives {len(kept)} entries for {self.num_stages} stages; give one for each"
            )
        return kept

    def orders(self) -> DeviceOrders:
        """Returns the device orders to try."""
        if self.order is not None:
            return DeviceOrders((self.order,))
        return device_orders(self.problem, self.cluster, self.num_stages, pinned=self._pinned)

    def one_of_each(self, devices: Sequence[int]) -> list[int]:
        """Returns one of each set of interchangeable devices: what is true of one is true of the others."""
        if self.order is not None:
            return list(devices)
        classes = classes_of(self.problem, self.cluster, self._pinned)
        firsts: dict[int, int] = {}
        for device in devices:
            firsts.setdefault(classes[device], device)
        return list(firsts.values())

    @property
    def _pinned(self) -> set[int]:
        return {device for pin in self.pins for device in pin.devices or ()}

    def with_memory(self, num_bytes: Mapping[int, int]) -> SearchRequest:
        """Returns the request with other memory for some devices.

        Devices that were interchangeable may no longer be, so `orders` can change.
        """
        devices = tuple(
            replace(device, memory_bytes=num_bytes.get(at, device.memory_bytes))
            for at, device in enumerate(self.cluster.devices)
        )
        return replace(self, cluster=replace(self.cluster, devices=devices))

    def choices(self, orders: DeviceOrders) -> Choices:
        reader = Reader(
            self.problem,
            self.cluster,
            memory_model=self.memory_model,
            kept=self.kept,
            overlap=self.overlap,
            recompute=self.recompute,
            pins=self.pins,
        )
        return Choices(
            len(orders),
            lambda choice: reader.instance(orders[choice]),
            are_all=orders.are_all,
            work_s=reader.work_s,
            memory_key=lambda choice: tuple(map(self._memory_key, orders[choice])),
        )

    def _memory_key(self, device: int) -> tuple[int, tuple[bool, ...]]:
        """The device's memory, and which of the pinned blocks may be on it."""
        allowed = tuple(pin.devices is None or device in pin.devices for pin in self.pins)
        return self.cluster.devices[device].memory_bytes, allowed

    def with_stages(self, num_stages: int) -> SearchRequest:
        """Returns the request for so many stages, on free devices and then on further ones like the last."""
        problem, cluster, last = self.problem, self.cluster, len(self.cluster) - 1
        for number in range(2, 2 + max(0, num_stages - len(cluster))):
            problem = one_device_more(problem, last)
            cluster = and_another(cluster, last, f"{self.cluster.devices[last].name}, number {number}")
        return replace(self, problem=problem, cluster=cluster, num_stages=num_stages)


def one_device_more(problem: Problem, copied: int) -> Problem:
    """Returns the problem with a further device, on which all costs are those of `copied`."""
    blocks = tuple(
        replace(
            block,
            forward_s=(*block.forward_s, block.forward_s[copied]),
            backward_s=(*block.backward_s, block.backward_s[copied]),
        )
        for block in problem.blocks
    )
    return replace(problem, blocks=blocks)


def and_another(cluster: Cluster, copied: int, name: str) -> Cluster:
    """Returns the cluster with a further device like `copied`.

    Its link to that device is as fast as the fastest that `copied` has; its other links are as those of
    `copied`.
    """
    device = replace(cluster.devices[copied], name=name)
    return Cluster(
        (*cluster.devices, device),
        _grown(cluster.bytes_per_s, copied, max, default=1e9),
        _grown(cluster.latency_s, copied, min, default=0.0),
    )


def _grown(
    matrix: tuple[tuple[float, ...], ...],
    copied: int,
    best: Callable[[Sequence[float]], float],
    *,
    default: float,
) -> tuple[tuple[float, ...], ...]:
    others = [entry for at, entry in enumerate(matrix[copied]) if at != copied]
    inside = best(others) if others else default
    rows = [(*row, inside if at == copied else row[copied]) for at, row in enumerate(matrix)]
    last = tuple(inside if at == copied else entry for at, entry in enumerate(matrix[copied]))
    return (*rows, (*last, 0.0))
