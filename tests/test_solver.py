"""What a solver is said to have shown is what it has shown."""

from __future__ import annotations

import itertools
import random
import subprocess
import sys

import pytest

from pd2bw_fx.errors import SolverError, UnknownSolverError
from pd2bw_fx.passes.solver import IntegerProgram, Status, check_solver
from tests.torchrun import environment


def knapsack(capacity: float) -> tuple[IntegerProgram, list[tuple[int, int]]]:
    """Items with weight and worth; the program maximises the worth under the capacity."""
    items = [(3, 4), (4, 5), (2, 3), (5, 8), (6, 9)]
    program = IntegerProgram("knapsack")
    take = [program.binary(f"take_{at}") for at in range(len(items))]
    program.at_most([(take[at], float(weight)) for at, (weight, _) in enumerate(items)], capacity)
    program.minimise([(take[at], -float(worth)) for at, (_, worth) in enumerate(items)])
    return program, items


def hard_program() -> IntegerProgram:
    """Split random weights exactly in half, many ways at once: no solver is done with it in a blink."""
    numbers = random.Random(0)
    program = IntegerProgram("market_split")
    take = [program.binary(f"take_{at}") for at in range(50)]
    for _ in range(6):
        weights = [float(numbers.randrange(100)) for _ in take]
        half = float(int(sum(weights) // 2))
        program.at_most(list(zip(take, weights, strict=True)), half)
        program.at_most([(t, -w) for t, w in zip(take, weights, strict=True)], -half)
    return program


@pytest.mark.parametrize("solver", ["highs", "cbc", "PULP_CBC_CMD"])
def test_optimum_is_that_of_trying_everything(solver: str) -> None:
    program, items = knapsack(10.0)
    outcome = program.solve(solver=solver)
    best = max(
        sum(worth for (_, worth), taken in zip(items, choice, strict=True) if taken)
        for choice in itertools.product([0, 1], repeat=len(items))
        if sum(weight for (weight, _), taken in zip(items, choice, strict=True) if taken) <= 10
    )
    assert outcome.status is Status.OPTIMAL
    taken = [round(outcome.values[f"take_{at}"]) for at in range(len(items))]
    assert sum(worth * take for (_, worth), take in zip(items, taken, strict=True)) == best
    assert outcome.bound == pytest.approx(-best)


@pytest.mark.parametrize("solver", ["highs", "cbc"])
def test_contradiction_is_infeasible(solver: str) -> None:
    program, _ = knapsack(-1.0)
    outcome = program.solve(solver=solver)
    assert outcome.status is Status.INFEASIBLE
    assert not outcome.has_solution


@pytest.mark.parametrize("solver", ["highs", "cbc"])
@pytest.mark.parametrize(("bound", "status"), [(0.0, Status.OPTIMAL), (-1.0, Status.INFEASIBLE)])
@pytest.mark.parametrize("num_variables", [0, 1])
def test_rows_without_terms_hold_or_do_not(
    solver: str, bound: float, status: Status, num_variables: int
) -> None:
    program = IntegerProgram("nothing to choose")
    for number in range(num_variables):
        program.binary(f"free_{number}")
    program.at_most([], bound)
    for refuting in (False, True):
        assert program.solve(solver=solver, refuting=refuting).status is status


@pytest.mark.parametrize("solver", ["highs", "cbc"])
def test_contradiction_of_whole_numbers_only_is_infeasible(solver: str) -> None:
    program = IntegerProgram("half")
    a, b = program.binary("a"), program.binary("b")
    program.at_most([(a, 2.0), (b, 2.0)], 1.5)
    program.at_most([(a, -2.0), (b, -2.0)], -0.5)
    assert program.solve(solver=solver).status is Status.INFEASIBLE


@pytest.mark.parametrize("solver", ["highs", "cbc"])
def test_run_stopped_by_the_clock_claims_nothing(solver: str) -> None:
    outcome = hard_program().solve(solver=solver, time_limit_s=0.5)
    assert outcome.status in (Status.UNKNOWN, Status.FEASIBLE)
    assert outcome.status is Status.UNKNOWN or set(outcome.values.values()) <= {0.0, 1.0}


def test_no_time_at_all_is_unknown() -> None:
    program, _ = knapsack(10.0)
    assert program.solve(time_limit_s=0.0).status is Status.UNKNOWN


def test_same_program_gives_the_same_answer() -> None:
    first, second = (knapsack(12.0)[0].solve().values for _ in range(2))
    assert dict(first) == dict(second)


def test_solving_prints_nothing() -> None:
    """Solves in a new process, since HiGHS prints its banner once in each."""
    program = "from tests.test_solver import knapsack; print(knapsack(12.0)[0].solve().status.name)"
    solved = subprocess.run(
        [sys.executable, "-c", program], env=environment(), capture_output=True, text=True
    )

    assert (solved.stdout, solved.stderr) == ("OPTIMAL\n", "")


def test_unknown_solver_is_named_with_what_to_try() -> None:
    assert issubclass(UnknownSolverError, SolverError)
    with pytest.raises(
        UnknownSolverError, match=r"'hihgs' is not known to PuLP; installed here are 'highs', 'cbc'"
    ):
        check_solver("hihgs")


def test_solver_that_is_not_installed_is_named() -> None:
    with pytest.raises(UnknownSolverError, match="'GUROBI_CMD' is not installed here"):
        check_solver("GUROBI_CMD")
