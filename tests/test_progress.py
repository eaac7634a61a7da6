"""What a long search says, and what Ctrl-C leaves of it."""

from __future__ import annotations

import io
import json
import random
import signal
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pd2bw_fx.actions import Shape
from pd2bw_fx.cluster import Cluster
from pd2bw_fx.commands.progress import ProgressLine
from pd2bw_fx.costs import MemoryModel
from pd2bw_fx.errors import SolverError
from pd2bw_fx.passes import plan_request
from pd2bw_fx.passes.partition import explain, partition, partition_replicated, placement, sweep
from pd2bw_fx.passes.partition.search import search_state
from pd2bw_fx.passes.partition.search.search_state import SearchState
from pd2bw_fx.passes.plan_request import PlanRequest
from pd2bw_fx.plan import Plan, Progress
from pd2bw_fx.problem import Block, Problem, Value
from pd2bw_fx.workload import workload_from_json


def hard(num_nodes: int = 150) -> dict[str, object]:
    """A random graph on twelve devices, which takes minutes to prove."""
    draw = random.Random(1)
    nodes = [
        {
            "id": v,
            "supportedOnFpga": 1,
            "cpuLatency": 100.0,
            "fpgaLatency": draw.uniform(1, 9),
            "size": 1.0,
        }
        for v in range(num_nodes)
    ]
    cost = [draw.uniform(0.1, 3) for _ in range(num_nodes)]
    pairs = [(draw.randrange(max(0, v - 60), v), v) for v in range(1, num_nodes) for _ in range(2)]
    edges = [{"sourceId": u, "destId": v, "cost": cost[u]} for u, v in sorted(set(pairs))]
    return {"maxSizePerFPGA": 1e9, "maxFPGAs": 12, "maxCPUs": 0, "nodes": nodes, "edges": edges}


def test_interrupted_plan_is_the_best_so_far_with_its_gap(tmp_path: Path) -> None:
    (tmp_path / "hard.json").write_text(json.dumps(hard()))
    command = [sys.executable, "-m", "pd2bw_fx", "plan", "--json", "--accelerators-only", "--workload"]
    with subprocess.Popen(
        [*command, str(tmp_path / "hard.json")], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        line = next(said for said in process.stderr if "objective" in said)  # a library may warn before it
        process.send_signal(signal.SIGINT)
        said, error = process.communicate()

    assert process.returncode == 0, error
    placement = json.loads(said)
    assert "gap" in line
    assert 0 < placement["gap"] < 1
    assert len(placement["assignment"]) == 150


def drawn(num_devices: int) -> Problem:
    draw = random.Random(0)
    work = [draw.uniform(1, 9) for _ in range(60)]
    blocks = tuple(
        Block(f"b{v}", (f"b{v}",), (w,) * num_devices, (w,) * num_devices) for v, w in enumerate(work)
    )
    values = tuple(
        Value(f"v{v}", f"b{draw.randrange(max(0, v - 9), v)}", (f"b{v}",), 9) for v in range(1, 60)
    )
    return Problem(blocks, values, {})


def test_ctrl_c_in_the_middle_of_a_search_gives_a_plan_that_states_its_gap() -> None:
    cluster = Cluster.uniform(4, memory_bytes=10**9, bytes_per_s=10.0, latency_s=0.1)

    def interrupt(progress: Progress) -> None:
        raise KeyboardInterrupt

    plan = partition(drawn(4), cluster, progress=interrupt)

    assert plan.bound_s <= plan.bottleneck_s
    assert sum(len(stage.operators) for stage in plan.stages) == 60


ALIKE = Cluster.uniform(3, memory_bytes=10**9, bytes_per_s=10.0, latency_s=0.1)


def requested(problem: Problem | None = None, **changes: Any) -> Plan:
    names = PlanRequest.__dataclass_fields__
    left_out = dict.fromkeys(names) | {"memory_model": MemoryModel(), "recompute": False, "solver": "highs"}
    numbers = {"max_gap": 1e-4, "time_limit_s": 60.0, "cluster": ALIKE}
    request = PlanRequest(**left_out | numbers | changes)
    return request.plan_and_shape(problem or drawn(3))[0]


MANY_SEARCHES = {
    "auto": lambda: requested(num_stages="auto"),
    "bapipe": lambda: requested(method="bapipe"),
    "copies": lambda: partition_replicated(drawn(3), ALIKE),
    "sweep": lambda: sweep({1: drawn(3)}, ALIKE, batch_size=12).best.plan,
}


@pytest.mark.parametrize("call", MANY_SEARCHES.values(), ids=MANY_SEARCHES.keys())
def test_one_ctrl_c_ends_all_searches_of_a_call(
    call: Callable[[], Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, begun = interrupted(call, monkeypatch)

    assert len(begun) == 1
    assert 0 <= plan.bound_s < plan.bottleneck_s


def test_one_ctrl_c_ends_an_explanation(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = partition(drawn(3), ALIKE, max_gap=0.2)

    found, begun = interrupted(lambda: explain(plan, drawn(3), ALIKE), monkeypatch)

    assert len(begun) == 1
    assert [cut.next_best_s for cut in found.cuts] == [None, None]


def interrupted(call: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> tuple[Any, list[float]]:
    """Interrupts the first search of a call; returns its result, and the time left as each search began."""
    begun: list[float] = []
    cut = SearchState.first_assignments

    def counted(state: SearchState) -> None:
        begun.extend([state.deadline.left_s] if state.deadline.left_s else [])
        cut(state)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(SearchState, "first_assignments", counted)
    monkeypatch.setattr(SearchState, "ask_programs", interrupt)
    return call(), begun


def test_a_number_of_stages_without_a_plan_in_time_leaves_nothing_proven(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arrange = plan_request.arrange

    def arranged(problem: Problem, cluster: Cluster, method: str, shape: Shape, **options: Any) -> Any:
        if shape.num_stages == 3:
            raise SolverError("the time limit passed")
        return arrange(problem, cluster, method, shape, **options)

    monkeypatch.setattr(plan_request, "arrange", arranged)

    assert requested(num_stages="auto", max_gap=0.1).bound_s == 0


@pytest.mark.parametrize("method", ["2bw", "1f1b", "gpipe", "bapipe", "interleaved", "chimera"])
@pytest.mark.parametrize("seed", range(6))
def test_any_number_of_stages_is_as_fast_as_the_fastest_of_them(seed: int, method: str) -> None:
    draw = random.Random(seed)
    speeds = [draw.choice((0.2, 1.0)) for _ in range(3)]
    work = [draw.choice((0.5, 1.0, 4.0)) for _ in range(8)]
    blocks = tuple(Block(f"b{v}", (), *2 * (tuple(w / s for s in speeds),)) for v, w in enumerate(work))
    num_bytes = draw.choice((1, 20, 60))
    values = tuple(
        Value(f"v{v}", f"b{draw.randrange(max(0, v - 2), v)}", (f"b{v}",), num_bytes) for v in range(1, 8)
    )
    problem = Problem(blocks, values, {})

    found = requested(problem, num_stages="auto", method=method)

    sizes = {"interleaved": (4, 6), "chimera": (2,)}.get(method, (1, 2, 3))
    of_each = [requested(problem, num_stages=size, method=method) for size in sizes]
    fastest_s = min(plan.update_s / plan.microbatches_per_update for plan in of_each)
    assert found.update_s / found.microbatches_per_update == pytest.approx(fastest_s, rel=1e-4)
    if method == "2bw":
        assert fastest_s * (1 - 1.01e-4) <= found.bound_s <= fastest_s


@pytest.mark.parametrize("method", ["2bw", "1f1b"])
def test_numbers_of_stages_whose_work_alone_takes_as_long_as_the_best_are_not_planned(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun: list[tuple[int, float]] = []
    arrange = plan_request.arrange

    def arranged(problem: Problem, cluster: Cluster, method: str, shape: Shape, **options: Any) -> Any:
        begun.append((shape.num_stages, options["options"]["time_limit_s"]))
        return arrange(problem, cluster, method, shape, **options)

    monkeypatch.setattr(plan_request, "arrange", arranged)

    blocks = tuple(Block(f"b{v}", (f"b{v}",), (1.0 + v % 3,) * 3, (0.0,) * 3) for v in range(18))
    row = Problem(blocks, tuple(Value(f"v{v}", f"b{v}", (f"b{v + 1}",), 10) for v in range(17)), {})
    plan = requested(row, num_stages="auto", method=method, time_limit_s=6000.0)

    assert [number for number, _ in begun] == [3]
    assert begun[0][1] == pytest.approx(4000.0, rel=0.01)
    assert plan.gap <= 1e-4


@pytest.mark.parametrize("first", ["nothing is proven", "no plan in time"])
@pytest.mark.parametrize("least", [1, 2, 3])  # of the numbers of stages that are open
def test_numbers_of_stages_that_are_open_are_asked_for_a_faster_plan_than_the_best(
    first: str, least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocks = tuple(Block(f"b{v}", (f"b{v}",), (1.0 + v % 3,) * 3, (0.0,) * 3) for v in range(9))
    row = Problem(blocks, tuple(Value(f"v{v}", f"b{v}", (f"b{v + 1}",), 10) for v in range(8)), {})
    rates = ((10.0, 10.0, 1.0), (10.0, 10.0, 1.0), (1.0, 1.0, 1.0))  # the third device is far away
    cluster = Cluster(ALIKE.devices, rates, ALIKE.latency_s)
    fastest_s = min(requested(row, num_stages=n, cluster=cluster).bottleneck_s for n in (1, 2, 3))
    arrange = plan_request.arrange

    def arranged(problem: Problem, cluster: Cluster, method: str, shape: Shape, **options: Any) -> Any:
        plan, shape = arrange(problem, cluster, method, shape, **options)
        if options["options"]["faster_than_s"] is None and shape.num_stages >= least:
            if first == "no plan in time" and shape.num_stages < 3:
                raise SolverError("the time limit passed")
            plan = replace(plan, bound_s=0.0)
        return plan, shape

    monkeypatch.setattr(plan_request, "arrange", arranged)

    plan = requested(row, num_stages="auto", cluster=cluster)

    assert plan.num_stages == 2
    assert plan.bottleneck_s == pytest.approx(fastest_s)
    assert fastest_s * (1 - 1e-4) <= plan.bound_s <= fastest_s


def test_ctrl_c_before_there_is_any_plan_gives_a_first_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(placement, "join_dominated", interrupt)
    found = placement.plan_workload(workload_from_json(hard(), name="hard"))
    assert 0 < found.bound <= found.objective
    assert len(found.assignment) == 150

    monkeypatch.undo()
    asked = iter([KeyboardInterrupt()])
    cut = SearchState.first_assignments

    def interrupted_once(state: SearchState) -> None:
        for interruption in asked:
            raise interruption
        cut(state)

    monkeypatch.setattr(SearchState, "first_assignments", interrupted_once)
    again = placement.plan_workload(workload_from_json(hard(), name="hard"))
    assert 0 < again.bound <= again.objective


@pytest.mark.parametrize("slowdown", [0.0, 0.1], ids=["devices alike", "devices unlike"])
def test_a_large_problem_has_a_plan_however_little_time_there_is(
    slowdown: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A close look at a cut takes a second and more there, and it was taken twelve times past the limit."""
    took_s = tuple(1.0 + slowdown * device for device in range(4))
    blocks = tuple(Block(f"b{v}", (f"b{v}",), took_s, took_s) for v in range(800))
    values = tuple(Value(f"v{v}", f"b{v - 1}", (f"b{v}",), 9) for v in range(1, 800))
    closely: list[int] = []
    monkeypatch.setattr(search_state, "best_cut", lambda *_: closely.append(1))

    plan = partition(Problem(blocks, values, {}), Cluster.uniform(4), time_limit_s=1e-3)

    assert not closely
    assert plan.num_stages == 4


@pytest.mark.parametrize(
    ("elapsed_s", "said"), [(1.9, ""), (2.1, "2.1 s: bottleneck 2 s, bound 1.5 s, gap 25.00%")]
)
def test_a_search_speaks_from_two_seconds_on_and_not_too_often(elapsed_s: float, said: str) -> None:
    stream = io.StringIO()
    line = ProgressLine(stream)

    for _ in range(3):
        line(Progress(incumbent_s=2.0, bound_s=1.5, elapsed_s=elapsed_s))
    line.close()

    assert stream.getvalue().count("gap") == bool(said)
    assert stream.getvalue().startswith(said)
