"""Whatever is drawn of model, cut, schedule and options, an engine trains as one process does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.torchrun import PROGRAMS

RANKS = 4


class World:
    """Four ranks that train what they are told until their input ends."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(RANKS)]
        path = os.pathsep.join([str(PROGRAMS.parents[1]), os.environ.get("PYTHONPATH", "")])
        self._process = subprocess.Popen(
            [*command, str(PROGRAMS / "drawn_runs.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path},
            text=True,
        )

    def run(self, drawn: dict[str, Any]) -> dict[str, float]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(drawn) + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, f"the ranks ended in {drawn}"
        found: dict[str, float] = json.loads(answer)
        return found

    def end(self) -> None:
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=20)
        finally:
            self._process.kill()


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    world = World()
    yield world
    world.end()


@st.composite
def runs(draw: st.DrawFn) -> dict[str, Any]:
    method = draw(st.sampled_from(["2bw", "2bw", "1f1b", "gpipe", "zb-h1", "chimera", "interleaved"]))
    num_stages = {"zb-h1": RANKS, "chimera": RANKS, "interleaved": 2 * RANKS}.get(method) or draw(
        st.sampled_from([2, 4])
    )
    replicas = max(1, RANKS // num_stages)
    layers = draw(st.integers(num_stages, num_stages + 3))
    index = st.integers(0, layers - 1)
    pairs = st.lists(st.tuples(index, index).filter(lambda pair: pair[0] < pair[1]), max_size=3)
    each = draw(st.integers(num_stages, 7)) if method == "2bw" else draw(st.integers(1, 7))
    m = 4 * ((each + 3) // 4) if method in ("chimera", "interleaved") else each * replicas
    least = num_stages - 1  # forwards that stage 0 begins with; up to m // replicas are allowed
    return {
        "method": method,
        "num_stages": num_stages,
        "replicas": replicas,
        "m": m,
        "slack": draw(st.integers(0, min(m // replicas - least, 2 * least))) / least
        if method == "2bw"
        else 0.0,
        "recompute": draw(st.booleans()),
        "optimizer": draw(st.sampled_from(["sgd", "momentum", "adamw"])),
        "clips": draw(st.booleans()),
        "layers": layers,
        "skips": draw(pairs),
        "ties": draw(pairs),
        "frozen": draw(st.lists(index, max_size=2)),
        "meets": draw(st.booleans()),
    }


FAR = {  # stage 0 sends to stage 7 on the rank that sends from stage 3 to its own stage 4
    "method": "interleaved",
    "num_stages": 8,
    "replicas": 1,
    "m": 4,
    "slack": 0.0,
    "recompute": False,
    "optimizer": "sgd",
    "clips": False,
    "layers": 9,
    "skips": [[1, 8]],
    "ties": [],
    "frozen": [],
    "meets": False,
}


@given(drawn=runs())
@example(drawn=FAR)
@settings(
    max_examples=20,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
)
def test_every_run_equals_the_reference_in_one_process(world: World, drawn: dict[str, Any]) -> None:
    found = world.run(drawn)

    assert found["loss"] < 1e-12
    assert found["weights"] < 1e-11
