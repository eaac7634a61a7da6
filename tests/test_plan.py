"""Plans as files: written, read, edited by hand and checked."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

import pd2bw_fx
from pd2bw_fx.cluster import Cluster
from pd2bw_fx.constraints import Constraints
from pd2bw_fx.costs import MemoryModel
from pd2bw_fx.errors import InfeasibleError, InputError, PlanMismatchError
from pd2bw_fx.models import build
from pd2bw_fx.passes.partition import check_plan, partition
from pd2bw_fx.passes.schedule import METHODS
from pd2bw_fx.plan import Plan
from pd2bw_fx.problem import Block, ParameterSize, Problem, Value

BLOCKS = tuple(
    Block(f"b{at}", (f"op{at}", f"view{at}"), (1.0,) * 3, (2.0,) * 3, (f"w{at}",), 1000) for at in range(6)
)
VALUES = tuple(Value(f"v{at}", f"b{at}", (f"b{at + 1}",), 10, 10) for at in range(5))
PROBLEM = Problem(BLOCKS, VALUES, {f"w{at}": ParameterSize(100) for at in range(6)}, "print")
CLUSTER = Cluster.uniform(3, memory_bytes=9000, bytes_per_s=1e3, latency_s=0.0)


def edited(plan: Plan, *stages: tuple[int, ...], **changes: Any) -> Plan:
    """The plan's file with other blocks in its stages."""
    data = json.loads(plan.dumps())
    for entry, blocks in zip(data["stages"], stages, strict=True):
        entry["operators"] = [name for at in blocks for name in (f"op{at}", f"view{at}")]
    return Plan.from_json(data | changes)


@pytest.fixture(scope="module")
def traced() -> pd2bw_fx.Pipeline:
    return pd2bw_fx.split(build("mlp"), cluster=1, costs="analytic", check=False)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return partition(PROBLEM, CLUSTER)


def test_unchanged_plan_is_priced_as_it_was(plan: Plan) -> None:
    assert check_plan(Plan.from_json(json.loads(plan.dumps())), PROBLEM, CLUSTER) == plan


def test_edited_plan_gets_the_times_memory_and_transfers_that_it_has(plan: Plan) -> None:
    checked = check_plan(edited(plan, (0,), (1, 2, 3), (4, 5)), PROBLEM, CLUSTER)
    assert checked.bottleneck_s == pytest.approx(3 * 3.0 + 2 * 0.02)
    assert checked.bound_s == plan.bound_s
    assert checked.gap == pytest.approx(1 - plan.bound_s / checked.bottleneck_s)
    assert [t.value for t in checked.transfers] == ["v0", "v3"]
    assert checked.stages[1].parameters == ("w1", "w2", "w3")
    assert checked.stages[0].memory.total_bytes == 5 * 100 + 3 * (1000 + 10)


def test_an_update_is_priced_with_its_fill_and_with_stages_that_share_a_device() -> None:
    free = Cluster.uniform(3, memory_bytes=10**6, bytes_per_s=1e30, latency_s=0.0)  # two blocks of 3 s each

    def update_s(method: str, devices: tuple[int, ...] = (0, 1, 2)) -> float:
        plan = partition(PROBLEM, free, microbatches_per_update=4, method=method)
        stages = zip(plan.stages, devices, strict=True)
        moved = tuple(dataclasses.replace(stage, device=device) for stage, device in stages)
        slowest_s = 6.0 * max(devices.count(device) for device in devices)
        return dataclasses.replace(plan, stages=moved, bottleneck_s=slowest_s).update_s

    assert update_s("2bw") == pytest.approx(4 * 6.0)
    assert update_s("1f1b") == pytest.approx(3 * 6.0 + 3 * 6.0)
    # 000111222333      each microbatch passes three stages of one device: nothing to fill
    assert update_s("1f1b", (0, 0, 0)) == pytest.approx(4 * 18.0)


def test_a_bound_is_no_proof_for_other_costs_clusters_or_wishes(plan: Plan) -> None:
    assert check_plan(plan, PROBLEM, CLUSTER).proof == plan.proof
    assert "(proven): no plan of 3 stages is faster than" in plan.proof
    faster = dataclasses.replace(CLUSTER, latency_s=tuple((0.001,) * 3 for _ in range(3)))
    for problem, cluster, wishes in (
        (PROBLEM, faster, None),
        (PROBLEM, CLUSTER, Constraints(together=(("op0", "op1"),))),
        (dataclasses.replace(PROBLEM, blocks=tuple(map(_slower, PROBLEM.blocks))), CLUSTER, None),
    ):
        checked = check_plan(plan, problem, cluster, constraints=wishes)
        assert checked.bound_s == 0.0
        assert checked.proof == "how far it is from the optimum is not proven"
    pinned = partition(PROBLEM, CLUSTER, constraints=Constraints(stage_of={"op2": 1}))
    moved = edited(pinned, (0, 1), (2, 3), (4, 5))
    assert check_plan(moved, PROBLEM, CLUSTER).bound_s == 0.0


def _slower(block: Block) -> Block:
    return dataclasses.replace(block, backward_s=tuple(2 * s for s in block.backward_s))


def test_what_the_constraints_forbid_is_refused_in_a_plan_by_hand(plan: Plan) -> None:
    for wishes, error in (
        (Constraints(stage_of={"op2": 0}), r"'op2' is pinned to stage 0, and the plan has it on stage 1"),
        (Constraints(device_of={"op0": 2}), r"'op0' is pinned to device 2, .* on stage 0 \(device 0\)"),
        (
            Constraints(together=(("op1", "op2"),)),
            "must stay together: one is a view of the other, or constraints",
        ),
    ):
        with pytest.raises(PlanMismatchError, match=error):
            check_plan(plan, PROBLEM, CLUSTER, constraints=wishes)
    with pytest.raises(InfeasibleError, match="stage 0 needs"):
        check_plan(plan, PROBLEM, CLUSTER, constraints=Constraints(memory_bytes={0: 1000}))


def test_recomputation_switched_on_by_hand_is_paid_for(plan: Plan) -> None:
    stages = (dataclasses.replace(plan.stages[0], recompute=True), *plan.stages[1:])
    checked = check_plan(dataclasses.replace(plan, stages=stages), PROBLEM, CLUSTER)
    assert checked.stages[0].load_s == pytest.approx(plan.stages[0].load_s + 2.0)
    assert checked.stages[0].memory.activation_bytes == 2000


def test_recomputation_switched_off_by_hand_has_no_proof() -> None:
    again = partition(PROBLEM, CLUSTER, recompute=True)
    without = Plan.from_json(json.loads(again.dumps().replace('"recompute": true', '"recompute": false')))

    assert check_plan(again, PROBLEM, CLUSTER).proof == again.proof
    assert check_plan(without, PROBLEM, CLUSTER).bound_s == 0.0


@pytest.mark.parametrize("method", [name for name in METHODS if name != "inference"])
def test_every_method_s_own_plan_is_priced_as_it_was(method: str, traced: pd2bw_fx.Pipeline) -> None:
    pipe = pd2bw_fx.split(traced, cluster=2, method=method, check=False)

    again = pipe.check_plan(Plan.loads(pipe.plan.dumps()))

    assert again == pipe.plan
    assert again.proof == pipe.plan.proof


def test_what_a_method_keeps_is_not_the_file_s_to_say(traced: pd2bw_fx.Pipeline) -> None:
    pipe = pd2bw_fx.split(traced, cluster=2, check=False)
    data = json.loads(pipe.plan.dumps())
    for entry in data["stages"]:
        entry |= {"microbatches_in_flight": 1, "weight_versions": 1}

    assert [s.memory for s in pipe.check_plan(Plan.from_json(data)).stages] == [
        s.memory for s in pipe.plan.stages
    ]
    with pytest.raises(InputError, match="microbatches"):
        pipe.check_plan(Plan.from_json(data | {"microbatches_per_update": 1}))


SAID_OTHERWISE: list[dict[str, Any]] = [
    {"method": "1f1b"},
    {"num_stages": 3},
    {"microbatches_per_update": 8},
    {"chunks": 2},
    {"replicas": (2, 1)},
    {"recompute": True},
]


@pytest.mark.parametrize("said", SAID_OTHERWISE)
def test_what_is_said_beside_a_plan_is_not_otherwise(said: dict[str, Any], traced: pd2bw_fx.Pipeline) -> None:
    plan = pd2bw_fx.split(traced, cluster=2, check=False).plan
    same = {"method": "2bw", "num_stages": 2, "microbatches_per_update": 4, "replicas": 1}

    assert pd2bw_fx.split(traced, cluster=2, check=False, plan=plan, **same).plan == plan
    with pytest.raises(InputError, match=f"{next(iter(said))}=.* beside a plan that has"):
        pd2bw_fx.split(traced, cluster=3, plan=plan, **said)


def test_a_saved_pipeline_checks_plans_with_what_it_was_asked_for(tmp_path: Path) -> None:
    model = build("mlp")
    wishes = Constraints(memory_bytes={1: "1 GiB"}, device_of={"head": 1}, whole=("layers.*",))
    sgd = MemoryModel(optimizer_copies=0)
    pipe = pd2bw_fx.split(
        model, cluster=2, costs="analytic", check=False, constraints=wishes, memory_model=sgd
    )
    pipe.save(tmp_path / "saved")

    loaded = pd2bw_fx.load(tmp_path / "saved")

    assert loaded.planning_options == pipe.planning_options
    assert loaded.check_plan(loaded.plan).proof == pipe.plan.proof
    assert loaded.check_plan(loaded.plan).stages == pipe.plan.stages


def test_stage_that_no_longer_fits_is_named_with_its_bytes(plan: Plan) -> None:
    with pytest.raises(InfeasibleError, match=r"stage 0 needs .*\(14030 bytes\) on cpu:0.*\(9000 bytes\)"):
        check_plan(edited(plan, (0, 1, 2, 3), (4,), (5,)), PROBLEM, CLUSTER)


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        (((0, 1), (2, 3), (4,)), "operator 'op5' is in no stage"),
        (((0, 1), (1, 2, 3), (4, 5)), "operator 'op1' is in stage 0 and in stage 1"),
        (((0, 1, 1), (2, 3), (4, 5)), "operator 'op1' is twice in stage 0"),
        (((0, 1), (2, 4), (3, 5)), "'b4' in stage 1 reads 'v3', which stage 2 makes"),
        (((0, 1, 2), (), (3, 4, 5)), "stage 1 has no operators"),
        (((0, 1), (2, 3, 9), (4, 5)), "stage 1 lists 'op9', which is no operator of this graph"),
    ],
)
def test_assignment_that_cannot_be_is_named(plan: Plan, stages: Any, message: str) -> None:
    with pytest.raises(PlanMismatchError, match=message):
        check_plan(edited(plan, *stages), PROBLEM, CLUSTER)


def test_a_plan_without_stages_is_refused_and_is_no_optimum(plan: Plan) -> None:
    empty = Plan.from_json(plan.to_json() | {"stages": []})
    assert "not proven" in str(empty)
    with pytest.raises(PlanMismatchError, match="the plan has no stages; one has a part of the operators"):
        check_plan(empty, PROBLEM, CLUSTER)


def test_operators_that_belong_together_may_not_be_torn_apart(plan: Plan) -> None:
    data = plan.to_json()
    stages = [dict(entry) for entry in data["stages"]]
    stages[0]["operators"] = [name for name in stages[0]["operators"] if name != "view1"]
    stages[1]["operators"] = ["view1", *stages[1]["operators"]]
    torn = Plan.from_json(json.loads(json.dumps(data | {"stages": stages})))
    with pytest.raises(PlanMismatchError, match="'view1' is in stage 1 and 'op1' in stage 0"):
        check_plan(torn, PROBLEM, CLUSTER)


def test_plan_of_another_graph_is_refused(plan: Plan) -> None:
    with pytest.raises(PlanMismatchError, match="made for graph 'print', and this is 'other'"):
        check_plan(plan, dataclasses.replace(PROBLEM, fingerprint="other"), CLUSTER)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": 7}, "schema 7, this version reads 1"),
        ({"bottleneck_s": "fast"}, "plan.bottleneck_s is 'fast'; expected: number"),
        ({"bound_s": float("nan")}, "plan.bound_s is nan"),
        ({"microbatches_per_update": 2.5}, "plan.microbatches_per_update is 2.5; expected: integer"),
        ({"stages": [{}]}, r"plan.stages\[0\] has no 'stage'"),
        ({"transfers": None}, "plan.transfers is None; expected: array"),
        ({"metod": "2bw"}, "plan has 'metod', which says nothing there; did you mean 'method'?"),
        ({"bound_s": -1.0}, r"plan.bound_s is -1\.0; 0 \(nothing is proven\) to bottleneck_s"),
    ],
)
def test_entry_that_is_wrong_in_the_file_is_named(plan: Plan, change: Any, message: str) -> None:
    with pytest.raises(PlanMismatchError, match=message):
        Plan.from_json(json.loads(plan.dumps()) | change)


def test_schema_has_every_entry_of_a_written_plan(plan: Plan) -> None:
    schema = Plan.json_schema()
    written = json.loads(plan.dumps())
    assert written.keys() == schema["properties"].keys()
    assert set(schema["properties"]["stages"]["items"]["required"]) <= written["stages"][0].keys()
    assert schema["properties"]["stages"]["items"]["properties"]["operators"]["items"] == {"type": "string"}


@pytest.mark.parametrize("changed", [{"device": 2}, {"device_name": "cpu:2"}])
def test_a_device_has_one_index_and_one_name(changed: dict[str, Any], traced: pd2bw_fx.Pipeline) -> None:
    pipe = pd2bw_fx.split(traced, cluster=3, num_stages=2, check=False)
    data = json.loads(pipe.plan.dumps())
    data["stages"][0] |= changed
    with pytest.raises(
        PlanMismatchError, match=r"stage 0 is on device \d, which is 'cpu:\d' in this cluster, and"
    ):
        pipe.check_plan(Plan.from_json(data))
    data["stages"][0] |= {"device": 2, "device_name": "cpu:2"}
    assert pipe.check_plan(Plan.from_json(data)).stages[0].device == 2


def test_a_plan_is_not_taken_to_a_cluster_that_lists_its_devices_in_another_order(
    traced: pd2bw_fx.Pipeline,
) -> None:
    pipe = pd2bw_fx.split(traced, cluster=2, check=False)
    with pytest.raises(PlanMismatchError, match="lists its devices in another order"):
        pd2bw_fx.split(pipe, cluster=pipe.cluster.only((1, 0)), plan=pipe.plan, check=False)


def test_a_plan_for_another_microbatch_size_is_told_as_that() -> None:
    model = build("mlp")
    plan = pd2bw_fx.split(model, cluster=2, costs="analytic", check=False).plan
    larger = tuple(torch.cat([tensor] * 2) for tensor in model.example_inputs())
    with pytest.raises(PlanMismatchError, match="of the same operators: its tensors have other sizes"):
        pd2bw_fx.split(model, larger, cluster=2, costs="analytic", check=False, plan=plan)
