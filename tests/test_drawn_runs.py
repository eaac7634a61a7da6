"""Whatever is drawn of model, cut, schedule and options, an engine trains as one process does."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any, TextIO

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.torchrun import TIMEOUT_S, start_forks

RANKS = 4


class World:
    """Four ranks that train what they are told."""

    def __init__(self, asked: TextIO, answered: TextIO) -> None:
        self._asked, self._answered = asked, answered

    def run(self, drawn: dict[str, Any]) -> dict[str, float]:
        self._asked.write(json.dumps(drawn) + "\n")
        self._asked.flush()
        answer = self._answered.readline()
        assert answer, f"the ranks ended in {drawn}"
        found: dict[str, float] = json.loads(answer)
        return found


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """The ranks end when nobody can ask them any more."""
    pipes = [tmp_path_factory.mktemp("world") / name for name in ("asked", "answered")]
    for pipe in pipes:
        os.mkfifo(pipe)
    ranks = start_forks(RANKS, "drawn_runs.py", *pipes)
    try:
        with pipes[0].open("w") as asked, pipes[1].open() as answered:  # as rank 0 opens them
            yield World(asked, answered)
        ranks.wait(TIMEOUT_S)
    finally:
        ranks.kill()


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
