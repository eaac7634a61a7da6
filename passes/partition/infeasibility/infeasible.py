"""Says why no plan fits: which device, the bytes that it would need, the bytes it has, and what to try."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from pd2bw_fx.cluster import Cluster
from pd2bw_fx.errors import InfeasibleError, SolverError
from pd2bw_fx.passes.partition.choices import Choices, Deadline, NoPlanInTime
from pd2bw_fx.passes.partition.constrain import Pin
from pd2bw_fx.passes.partition.devices import DeviceOrders
from pd2bw_fx.passes.partition.instance import Instance
from pd2bw_fx.passes.partition.reader import topological_order
from pd2bw_fx.passes.partition.request import SearchRequest
from pd2bw_fx.passes.partition.search.search import search
from pd2bw_fx.problem import Problem
from pd2bw_fx.units import format_bytes

from .nearest import MORE_STAGES, RECOMPUTE, nearest_changes
from .shortfall import least_shortfall

_MOST_NAMED = 6  # devices
_MOST_TIME_S = 20.0  # for the whole explanation
_MINIMAL = "without any of these there is a plan"
_ALONE = "whatever the other limits are, and none of these can be left out of the reasons"
_EXPLAIN_TIME_S = 2.0  # for each question whether some of the reasons alone exclude every assignment
_PLENTY_BYTES = 10**18  # stands for no limit


def infeasible_error(
    request: SearchRequest,
    choices: Choices,
    orders: DeviceOrders,
    *,
    solver: str,
    within: Deadline | None = None,
) -> InfeasibleError:
    """Returns the error to raise. It names a block that is too large for any device, else constraints that
    exclude one another, else the devices whose limits exclude every plan, what they would need, and the
    nearest limits with which all fits.

    It says less where the deadline of a larger call, or Ctrl-C, leaves no time to find these.
    """
    deadline = Deadline(_MOST_TIME_S, within=within)
    try:
        return (
            _block_too_large(request.problem, request.cluster, choices[0])
            or _pins_exclude_one_another(request, solver=solver, deadline=deadline)
            or _least_excess(request, choices, orders, solver=solver, deadline=deadline)
        )
    except KeyboardInterrupt:
        deadline.stop()
        return _does_not_fit(request, choices)


def no_plan_in_time(
    request: SearchRequest, choices: Choices, orders: DeviceOrders, *, solver: str, deadline: Deadline
) -> NoPlanInTime:
    """Returns the error to raise where the time was too short. It has what is nearest to fitting, and what
    would be enough, as far as the deadline allows to find these."""
    nearest = least_shortfall(choices, solver=solver, within=deadline)
    if nearest is None or nearest.share <= 1.0:
        return NoPlanInTime()
    limits = choices[nearest.choice].limit_bytes
    short = np.flatnonzero(nearest.need_bytes > limits).tolist()
    devices = [orders[nearest.choice][stage] for stage in short]
    changes = nearest_changes(request, choices, devices, solver=solver, within=deadline)
    stage = int((nearest.need_bytes / limits).argmax())
    device = request.cluster.devices[orders[nearest.choice][stage]]
    enough = f"with {', or '.join(changes.lines)} it fits, as " if changes.lines else ""
    return NoPlanInTime(
        f"the nearest that was found needs {format_bytes(nearest.need_bytes[stage])} for stage {stage} on "
        f"{device.name}, which has {format_bytes(device.memory_bytes)}; {enough}all does with "
        f"{_rounded_up(nearest.share)} times the memory on every device; try "
        f"{', '.join([*changes.unsettled, 'a smaller microbatch'])}, or "
    )


class _Question:
    """Asks whether there is an assignment if only some of the pins and memory limits hold."""

    def __init__(self, request: SearchRequest, *, solver: str, deadline: Deadline) -> None:
        self.request = request
        self.solver = solver
        self.deadline = deadline
        self.ran_out = False  # some question was not settled in its time

    def is_possible(self, pins: Sequence[Pin], devices: Sequence[int]) -> bool:
        """Returns whether there is an assignment with these pins and the limits of these devices alone. It is
        True also if the time ran out before an answer."""
        if self.deadline.left_s == 0:
            self.ran_out = True
            return True
        others = set(range(len(self.request.cluster))) - set(devices)
        request = replace(self.request, pins=tuple(pins)).with_memory(dict.fromkeys(others, _PLENTY_BYTES))
        # The gap is nearly one because any assignment will do.
        deadline = Deadline(_EXPLAIN_TIME_S, within=self.deadline)
        choices = request.choices(request.orders())
        different = choices.only(choices.different_in_memory())
        try:
            found = search(different, solver=self.solver, max_gap=0.999, deadline=deadline)
        except SolverError:
            self.ran_out = True
            return True
        return found is not None

    def fewest(self, pins: Sequence[Pin], devices: Sequence[int]) -> tuple[list[Pin], list[int]]:
        """Returns a smallest subset of these reasons: infeasible, and feasible without any one of them."""
        names, limited = list(dict.fromkeys(pin.name for pin in pins)), list(devices)

        def of(kept: Sequence[str]) -> list[Pin]:
            return [pin for pin in pins if pin.name in kept]

        needed: list[int] = []
        for device in tuple(limited):
            # A device that is interchangeable with one that is needed is needed as well.
            if len(self.request.one_of_each([*needed, device])) == len(self.request.one_of_each(needed)):
                continue
            if self.is_possible(of(names), [other for other in limited if other != device]):
                needed.append(device)
            else:
                limited.remove(device)
        for name in tuple(names):
            if not self.is_possible(of([other for other in names if other != name]), limited):
                names.remove(name)
        return of(names), limited


def _wishes(pins: Sequence[Pin]) -> str:
    together = ", ".join(dict.fromkeys(names for pin in pins for names in pin.together))
    kept = f" ({together} kept together)" if together else ""
    return ", ".join(dict.fromkeys(f"{pin.name!r} on {pin.where}" for pin in pins)) + kept


def _pins_exclude_one_another(
    request: SearchRequest, *, solver: str, deadline: Deadline
) -> InfeasibleError | None:
    question = _Question(request, solver=solver, deadline=deadline)
    if not request.pins or question.is_possible(request.pins, ()):
        return None
    fewest, _ = question.fewest(request.pins, ())
    rest = "" if question.ran_out else "; any one of them less and there is a plan"
    return InfeasibleError(
        f"these cannot be granted together on {request.num_stages} stages, whatever the memory: "
        f"{_wishes(fewest)}{rest}"
    )


def _block_too_large(problem: Problem, cluster: Cluster, instance: Instance) -> InfeasibleError | None:
    largest = max(range(len(cluster)), key=lambda d: cluster.devices[d].memory_bytes)
    device = cluster.devices[largest]
    static, gradients = instance.static_bytes.min(axis=0), instance.gradient_bytes.copy()
    for shared in instance.shared:
        static[list(shared.nodes)] += shared.num_bytes.min()
        gradients[list(shared.nodes)] += shared.gradient_bytes
    apart = np.minimum(gradients, instance.saved_bytes) if instance.gradients_wait.any() else 0.0
    at_work = static + instance.saved_bytes + instance.workspace_bytes - apart
    need = np.maximum(at_work, static + instance.stepped_bytes)
    node = int(need.argmax())
    if need[node] <= device.memory_bytes:
        return None
    block = problem.blocks[topological_order(problem)[node]]
    held = {name: problem.parameters[name] for name in block.parameters}
    sizes = {name: size.trainable_bytes + size.frozen_bytes for name, size in held.items()}
    own = max(sizes, key=sizes.__getitem__, default=None)
    told = "" if own is None else f" (the largest, {own!r}, has {format_bytes(sizes[own])})"
    return InfeasibleError(
        f"block {block.name!r} alone needs {format_bytes(need[node])} ({need[node]:.0f} bytes) with its "
        f"copies of the weights{told}, and {device.name}, the largest device, has "
        f"{format_bytes(device.memory_bytes)} ({device.memory_bytes} bytes); try a device with more memory, "
        "a smaller microbatch, or an optimizer with less state"
    )


def _least_excess(
    request: SearchRequest, choices: Choices, orders: DeviceOrders, *, solver: str, deadline: Deadline
) -> InfeasibleError:
    cluster = request.cluster
    nearest = least_shortfall(choices, solver=solver, within=deadline)
    if nearest is None:
        return _does_not_fit(request, choices)
    need, choice = nearest.need_bytes, nearest.choice
    stage = int((need / choices[choice].limit_bytes).argmax())
    device = cluster.devices[orders[choice][stage]]
    # Half of the time is for what would be enough.
    half = Deadline(deadline.left_s / 2, within=deadline)
    question = _Question(request, solver=solver, deadline=half)
    fewest, limited = question.fewest(request.pins, request.order or range(len(cluster)))
    needs = {orders[choice][at]: float(amount) for at, amount in enumerate(need)}
    shown = limited if len(limited) <= _MOST_NAMED + 1 else limited[:_MOST_NAMED]
    reasons = [_reason(cluster, other, needs.get(other)) for other in shown]
    if len(shown) < len(limited):
        reasons.append(f"{len(limited) - len(shown)} more devices")
    if fewest:
        reasons.append(_wishes(fewest))
    tried = "" if orders.are_all else f" ({len(orders)} of more orders of the devices were tried)"
    changes = nearest_changes(request, choices, limited, solver=solver, within=deadline)
    enough = f"With {', or '.join(changes.lines)} it fits. " if changes.lines else ""
    # The limits and pins that are no reasons did not hold while these were asked about.
    devices, pins = set(request.order or range(len(cluster))), {pin.name for pin in request.pins}
    are_all = devices == set(limited) and pins == {pin.name for pin in fewest}
    minimal = _MINIMAL if are_all else _ALONE
    if question.ran_out:
        minimal = "there was no time to see if some are enough"
    best = "at best" if nearest.is_least else "in the best of what there was time to look at,"
    return InfeasibleError(
        f"no assignment fits: {best} stage {stage} needs {format_bytes(need[stage])} ({need[stage]:.0f} "
        f"bytes) on {device.name}, which has {format_bytes(device.memory_bytes)} ({device.memory_bytes} "
        f"bytes). It is impossible because of {'; '.join(reasons)}; {minimal}. "
        f"{enough}All fits with {_rounded_up(nearest.share)} times the memory on every device; or "
        f"try {', '.join([*changes.unsettled, 'a smaller microbatch'])}{tried}"
    )


def _does_not_fit(request: SearchRequest, choices: Choices) -> InfeasibleError:
    devices = request.cluster.devices
    total = format_bytes(sum(device.memory_bytes for device in devices))
    again = f"{RECOMPUTE}, " if choices[0].recompute is False else ""
    return InfeasibleError(
        f"no assignment fits in the {total} of {len(devices)} devices; try {MORE_STAGES}, {again}a smaller "
        "microbatch, or devices with more memory"
    )


def _rounded_up(share: float) -> str:
    """Rounds up to three digits, so that the figure is enough."""
    digits = max(0, 2 - math.floor(math.log10(share)))
    return f"{math.ceil(share * 10**digits * (1 - 1e-12)) / 10**digits:.{digits}f}"


def _reason(cluster: Cluster, device: int, need_bytes: float | None) -> str:
    """Returns a device with its memory, and with what the nearest assignment needs there if that is more."""
    have_bytes = cluster.devices[device].memory_bytes
    is_short = need_bytes is not None and need_bytes > have_bytes
    needed = f", needs {format_bytes(need_bytes)} there" if need_bytes is not None and is_short else ""
    return f"{cluster.devices[device].name} (has {format_bytes(have_bytes)}{needed})"
