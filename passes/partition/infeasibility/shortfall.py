"""Finds the assignment that is nearest to fitting, in shares of the devices' memory, where none fits."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from pd2bw_fx.errors import SolverError
from pd2bw_fx.passes.partition.choices import Choices, Deadline
from pd2bw_fx.passes.partition.instance import Floats, Instance, Integers, evaluate
from pd2bw_fx.passes.partition.integer_program.assignment import Windows
from pd2bw_fx.passes.partition.integer_program.feasibility import FeasibilityProgram, takes_too_long
from pd2bw_fx.passes.partition.search.search import search
from pd2bw_fx.passes.solver import Status

_PROGRAM_TIME_S = 2.0  # for the program of each device order
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

    With few device orders that differ in memory each has a program of its own. With more of them, a bisection
    over the share asks all orders at once.
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
    return _halved(choices, best, solver=solver, deadline=Deadline(_ORDERS_TIME_S, within=within))


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
