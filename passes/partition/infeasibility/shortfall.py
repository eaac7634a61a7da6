"""Finds the assignment that is nearest to fitting, in shares of the devices' memory, where none fits."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from pd2bw_fx.errors import SolverError
from pd2bw_fx.passes.partition.choices import Choices, Deadline
from pd2bw_fx.passes.partition.instance import Floats, Instance, Integers, evaluate, respects_edges
from pd2bw_fx.passes.partition.integer_program.assignment import Windows
from pd2bw_fx.passes.partition.integer_program.feasibility import FeasibilityProgram, takes_too_long
from pd2bw_fx.passes.partition.search.intervals import IntervalTables, best_cut, rough_cut
from pd2bw_fx.passes.partition.search.orders import topological_orders
from pd2bw_fx.passes.partition.search.search import search
from pd2bw_fx.passes.partition.search.search_state import Cut
from pd2bw_fx.passes.solver import Status

_PROGRAM_TIME_S = 2.0  # for the program of each device order
_EVENED_TIME_S = 2.0  # for cuts with even shares
_EVENED_ROUNDS = 4  # for each order of the nodes
_ORDERS_TIME_S = 4.0  # for the bisection over all of them
_FEW_ORDERS = 8  # so many have a program of their own each
_PLENTY = 1e15  # a multiple of the memory that stands for no limit
_ANY = 0.999  # a gap: any plan will do
_NEAR = 1.01  # the share is found to a hundredth, for a figure to print


@dataclass(frozen=True, slots=True, eq=False)
class Shortfall:
    """The bytes that each stage needs in an assignment of one of the choices. `share` is the largest of them
    in shares of its limit; `is_least` says that no assignment needs a hundredth less."""

    choice: int
    need_bytes: Floats
    share: float
    is_least: bool


def least_shortfall(choices: Choices, *, solver: str, within: Deadline) -> Shortfall | None:
    """Returns the smallest shortfall found, or None where there was no time to find any.

    With few device orders that differ in memory each has a program of its own. With more of them, or where
    the programs are too large, topological orders are cut evenly, and a bisection over the share asks all
    device orders at once.
    """
    different = choices.different_in_memory()
    best, is_least = None, len(different) <= _FEW_ORDERS
    for choice in different[:_FEW_ORDERS]:
        instance = choices[choice]
        n, k = instance.num_nodes, instance.num_stages
        windows = Windows(np.zeros(n, dtype=np.int64), np.full(n, k - 1, dtype=np.int64))
        if takes_too_long(instance, windows, min(_PROGRAM_TIME_S, within.left_s)):
            is_least = False
            break
        program = FeasibilityProgram(instance, np.inf, windows, soft_memory=True)
        status, stage_of = program.solve(solver=solver, time_limit_s=min(_PROGRAM_TIME_S, within.left_s))
        is_least &= status in (Status.OPTIMAL, Status.INFEASIBLE)
        if stage_of is not None:
            best = _nearer(best, choices, choice, stage_of)
    if is_least and best is not None:
        return replace(best, is_least=True)
    best = _evened(choices, best, Deadline(_EVENED_TIME_S, within=within))
    return _halved(choices, best, solver=solver, deadline=Deadline(_ORDERS_TIME_S, within=within))


def _evened(choices: Choices, best: Shortfall | None, deadline: Deadline) -> Shortfall | None:
    """Cuts topological orders where the fullest stage is least full, for all device orders or, if there are
    many, roughly for all and finely for the best one."""
    different = choices.different_in_memory()
    are_few = len(different) <= _FEW_ORDERS
    for choice in different:
        best = _cut_evenly(choices, choice, best, best_cut if are_few else rough_cut, deadline)
    if best is None or are_few:
        return best
    return _cut_evenly(choices, best.choice, best, best_cut, deadline)


def _cut_evenly(
    choices: Choices, choice: int, best: Shortfall | None, cut: Cut, deadline: Deadline
) -> Shortfall | None:
    """Cuts orders of the nodes for one choice. What a stage needs that is no sum over its nodes is known only
    when they are cut: each round takes what was found in the round before."""
    instance, tables = choices[choice], IntervalTables()
    for order in topological_orders(instance):
        besides = np.zeros(instance.num_stages)
        for _ in range(_EVENED_ROUNDS):
            if deadline.left_s == 0:
                return best
            shares = _shares_as_times(instance, besides)
            stage_of = cut(shares, order, tables)
            if stage_of is None or not respects_edges(instance, stage_of):
                break
            best = _nearer(best, choices, choice, stage_of)
            found = evaluate(shares, stage_of).load_s - besides
            besides = evaluate(instance, stage_of).memory_bytes / instance.limit_bytes - found
    return best


def _shares_as_times(instance: Instance, besides: Floats) -> Instance:
    """Returns an instance without limits, whose loads are the shares that its stages need of their memory:
    of weights, and of what microbatches keep and hold, with `besides` for each stage."""
    limits, in_flight = instance.limit_bytes[:, None], instance.in_flight[:, None]
    times = in_flight if instance.recompute is False else 1
    held = np.array([float(net.held_bytes) for net in instance.nets])
    per_net = (in_flight * held / limits).T[:, :, None]
    return replace(
        instance,
        work_s=(instance.static_bytes + times * instance.saved_bytes) / limits,
        again_s=np.zeros_like(instance.again_s),
        cost_s=np.broadcast_to(per_net, instance.cost_s.shape),
        fixed_s=besides,
        per_destination=False,
        overlap=False,
        recompute=False,
        limit_bytes=np.full_like(instance.limit_bytes, np.inf),
        hands_on=False,
    )


def _halved(choices: Choices, best: Shortfall | None, *, solver: str, deadline: Deadline) -> Shortfall | None:
    """Bisects the share. It first asks whether the best known share is the least."""
    too_few, share = 1.0, _PLENTY if best is None else best.share / _NEAR
    while best is None or best.share > _NEAR * too_few:
        larger = choices.changed(partial(_with_times, share))
        try:
            found = search(
                larger, solver=solver, max_gap=_ANY, deadline=Deadline(deadline.left_s / 2, within=deadline)
            )
        except SolverError:
            return best
        if found is None and best is None:
            return None
        if found is None:
            too_few = share
        else:
            best = _nearer(best, choices, found.choice, found.stage_of)
        if best is not None:
            share = max(math.sqrt(too_few * best.share), best.share / 2)
    return replace(best, is_least=True)


def _with_times(share: float, instance: Instance) -> Instance:
    return replace(instance, limit_bytes=share * instance.limit_bytes)


def _nearer(best: Shortfall | None, choices: Choices, choice: int, stage_of: Integers) -> Shortfall:
    need_bytes = evaluate(choices[choice], stage_of).memory_bytes
    share = float((need_bytes / choices[choice].limit_bytes).max())
    if best is not None and best.share <= share:
        return best
    return Shortfall(choice, need_bytes, share, is_least=False)
