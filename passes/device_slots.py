"""Device slots: where a method puts stages, as a cluster that partition can plan on.

`Placing`     slots
row           one for each device: the cluster as it is
round         several for each device, each with an equal share of its memory
both ways     slot s is on devices s and d - 1 - s: the slower times and links of the two, half the memory
whole         one slot on all devices: as slow as the slowest of them, with the least memory
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from pd2bw_fx.cluster import Cluster
from pd2bw_fx.constraints import Constraints
from pd2bw_fx.device import Device
from pd2bw_fx.errors import InputError
from pd2bw_fx.plan import Plan
from pd2bw_fx.problem import Problem

from .partition import capped, devices_meant
from .schedule import Placing

_WITHIN_A_DEVICE = 1e15  # bytes per second: no time at all


@dataclass(frozen=True, slots=True)
class DeviceSlots:
    """The slots as a problem on a cluster of their own, and the way back.

    `devices_of` has the devices of each slot; a plan names the first of them. `order` has the slot of each
    stage, or is None where the planner is free to choose.
    """

    problem: Problem
    cluster: Cluster
    constraints: Constraints | None
    devices: tuple[Device, ...]
    devices_of: tuple[tuple[int, ...], ...]
    order: tuple[int, ...] | None

    def of_plan(self, plan: Plan) -> Plan:
        """Turns a plan on the slots into one on the devices."""
        if self.order is None:
            return plan
        firsts = [self.devices_of[stage.device][0] for stage in plan.stages]
        stages = (
            replace(stage, device=first, device_name=self.devices[first].name)
            for stage, first in zip(plan.stages, firsts, strict=True)
        )
        return replace(plan, stages=tuple(stages))


def slots_for(
    problem: Problem,
    cluster: Cluster,
    placing: Placing,
    constraints: Constraints | None,
    *,
    num_stages: int,
    chunks: int,
) -> DeviceSlots:
    """Returns the slots of a placing.

    Raises InputError where the cluster has too few devices, and for a constraint on a device with no stage.
    """
    if placing is Placing.ROW:
        every = tuple((device,) for device in range(len(cluster)))
        return DeviceSlots(problem, cluster, constraints, cluster.devices, every, None)
    wishes = constraints or Constraints()
    own = capped(cluster, wishes.memory_bytes)
    make = {Placing.ROUND: _in_turn, Placing.BOTH_WAYS: _both_ways, Placing.WHOLE: _on_every_device}
    changed, seen, on = make[placing](problem, own, num_stages, chunks)
    if constraints is not None:
        constraints = _about_slots(constraints, cluster, on)
    return DeviceSlots(changed, seen, constraints, cluster.devices, on, tuple(range(num_stages)))


def _about_slots(constraints: Constraints, cluster: Cluster, on: Sequence[tuple[int, ...]]) -> Constraints:
    """Replaces each device in the constraints by its slots. Memory caps are dropped: the slots have them."""
    device_of = {}
    for name, given in constraints.device_of.items():
        wanted = {*devices_meant(cluster, given)}
        slots = tuple(slot for slot, devices in enumerate(on) if wanted & {*devices})
        if not slots:
            raise InputError(
                f"{name!r} is pinned to device {given!r}, which has no stage here; the stages are on "
                f"{', '.join(dict.fromkeys(cluster.devices[d].name for devices in on for d in devices))}"
            )
        device_of[name] = slots
    return replace(constraints, device_of=device_of, memory_bytes={})


_Made = tuple[Problem, Cluster, tuple[tuple[int, ...], ...]]


def _in_turn(problem: Problem, cluster: Cluster, num_stages: int, chunks: int) -> _Made:
    num_devices = num_stages // chunks
    if num_devices > len(cluster):
        raise InputError(
            f"{num_stages} stages, {chunks} on each device, need {num_devices} devices, and the "
            f"cluster has {len(cluster)}; try num_stages={len(cluster) * chunks}"
        )
    real = [slot % num_devices for slot in range(num_stages)]
    copies = Cluster(
        devices=tuple(
            replace(
                cluster.devices[device],
                name=f"{cluster.devices[device].name}, place {slot // num_devices}",
                memory_bytes=cluster.devices[device].memory_bytes // chunks,
            )
            for slot, device in enumerate(real)
        ),
        bytes_per_s=tuple(
            tuple(cluster.bytes_per_s[a][b] if a != b else _WITHIN_A_DEVICE for b in real) for a in real
        ),
        latency_s=tuple(tuple(cluster.latency_s[a][b] if a != b else 0.0 for b in real) for a in real),
    )
    changed = _timed(problem, lambda of_devices: (of_devices[device] for device in real))
    return changed, copies, tuple((device,) for device in real)


def _both_ways(problem: Problem, cluster: Cluster, num_stages: int, _: int) -> _Made:
    cluster, last = cluster.only(range(min(num_stages, len(cluster)))), num_stages - 1
    devices = tuple(
        replace(device, memory_bytes=min(device.memory_bytes, other.memory_bytes) // 2)
        for device, other in zip(cluster.devices, reversed(cluster.devices), strict=True)
    )
    bytes_per_s = tuple(
        tuple(min(own, cluster.bytes_per_s[last - a][last - b]) for b, own in enumerate(row))
        for a, row in enumerate(cluster.bytes_per_s)
    )
    latency_s = tuple(
        tuple(max(own, cluster.latency_s[last - a][last - b]) for b, own in enumerate(row))
        for a, row in enumerate(cluster.latency_s)
    )
    spread = replace(cluster, devices=devices, bytes_per_s=bytes_per_s, latency_s=latency_s)

    def slower(of_devices: Sequence[float]) -> Iterable[float]:
        own = of_devices[:num_stages]
        return map(max, own, reversed(own))

    return _timed(problem, slower), spread, tuple((s, last - s) for s in range(num_stages))


def _on_every_device(problem: Problem, cluster: Cluster, _: int, __: int) -> _Made:
    """Makes one slot of all devices, which hold the same: an update waits for the slowest of them."""
    least = min(cluster.devices, key=lambda device: device.memory_bytes)
    is_least = any(device.memory_bytes > least.memory_bytes for device in cluster.devices)
    name = f"every device ({least.name} has least)"
    first = replace(
        cluster.devices[0],
        name=name if is_least else cluster.devices[0].name,
        memory_bytes=least.memory_bytes,
    )
    alone = replace(cluster.only((0,)), devices=(first,))
    return _timed(problem, lambda of_devices: (max(of_devices),)), alone, (tuple(range(len(cluster))),)


def _timed(problem: Problem, times: Callable[[Sequence[float]], Iterable[float]]) -> Problem:
    """Gives each block its times on the slots, which `times` computes from those on the devices."""
    blocks = tuple(
        replace(block, forward_s=tuple(times(block.forward_s)), backward_s=tuple(times(block.backward_s)))
        for block in problem.blocks
    )
    return replace(problem, blocks=blocks)
