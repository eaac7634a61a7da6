"""Published operator graphs with more layers: with as many as they have they are themselves."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.planner_deeper import deeper
from pd2bw_fx.passes.partition import plan_workload
from pd2bw_fx.workload import read_workload
from tests.test_workload import FOLDER

FILES = [FOLDER / f"operators_bert_l-3_{kind}.json" for kind in ("inference", "training")]


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_with_three_layers_it_is_the_published_graph(file: Path) -> None:
    published, made = read_workload(file), deeper(file, 3)

    assert made.nodes == published.nodes
    assert Counter(made.edges) == Counter(published.edges)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_each_layer_more_is_as_many_nodes_and_as_much_work_as_the_last(file: Path) -> None:
    made = [deeper(file, layers) for layers in (3, 4, 5)]

    sizes = [len(workload.nodes) for workload in made]
    work = [sum(node.accelerator_time for node in workload.nodes) for workload in made]
    assert sizes[2] - sizes[1] == sizes[1] - sizes[0] > 60
    assert work[2] - work[1] == pytest.approx(work[1] - work[0])


def test_few_down_sets_are_enumerated_where_programs_have_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three accelerators and a CPU: programs for four orders of the devices, or one enumeration."""
    workload = replace(deeper(FILES[0], 6), num_accelerators=3)
    by_programs = plan_workload(workload)

    monkeypatch.setattr("pd2bw_fx.passes.partition.search._FIRST_SHARE_OF_WORKLOADS", 0.0)
    monkeypatch.setattr("pd2bw_fx.passes.partition.search._FEW_ORDERS", 0)
    enumerated = plan_workload(workload)

    assert enumerated.objective == pytest.approx(by_programs.objective, rel=1e-5)
    assert enumerated.gap <= 1e-5
