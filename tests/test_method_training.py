"""Every method of the field, trained on real processes, equals a reference of its own rule."""

from __future__ import annotations

import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest

from pd2bw_fx.actions import Shape
from tests.torchrun import torchrun_of_forks


def expected_alive(method: str, shape: Shape, stage: int) -> tuple[int, int]:
    """Weight versions, and microbatches in flight, of a stage on a rank, by the formulas of the papers."""
    d, m, replicas = (
        shape.num_stages,
        shape.microbatches_per_update,
        shape.replicas or (1,) * shape.num_stages,
    )
    each = m // replicas[stage]  # of an update, on one replica
    after = d - 1 - stage
    if method == "2bw":  # arXiv 2006.09503: two versions whatever d; slack holds more
        return 2, math.ceil(after * (1 + shape.slack)) + 1
    if method == "pipedream":  # NOAM of the stage and what follows it; a version for each update in flight
        warm_up = (sum(replicas) - 1 - sum(replicas[:stage])) // replicas[stage]
        deepest = d - 1 if shape.vertical_sync else warm_up
        return math.ceil(deepest / each) + 1, warm_up + 1
    if method in ("pb", "pipemare"):
        return 1, after + 1
    if method == "gpipe" or (method == "bapipe" and shape.base == "gpipe"):
        return 1, each
    if method in ("1f1b", "bapipe"):
        return 1, min(each, math.ceil(after * (1 + shape.slack)) + 1)
    if (
        method == "zb-h1"
    ):  # arXiv 2401.10241: weight gradients `stage` microbatches behind, the memory of 1F1B
        return 1, min(m, d)
    if method == "zb-h2":
        return 1, min(m, 2 * d - 1)
    if method == "zb-auto":
        assert shape.orders is not None
        now = [(word[0] == "F") - (word[0] == "W") for word in shape.orders[stage].split()]
        return 1, max(itertools.accumulate(now))
    assert method == "ddp"
    return 1, 1


def expected_on_rank(method: str, shape: Shape, rank: int) -> int:
    """Microbatches in flight of all stages of a rank together."""
    d, m = shape.num_stages, shape.microbatches_per_update
    if method == "chimera":  # arXiv 2107.06925: from D/2 + 1 at the ends to D in the middle
        return d // 2 + 1 + min(rank, d - 1 - rank)
    ranks = d // shape.chunks  # Megatron's warm-up: (v - 1) d + 2 (d - 1 - r) forwards
    return min(m * shape.chunks, (shape.chunks - 1) * ranks + 2 * (ranks - 1 - rank) + 1)


def check_alive(run: str, result: dict[str, Any]) -> None:
    method, shape = result["work"][0], Shape.from_json(result["work"][1])
    for rank, stages in enumerate(result["alive"]):
        if method in ("chimera", "interleaved"):
            assert {(held, needed) for held, needed, *_ in stages.values()} == {(1, 1)}, run
            of_rank = max(seen[-1] for seen in stages.values())
            if method == "chimera" and shape.microbatches_per_update > shape.num_stages:
                assert of_rank <= shape.num_stages, (run, rank)  # units of d microbatches, one after another
            else:
                assert of_rank == expected_on_rank(method, shape, rank), (run, rank)
            continue
        for name, (held, needed, in_flight, _) in stages.items():
            versions, microbatches = expected_alive(method, shape, int(name))
            assert held == versions, (run, rank)
            # Under vertical sync a later stage keeps versions that only microbatches to come will need.
            assert needed == versions or (shape.vertical_sync and int(name) > 0), (run, rank)
            assert in_flight == microbatches, (run, rank)


@pytest.mark.parametrize(
    ("num_ranks", "num_runs", "links"),
    [(2, 29, []), (2, 29, ["elsewhere.py", "in-order"]), (3, 17, []), (4, 27, [])],
)
def test_every_method_equals_a_reference_of_its_rule_and_holds_what_its_formula_says(
    num_ranks: int, num_runs: int, links: list[str], tmp_path: Path
) -> None:
    finished = torchrun_of_forks(num_ranks, *links, "equals_methods.py", tmp_path / "result.json")

    assert finished.returncode == 0, finished.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    assert len(result) == num_runs
    for run, difference in result.items():
        assert difference["loss"] <= 1e-12, run
        assert difference["weights"] <= 1e-12, run
        check_alive(run, difference)
        assert difference["is_freed"], run


def test_precision_is_that_of_torchs_autocast_and_loss_scale(tmp_path: Path) -> None:
    finished = torchrun_of_forks(2, "precision.py", tmp_path / "result.json")

    assert finished.returncode == 0, finished.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    assert len(result) == 3
    for run, (found, expected) in ((run, r["losses"]) for run, r in result.items()):
        assert found == pytest.approx(expected, rel=1e-6), run
    for run, r in result.items():
        assert r["scales"][0] == r["scales"][1], run
        assert r["weights"] <= 1e-6, run
    assert result["fp16 64.0"]["scales"][0] < result["fp16 1.0"]["scales"][0]
