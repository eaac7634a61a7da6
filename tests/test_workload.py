"""Published workloads: the format, bad files, and the published optima."""

from __future__ import annotations

import copy
import json
import random
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pd2bw_fx.errors import InfeasibleError, InputError
from pd2bw_fx.passes.partition import Placement, placement, plan_workload
from pd2bw_fx.passes.solver import Status
from pd2bw_fx.workload import Workload, WorkloadEdge, read_workload, workload_from_json
from tests.drawn_workloads import PROVEN_WITHIN_S

FOLDER = Path(__file__).parent.parent / "benchmarks" / "workloads"
# Accelerators only, with the CPU: found by the paper's own program.
OPTIMA = {
    "layers_bert24_inference": (17.789906, 17.789906),
    "layers_bert24_training": (41.745813, 41.745813),
    "layers_gnmt_inference": (32.910658, 32.910658),
    "layers_gnmt_training": (107.004414, 107.004414),
    "layers_resnet50_inference": (34.222852, 33.774666),
    "layers_resnet50_training": (80.454887, 78.631813),
    "operators_bert_l-3_inference": (27.918568, 27.918568),
    "operators_bert_l-3_training": (65.303149, 65.303149),
    "operators_bert_l-6_inference": (33.989102, 29.579506),
    "operators_bert_l-6_training": (79.500857, 72.864966),
    "operators_bert_l-12_inference": (147.477984, 147.477984),
    "operators_bert_l-12_training": (437.997638, 437.997638),
    "operators_resnet50_inference": (128.073511, 124.348850),
    "operators_resnet50_training": (263.035289, 255.194416),
}


def loads(workload: Workload, placement: Placement) -> dict[str, float]:
    """Each device's load by the problem's definition, from the assignment by node id alone."""
    device_of = placement.assignment
    load: dict[str, float] = defaultdict(float)
    for node in workload.nodes:
        device = device_of[node.id]
        load[device] += node.cpu_time if device.startswith("cpu") else node.accelerator_time
    crossings = set()
    for edge in workload.edges:
        source, target = device_of[edge.source], device_of[edge.target]
        if source != target:
            crossings |= {(source, edge.source, edge.cost), (target, edge.source, edge.cost)}
    for device, _, cost in crossings:
        load[device] += 0.0 if device.startswith("cpu") else cost
    return load


def small() -> dict[str, Any]:
    def node(number: int, **more: Any) -> dict[str, Any]:
        return {
            "id": number,
            "supportedOnFpga": 1,
            "cpuLatency": 10.0,
            "fpgaLatency": 1.0,
            "size": 1.0,
        } | more

    return {
        "maxSizePerFPGA": 10.0,
        "maxFPGAs": 2,
        "maxCPUs": 1,
        "nodes": [node(1), node(2), node(3, fpgaLatency=2.0)],
        "edges": [
            {"sourceId": 1, "destId": 2, "cost": 0.5},
            {"sourceId": 2, "destId": 3, "cost": 0.25},
        ],
    }


@pytest.mark.parametrize("name", OPTIMA)
@pytest.mark.parametrize("accelerators_only", [True, False])
def test_published_optimum_is_found_and_proven(name: str, accelerators_only: bool) -> None:
    workload = read_workload(FOLDER / f"{name}.json")
    published = OPTIMA[name][0 if accelerators_only else 1]
    placement = plan_workload(workload, accelerators_only=accelerators_only)
    assert placement.objective == pytest.approx(published, abs=0.51e-6)
    assert placement.gap <= 1.001e-5
    assert max(loads(workload, placement).values()) == pytest.approx(placement.objective, rel=1e-9)
    assert {d: load for d, load in placement.loads.items() if load} == pytest.approx(
        loads(workload, placement), rel=1e-9
    )


def test_what_takes_the_papers_program_minutes_is_proven() -> None:
    workload = read_workload(FOLDER / "layers_inceptionv3_inference.json")
    placement = plan_workload(workload, time_limit_s=PROVEN_WITHIN_S)
    assert placement.objective == pytest.approx(51.551864, abs=0.51e-6)
    assert placement.gap <= 1.001e-5
    assert max(loads(workload, placement).values()) == pytest.approx(placement.objective, rel=1e-9)


def test_programs_prove_what_the_enumeration_of_few_down_sets_does(monkeypatch: pytest.MonkeyPatch) -> None:
    workload = read_workload(FOLDER / "operators_bert_l-6_inference.json")
    enumerated = plan_workload(workload)

    enumeration = "pd2bw_fx.passes.partition.placement._Enumeration"
    monkeypatch.setattr(f"{enumeration}.is_short", lambda self: False)
    monkeypatch.setattr(f"{enumeration}.__call__", lambda *_: (Status.UNKNOWN, -1, None))
    by_programs = plan_workload(workload, time_limit_s=PROVEN_WITHIN_S)

    assert by_programs.objective == pytest.approx(enumerated.objective, rel=1e-5)
    assert by_programs.gap <= 1.001e-5


@pytest.mark.parametrize("name", ["layers_resnet50_training", "operators_bert_l-3_training"])
def test_placement_keeps_colours_together_memory_and_forward_order(name: str) -> None:
    workload = read_workload(FOLDER / f"{name}.json")
    placement = plan_workload(workload, accelerators_only=True)
    device_of = {node: int(device.removeprefix("acc")) for node, device in placement.assignment.items()}
    forward = {node.id for node in workload.nodes if not node.is_backward}
    for edge in workload.edges:
        if edge.source in forward and edge.target in forward:
            assert device_of[edge.source] <= device_of[edge.target]
    colours = defaultdict(set)
    held: dict[int, float] = defaultdict(float)
    for node in workload.nodes:
        colours[("free", node.id) if node.color is None else node.color].add(device_of[node.id])
        held[device_of[node.id]] += node.num_bytes
    assert all(len(devices) == 1 for devices in colours.values())
    assert max(held.values()) <= workload.accelerator_bytes


def test_node_that_no_accelerator_takes_goes_to_the_cpu() -> None:
    data = small()
    data["nodes"][0]["supportedOnFpga"] = 0
    placement = plan_workload(workload_from_json(data, name="small"))
    assert placement.assignment[1] == "cpu0"
    assert placement.objective == 10.0


def test_node_that_nothing_takes_is_infeasible() -> None:
    data = small()
    data["nodes"][0]["supportedOnFpga"] = 0
    with pytest.raises(InfeasibleError, match="node 1 is not supported on accelerators"):
        plan_workload(workload_from_json(data, name="small"), accelerators_only=True)


def test_memory_of_accelerators_is_respected() -> None:
    data = small()
    data["maxSizePerFPGA"] = 2.0
    placement = plan_workload(workload_from_json(data, name="small"), accelerators_only=True)
    assert placement.objective == pytest.approx(2.25)
    data["maxSizePerFPGA"] = 1.0
    with pytest.raises(InfeasibleError, match="3 bytes of 3 nodes"):
        plan_workload(workload_from_json(data, name="small"), accelerators_only=True)


def test_what_is_said_to_be_enough_where_nodes_do_not_fit_is_enough_and_the_least() -> None:
    data = small() | {"maxSizePerFPGA": 50.0, "maxCPUs": 0}
    data["nodes"] = [data["nodes"][0] | {"id": at, "size": size} for at, size in enumerate([30, 40, 25, 35])]
    data["edges"] = [{"sourceId": at, "destId": at + 1, "cost": 0.5} for at in range(3)]

    with pytest.raises(
        InfeasibleError, match="With 4 accelerators, or 70 bytes each it fits; or give it a CPU"
    ):
        plan_workload(workload_from_json(data, name="row"))

    for enough in ({"maxFPGAs": 4}, {"maxSizePerFPGA": 70.0}):
        plan_workload(workload_from_json(data | enough, name="row"))
    for too_few in ({"maxFPGAs": 3}, {"maxSizePerFPGA": 69.0}):
        with pytest.raises(InfeasibleError):
            plan_workload(workload_from_json(data | too_few, name="row"))


def test_nodes_too_large_for_any_accelerator_are_named() -> None:
    data = small()
    data["nodes"][1]["size"] = 11
    with pytest.raises(InfeasibleError, match="node 2 alone needs 11 bytes, and an accelerator has 10"):
        plan_workload(workload_from_json(data, name="small"), accelerators_only=True)
    for node in data["nodes"][:2]:
        node |= {"size": 6, "colorClass": 1}
    with pytest.raises(InfeasibleError, match=r"nodes 1, 2, which share a colour .* need together 12 bytes"):
        plan_workload(workload_from_json(data, name="small"), accelerators_only=True)


def test_loads_are_printed_in_pipeline_order_and_small_times_with_their_digits() -> None:
    loads = {"acc0": 1.5e-9, "cpu0": 2e-10, "acc1": 0.0}
    assert str(Placement(1.5e-9, 1.4e-9, {7: "acc0", 8: "cpu0"}, 0.1, "highs", loads)) == (
        "objective 1.5e-09, bound 1.4e-09, gap 6.7e-02\n"
        "  acc0: load 1.5e-09, 1 node\n"
        "  cpu0: load 2e-10, 1 node\n"
        "  acc1: load 0, 0 nodes"
    )


@pytest.mark.parametrize(("num_nodes", "slowest"), [(33, 5.0), (32, 4.0)])
def test_equal_nodes_that_cannot_be_spread_evenly_are_proven_at_once(num_nodes: int, slowest: float) -> None:
    data = small() | {"edges": [], "maxFPGAs": 8}
    data["nodes"] = [data["nodes"][0] | {"id": at} for at in range(num_nodes)]
    placement = plan_workload(
        workload_from_json(data, name="equal"), accelerators_only=True, time_limit_s=1.0
    )
    assert placement.objective == slowest
    assert placement.gap <= 1e-5


@pytest.mark.parametrize("accelerators_only", [True, False])
def test_models_side_by_side_whose_last_tensors_are_dear_are_proven(accelerators_only: bool) -> None:
    # Four BERTs, each after the last hidden state of the one before: what makes their embeddings may run at
    # any time. No program closes this in a minute, and there are too many down-sets.
    published = read_workload(FOLDER / "operators_bert_l-3_inference.json")
    last, read = 218, 74  # the hidden state, and where the next one takes it
    nodes, edges = [], []
    for first in (0, 1000, 2000, 3000):
        for node in published.nodes:
            color = None if node.color is None else f"{node.color} of {first}"
            nodes.append(replace(node, id=node.id + first, color=color))
        edges += [WorkloadEdge(e.source + first, e.target + first, e.cost) for e in published.edges]
        if first:
            cost = next(edge.cost for edge in published.edges if edge.source == last)
            edges.append(WorkloadEdge(last + first - 1000, read + first, cost))
    workload = replace(published, num_accelerators=16, nodes=tuple(nodes), edges=tuple(edges))
    placement = plan_workload(workload, accelerators_only=accelerators_only, time_limit_s=PROVEN_WITHIN_S)
    assert placement.gap <= 1e-5
    assert placement.objective == pytest.approx(27.918568, rel=1e-5)
    assert max(loads(workload, placement).values()) == pytest.approx(placement.objective, rel=1e-9)


def test_same_workload_gives_the_same_placement() -> None:
    workload = read_workload(FOLDER / "layers_gnmt_inference.json")
    first, second = (plan_workload(workload) for _ in range(2))
    assert first.assignment == second.assignment


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        (("nodes", 0, "fpgaLatency"), float("nan"), r"nodes\[0\] \(id 1\): fpgaLatency is nan"),
        (("nodes", 1, "cpuLatency"), -1.0, r"nodes\[1\] \(id 2\): cpuLatency is -1.0"),
        (("nodes", 1, "size"), float("inf"), "size is inf"),
        (("nodes", 1, "size"), None, "size is missing"),
        (("nodes", 1, "id"), 1, "two nodes have id 1"),
        (("nodes", 1, "id"), "two", "id 'two'; a whole number"),
        (("edges", 0, "destId"), 99, r"edges\[0\]: destId is 99, and no node has that id"),
        (("edges", 0, "sourceId"), True, r"edges\[0\]: sourceId is True"),
        (("edges", 0, "sourceId"), [1], r"edges\[0\]: sourceId is \[1\]"),
        (("edges", 0, "cost"), "free", "cost is 'free'"),
        (("nodes", 0, "supportedOnFpga"), float("nan"), "supportedOnFpga is nan; 0, 1, true or false"),
        (("nodes", 0, "isBackwardNode"), "no", "isBackwardNode is 'no'"),
        (("nodes", 0, "colorClass"), float("nan"), "colorClass is nan; a whole number or a name"),
        (("nodes", 0, "fpgaLatency"), 10**400, "fpgaLatency is 10000"),
        (("maxFPGAs",), -1, "maxFPGAs is -1"),
        (("maxCPUs",), None, "maxCPUs is missing"),
        (("nodes", 0), None, r"nodes\[0\] is null"),
        (("maxSizePerFPGA",), None, "maxSizePerFPGA is missing"),
        (("nodes",), [], "nodes is empty"),
        (("nodes",), None, "nodes is missing"),
        (("edges",), 3, "edges is no list"),
    ],
)
def test_bad_entry_is_named(path: tuple[Any, ...], value: Any, message: str) -> None:
    data = small()
    place = data
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    with pytest.raises(InputError, match=message):
        workload_from_json(data, name="small")


@pytest.mark.parametrize("unit", [1.0, 1e-7])  # of the file's times: seconds have small ones
def test_edges_of_one_source_must_cost_the_same(unit: float) -> None:
    data = copy.deepcopy(small())
    data["edges"].append({"sourceId": 1, "destId": 3, "cost": 0.75})
    for edge in data["edges"]:
        edge["cost"] *= unit
    with pytest.raises(InputError, match=rf"output of node 1 costs {unit / 2:g} .* and {0.75 * unit:g}"):
        workload_from_json(data, name="small")


def chain(num_nodes: int, devices_of_each_kind: int) -> Workload:
    draw = random.Random(0)
    node = small()["nodes"][0]
    nodes = [
        node | {"id": at, "fpgaLatency": draw.uniform(1, 3), "cpuLatency": draw.uniform(3, 9)}
        for at in range(num_nodes)
    ]
    edges = [{"sourceId": at, "destId": at + 1, "cost": 1.0} for at in range(num_nodes - 1)]
    counts = {"maxFPGAs": devices_of_each_kind, "maxCPUs": devices_of_each_kind, "maxSizePerFPGA": 1e9}
    return workload_from_json({"nodes": nodes, "edges": edges, **counts}, name="chain")


def test_of_many_devices_of_both_kinds_no_more_orders_are_looked_at_than_there_is_time_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    few, many = plan_workload(chain(5, 5)), plan_workload(chain(5, 40))
    assert many.objective == few.objective  # no more devices than nodes have one
    looked_at, make = [0], placement._instance

    def counted(*args: Any) -> Any:
        looked_at[0] += 1
        return make(*args)

    monkeypatch.setattr(placement, "_instance", counted)
    plan_workload(chain(30, 8), time_limit_s=1e-3)  # 12,870 orders
    assert looked_at[0] < 100
    with pytest.raises(InputError, match=r"16 accelerators and 16 CPUs can stand in 601,080,390 orders"):
        plan_workload(chain(30, 16))


def test_zero_devices_are_refused() -> None:
    data = small() | {"maxFPGAs": 0, "maxCPUs": 0}
    with pytest.raises(InputError, match="at least one device"):
        workload_from_json(data, name="small")
    only_cpu = workload_from_json(small() | {"maxFPGAs": 0}, name="small")
    with pytest.raises(InputError, match="no accelerators"):
        plan_workload(only_cpu, accelerators_only=True)


def test_unreadable_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"missing\.json cannot be read"):
        read_workload(tmp_path / "missing.json")
    broken = tmp_path / "broken.json"
    broken.write_text("{")
    with pytest.raises(InputError, match=r"broken\.json is no valid JSON"):
        read_workload(broken)
    deep = tmp_path / "deep.json"
    deep.write_text("[" * 100_000)
    with pytest.raises(InputError, match=r"deep\.json is no valid JSON"):
        read_workload(deep)
    listed = tmp_path / "listed.json"
    listed.write_text(json.dumps([]))
    with pytest.raises(InputError, match=r"listed\.json: the file is a list"):
        read_workload(listed)


def test_a_cycle_through_colours_becomes_one_group() -> None:
    data = small()
    assert [(edge["sourceId"], edge["destId"]) for edge in data["edges"]] == [(1, 2), (2, 3)]
    data["nodes"][0]["colorClass"] = data["nodes"][2]["colorClass"] = 7
    placement = plan_workload(workload_from_json(data, name="small"))
    assert len(set(placement.assignment.values())) == 1


@pytest.mark.parametrize(("extra", "path"), [((3, 2), "2 -> 3 -> 2"), ((2, 2), "2 -> 2")])
def test_a_cycle_of_edges_is_refused(extra: tuple[int, int], path: str) -> None:
    data = small()
    data["edges"].append({"sourceId": extra[0], "destId": extra[1], "cost": 0.25})
    with pytest.raises(InputError, match=f"the edges {path} are a cycle"):
        workload_from_json(data, name="small")
