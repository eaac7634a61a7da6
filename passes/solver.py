"""Integer programs, by a thin layer over PuLP that reports what the solver really found.

This is the only file that imports PuLP. PuLP reports "Optimal" for a run that hit its time limit, so an
`Outcome` is read from the solver's own status where it can be (HiGHS), else from PuLP's `sol_status`.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any

import highspy
import numpy as np
import pulp

from pd2bw_fx.arguments import require_kind
from pd2bw_fx.errors import SolverError, UnknownSolverError

Variable = Any
_TOLERANCE = 1e-6
_WAIT_S = 1.0
_FEASIBILITY = 1e-9
_FEW_ROWS = 1500
# Without heuristics and restarts, programs without a solution are refuted two to nine times faster.
_REFUTING = {
    "mip_heuristic_effort": 0.0,
    "mip_allow_restart": False,
    "mip_heuristic_run_rins": False,
    "mip_heuristic_run_rens": False,
    "mip_heuristic_run_root_reduced_cost": False,
    "mip_heuristic_run_feasibility_jump": False,
}
_EXACTLY = {"mip_feasibility_tolerance": 1e-9, "primal_feasibility_tolerance": 1e-9}
# HiGHS 1.16 may stay in these steps of its presolve for minutes or without end, and not look at the clock.
_PROBING, _ENUMERATION = 2**15, 2**16
_WITHIN_TIME = {"presolve_rule_off": _PROBING | _ENUMERATION}
Terms = Iterable[tuple[Variable, float]]

# PuLP's interfaces to missing solvers keep the error of their import. Its traceback keeps the frames of
# whoever imports this first, and with them a caller's model.
for _interface in vars(pulp.apis).values():
    if isinstance(_error := getattr(_interface, "err", None), BaseException):
        _error.__traceback__ = None


class Status(Enum):
    """What a solver has shown about a program."""

    OPTIMAL = "optimal"  # a solution, and no better one exists
    FEASIBLE = "feasible"  # a solution, perhaps not the best
    INFEASIBLE = "infeasible"  # no solution exists
    UNKNOWN = "unknown"  # stopped before anything was known


@dataclass(frozen=True, slots=True)
class Outcome:
    """`values` by variable name where there is a solution; `bound` on the objective where one is proven."""

    status: Status
    values: Mapping[str, float]
    bound: float | None = None

    @property
    def has_solution(self) -> bool:
        return self.status in (Status.OPTIMAL, Status.FEASIBLE)


class _Problem(pulp.LpProblem):  # type: ignore[misc]
    """A problem whose variables are in the order of creation. PuLP would collect them from all rows, and sort
    them, at every access."""

    def variables(self) -> list[Any]:
        return list(self._variables)


class IntegerProgram:
    """An integer program under construction, which minimises a sum of terms under `at_most` rows."""

    def __init__(self, name: str) -> None:
        self._problem = _Problem(name, pulp.LpMinimize)
        self._rows: list[Any] = []
        self._objective: list[tuple[Variable, float]] = []
        self._is_contradiction = False

    def binary(self, name: str) -> Variable:
        return self._problem.add_variable(name, 0, 1, cat=pulp.LpInteger)

    def continuous(self, name: str, *, high: float | None = None) -> Variable:
        return self._problem.add_variable(name, 0.0, high)

    def at_most(self, terms: Terms, bound: float) -> None:
        """Adds the row: sum of coefficient * variable <= bound. The sum of no terms is 0."""
        given = list(terms)
        if not given:  # HiGHS does not check such a row against its bound
            self._is_contradiction |= bound < -_FEASIBILITY
            return
        expression = pulp.LpAffineExpression(given)
        row = pulp.LpConstraint(expression, sense=pulp.LpConstraintLE, rhs=bound)
        self._problem.addConstraint(row, f"r{len(self._rows)}")
        self._rows.append(row)

    def minimise(self, terms: Terms) -> None:
        self._objective = list(terms)

    def solve(
        self,
        *,
        solver: str = "highs",
        time_limit_s: float | None = None,
        refuting: bool = False,
        exactly: bool = False,
        on_wait: Callable[[], None] | None = None,
    ) -> Outcome:
        """Runs a solver on one thread, so that the same program gives the same answer.

        `refuting` says that there is most likely no solution, so that the solver uses no heuristics to find
        one. With `exactly` HiGHS keeps rows to a billionth in place of a millionth, which may take longer.
        `on_wait` is called every second while HiGHS runs. A KeyboardInterrupt stops HiGHS and is raised on.
        Raises SolverError where PuLP does not know the solver, it is not installed, or it fails.
        """
        self._problem.setObjective(pulp.LpAffineExpression(self._objective))
        if time_limit_s is not None and time_limit_s <= 0:
            return Outcome(Status.UNKNOWN, {})
        if self._is_contradiction:
            return Outcome(Status.INFEASIBLE, {})
        engine = _engine(solver, time_limit_s)
        if not isinstance(engine, _Highs):
            return _pulp_outcome(self._problem, self._run(engine))
        engine.rows = self._rows
        engine.on_wait = on_wait
        if exactly:
            engine.optionsDict.update(_EXACTLY)
        if refuting:
            engine.optionsDict.update(_REFUTING)
            if len(self._rows) < _FEW_ROWS:
                engine.optionsDict["presolve"] = "off"  # which takes longer than the refutation itself
        values = self._run(engine)
        if _is_broken(self._problem.solverModel):
            # HiGHS can call a solution optimal that is not whole, or fail; without its presolve it does not.
            engine.optionsDict["presolve"] = "off"
            values = self._run(engine)
        return _highs_outcome(self._problem.solverModel, values)

    def _run(self, engine: Any) -> dict[str, float]:
        try:
            self._problem.solve(engine)
        except pulp.PulpSolverError as error:
            raise SolverError(f"solver {engine.name!r} failed: {error}") from error
        return {v.name: v.varValue for v in self._problem.variables() if v.varValue is not None}


def check_solver(solver: str) -> None:
    """Raises SolverError unless PuLP knows this solver and it can run here, InputError if it is no name."""
    require_kind("solver", solver, str, "a name such as 'highs' or 'cbc'")
    _engine(solver, None)


def _engine(solver: str, time_limit_s: float | None) -> Any:
    if solver.lower() == "highs":
        return _Highs(msg=False, threads=1, timeLimit=time_limit_s, random_seed=0)
    known = {name.lower(): name for name in pulp.listSolvers()}
    known["cbc"] = known.get("pulp_cbc_cmd", "PULP_CBC_CMD")
    name = known.get(solver.lower())
    if name is None:
        raise UnknownSolverError(
            f"solver {solver!r} is not known to PuLP; installed here are {', '.join(map(repr, _installed()))}"
        )
    engine = pulp.getSolver(name, msg=False, timeLimit=time_limit_s)
    if not engine.available():
        raise UnknownSolverError(
            f"solver {solver!r} is not installed here; try 'highs' or 'cbc', which come with this package"
        )
    return engine


def _installed() -> list[str]:
    """Returns the available solvers, each once, by the name to give as `solver`."""
    own = {"HiGHS": "highs", "PULP_CBC_CMD": "cbc"}
    found = dict.fromkeys(own.get(name, name) for name in pulp.listSolvers(onlyAvailable=True))
    return sorted(found, key=lambda name: name != "highs")


class SilentHighs(highspy.Highs):  # type: ignore[misc]
    """HiGHS without the banner that version 1.16 prints at creation: stdout may be for a plan as JSON."""

    def enableCallbacks(self) -> None:
        self.setOptionValue("output_flag", False)  # before the first call that would answer with the banner
        super().enableCallbacks()


class _Highs(pulp.HiGHS):  # type: ignore[misc]
    """HiGHS, given the whole program at once. Row by row takes longer than solving most of these programs."""

    rows: Sequence[Any] = ()
    on_wait: Callable[[], None] | None = None

    def callSolver(self, lp: Any) -> None:
        """Runs HiGHS with a callback between its steps, the only place where Python can notice a Ctrl-C."""
        model = lp.solverModel
        is_stopped, told_s = False, time.perf_counter()

        def stop(*_: Any) -> None:
            nonlocal is_stopped
            is_stopped = True

        def listen(event: Any) -> None:
            nonlocal told_s
            if is_stopped:
                event.interrupt()
            elif self.on_wait is not None and time.perf_counter() - told_s > _WAIT_S:
                told_s = time.perf_counter()
                self.on_wait()

        model.cbMipInterrupt += listen
        model.cbSimplexInterrupt += listen
        # An exception must not cross HiGHS; only the main thread gets signals, and may change what they do.
        listens = threading.current_thread() is threading.main_thread()
        before = signal.signal(signal.SIGINT, stop) if listens else None
        try:
            model.run()
        finally:
            if listens:
                signal.signal(signal.SIGINT, before)
        if is_stopped:
            raise KeyboardInterrupt

    def createAndConfigureSolver(self, lp: Any) -> None:
        """Builds the model as PuLP does, but silent from the beginning."""
        lp.solverModel = SilentHighs()
        options = {"output_flag": False, "threads": self.threads, **_WITHIN_TIME, **self.optionsDict}
        if self.timeLimit is not None:
            options["time_limit"] = float(self.timeLimit)
        for name, value in options.items():
            lp.solverModel.setOptionValue(name, value)

    def buildSolverModel(self, lp: Any) -> None:
        variables = lp.variables()
        for index, variable in enumerate(variables):
            variable.index = index
        rows = self.rows
        starts, columns, coefficients = [0], [], []
        for index, row in enumerate(rows):
            row.index = index
            columns += [variable.index for variable in row]
            coefficients += row.values()
            starts.append(len(columns))
        objective, infinity = lp.objective or {}, highspy.kHighsInf
        model = model_of_rows(
            costs=[objective.get(variable, 0.0) for variable in variables],
            lower=[_or(v.lowBound, -infinity) for v in variables],
            upper=[_or(v.upBound, infinity) for v in variables],
            at_least=[_or(row.getLb(), -infinity) for row in rows],
            at_most=[_or(row.getUb(), infinity) for row in rows],
            starts=starts,
            columns=columns,
            factors=coefficients,
        )
        integer, real = highspy.HighsVarType.kInteger, highspy.HighsVarType.kContinuous
        model.integrality_ = [integer if v.cat == pulp.LpInteger else real for v in variables]
        lp.solverModel.passModel(model)


def model_of_rows(
    *,
    costs: Any,
    lower: Any,
    upper: Any,
    at_least: Any,
    at_most: Any,
    starts: Any,
    columns: Any,
    factors: Any,
) -> highspy.HighsLp:
    """Returns the least sum of `costs` over amounts within `lower` and `upper`, as HiGHS takes it.

    Row i has the entries from `starts[i]` to `starts[i + 1]` of `columns` and `factors`; its sum is within
    `at_least[i]` and `at_most[i]`.
    """
    model = highspy.HighsLp()
    model.num_col_, model.num_row_ = len(costs), len(at_least)
    model.col_cost_ = np.asarray(costs, dtype=float)
    model.col_lower_, model.col_upper_ = np.asarray(lower, dtype=float), np.asarray(upper, dtype=float)
    model.row_lower_, model.row_upper_ = np.asarray(at_least, dtype=float), np.asarray(at_most, dtype=float)
    model.a_matrix_.format_ = highspy.MatrixFormat.kRowwise
    model.a_matrix_.start_ = np.asarray(starts, dtype=np.int32)
    model.a_matrix_.index_ = np.asarray(columns, dtype=np.int32)
    model.a_matrix_.value_ = np.asarray(factors, dtype=float)
    return model


def _or(value: float | None, otherwise: float) -> float:
    return otherwise if value is None else value


def _is_broken(highs: Any) -> bool:
    status, kinds = highs.getModelStatus(), highspy.HighsModelStatus
    found = highs.getInfo().primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
    return status == kinds.kSolveError or (status == kinds.kOptimal and not found)


def _highs_outcome(highs: Any, values: Mapping[str, float]) -> Outcome:
    status = highs.getModelStatus()
    info = highs.getInfo()
    kinds = highspy.HighsModelStatus
    if status in (kinds.kInfeasible, kinds.kUnboundedOrInfeasible):
        return Outcome(Status.INFEASIBLE, {})
    found = info.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
    bound = float(info.mip_dual_bound) if np.isfinite(info.mip_dual_bound) else None
    if status == kinds.kModelEmpty:  # all is fixed, and no row is left to break
        return Outcome(Status.OPTIMAL, values, info.objective_function_value)
    if status == kinds.kOptimal and found:
        return Outcome(Status.OPTIMAL, values, bound)
    if status in (kinds.kTimeLimit, kinds.kInterrupt, kinds.kIterationLimit, kinds.kSolutionLimit):
        return Outcome(Status.FEASIBLE if found else Status.UNKNOWN, values if found else {}, bound)
    raise SolverError(f"HiGHS stopped with {highs.modelStatusToString(status)!r}; try solver='cbc'")


def _pulp_outcome(problem: Any, values: Mapping[str, float]) -> Outcome:
    found = problem.sol_status
    if found == pulp.LpSolutionOptimal:
        return Outcome(Status.OPTIMAL, values, pulp.value(problem.objective))
    # "Integer infeasible" of CBC arrives in `status` alone; a run that stopped for time has another status.
    if pulp.LpStatusInfeasible in (found, problem.status):
        return Outcome(Status.INFEASIBLE, {})
    # Stopped for time, CBC may hand over the relaxation's solution as if it were a real one.
    if found == pulp.LpSolutionIntegerFeasible and problem.valid(_TOLERANCE) and _is_whole(problem):
        return Outcome(Status.FEASIBLE, values)
    return Outcome(Status.UNKNOWN, {})


def _is_whole(problem: Any) -> bool:
    integers = [variable for variable in problem.variables() if variable.cat == pulp.LpInteger]
    return all(abs(variable.varValue - round(variable.varValue)) < _TOLERANCE for variable in integers)
