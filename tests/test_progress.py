"""What a long search says, and what Ctrl-C leaves of it."""

from __future__ import annotations

import io
import json
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from pd2bw_fx.cluster import Cluster
from pd2bw_fx.commands.progress import ProgressLine
from pd2bw_fx.passes.partition import partition, placement
from pd2bw_fx.passes.partition.search.search_state import SearchState
from pd2bw_fx.plan import Progress
from pd2bw_fx.problem import Block, Problem, Value
from pd2bw_fx.workload import workload_from_json


def hard(num_nodes: int = 400) -> dict[str, object]:
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
    assert len(placement["assignment"]) == 400


def test_ctrl_c_in_the_middle_of_a_search_gives_a_plan_that_states_its_gap() -> None:
    draw = random.Random(0)
    work = [draw.uniform(1, 9) for _ in range(60)]
    blocks = tuple(Block(f"b{v}", (f"b{v}",), (w,) * 4, (w,) * 4) for v, w in enumerate(work))
    values = tuple(
        Value(f"v{v}", f"b{draw.randrange(max(0, v - 9), v)}", (f"b{v}",), 9) for v in range(1, 60)
    )
    cluster = Cluster.uniform(4, memory_bytes=10**9, bytes_per_s=10.0, latency_s=0.1)

    def interrupt(progress: Progress) -> None:
        raise KeyboardInterrupt

    plan = partition(Problem(blocks, values, {}), cluster, progress=interrupt)

    assert plan.bound_s <= plan.bottleneck_s
    assert sum(len(stage.operators) for stage in plan.stages) == 60


def test_ctrl_c_before_there_is_any_plan_gives_a_first_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(placement, "join_dominated", interrupt)
    found = placement.plan_workload(workload_from_json(hard(), name="hard"))
    assert 0 < found.bound <= found.objective
    assert len(found.assignment) == 400

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
