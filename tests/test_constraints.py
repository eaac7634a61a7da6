"""What the user fixes holds in the plan, and costs no more than it must."""

from __future__ import annotations

import dataclasses
import itertools
import re
from typing import Any

import pytest

from pd2bw_fx.cluster import Cluster
from pd2bw_fx.constraints import Constraints
from pd2bw_fx.errors import InfeasibleError, InputError
from pd2bw_fx.passes.partition import partition
from pd2bw_fx.problem import Block, ParameterSize, Problem, Value


def chain(num_blocks: int, num_devices: int) -> Problem:
    """Blocks of 1 s forward and 2 s backward in a row, two to a layer: layers.0.in, layers.0.out, ..."""
    blocks = tuple(
        Block(f"op{at}", (f"op{at}",), (1.0,) * num_devices, (2.0,) * num_devices, (f"w{at}",))
        for at in range(num_blocks)
    )
    values = tuple(Value(f"op{at}", f"op{at}", (f"op{at + 1}",), 10, 10) for at in range(num_blocks - 1))
    modules = {f"op{at}": f"layers.{at // 2}.{'out' if at % 2 else 'in'}" for at in range(num_blocks)}
    return Problem(blocks, values, {f"w{at}": ParameterSize(100) for at in range(num_blocks)}, "", modules)


def roomy(num_devices: int) -> Cluster:
    return Cluster.uniform(num_devices, memory_bytes=10**9, bytes_per_s=1e3, latency_s=0.0)


def sizes(num_blocks: int, num_devices: int, **wishes: Any) -> list[int]:
    plan = partition(chain(num_blocks, num_devices), roomy(num_devices), constraints=Constraints(**wishes))
    return [len(stage.operators) for stage in plan.stages]


def test_pinned_operator_is_on_its_stage_and_the_rest_is_best_for_that() -> None:
    plan = partition(chain(6, 3), roomy(3), constraints=Constraints(stage_of={"op3": 0}))
    assert plan.stage_of["op3"] == 0
    assert plan.bottleneck_s == pytest.approx(4 * 3.0 + 0.02)
    assert plan.gap <= 1.01e-4


def test_every_operator_of_a_pinned_module_is_on_its_stage() -> None:
    plan = partition(chain(6, 3), roomy(3), constraints=Constraints(stage_of={"layers.1": 2}))
    assert {plan.stage_of[name] for name in ("op2", "op3")} == {2}


def test_module_pinned_to_a_device_is_on_the_stage_which_that_device_takes() -> None:
    plan = partition(chain(6, 3), roomy(3), constraints=Constraints(device_of={"layers.0.in": "cpu:2"}))
    assert plan.stages[0].device_name == "cpu:2"
    assert plan.stage_of["op0"] == 0
    assert plan.bottleneck_s == pytest.approx(6.04)


def test_module_kept_whole_is_not_cut_and_the_star_means_each_by_itself() -> None:
    assert sizes(6, 2) == [3, 3]
    assert sizes(6, 2, whole=("layers.1",)) in ([2, 4], [4, 2])
    assert sizes(12, 4, whole=("layers.*",)) in ([2, 4, 4, 2], [4, 2, 2, 4], [4, 4, 2, 2], [2, 2, 4, 4])


def test_what_lies_between_two_that_stay_together_stays_with_them() -> None:
    plan = partition(chain(8, 2), roomy(2), constraints=Constraints(together=(("op1", "layers.2.in"),)))
    assert len({plan.stage_of[f"op{at}"] for at in range(1, 5)}) == 1


def test_capped_device_holds_no_more_than_its_cap() -> None:
    capped = Constraints(memory_bytes={"cpu:0": 1300})
    plan = partition(chain(6, 2), roomy(2), constraints=capped)
    small = next(stage for stage in plan.stages if stage.device_name == "cpu:0")
    assert small.memory.total_bytes <= small.memory_limit_bytes == 1300
    assert len(small.operators) == 2


def test_pins_on_a_branchy_graph_agree_with_an_exhaustive_search() -> None:
    blocks = tuple(Block(f"b{at}", (f"b{at}",), (float(at % 4 + 1),) * 2, (2.0,) * 2) for at in range(7))
    reads = [(0, 1), (0, 2), (1, 3), (2, 4), (3, 5), (4, 5), (2, 6)]
    values = tuple(Value(f"v{u}{v}", f"b{u}", (f"b{v}",), 3, 3) for u, v in reads)
    problem = Problem(blocks, values, {})
    cluster = Cluster.uniform(2, memory_bytes=10**9, bytes_per_s=5.0, latency_s=0.25)
    for first, last in itertools.permutations(range(7), 2):
        best = min(
            (
                _bottleneck(blocks, reads, stages)
                for stages in itertools.product(range(2), repeat=7)
                if stages[first] == 0 and stages[last] == 1 and all(stages[u] <= stages[v] for u, v in reads)
            ),
            default=None,
        )
        pins = Constraints(stage_of={f"b{first}": 0, f"b{last}": 1})
        if best is None:
            with pytest.raises((InputError, InfeasibleError), match=f"b{first}"):
                partition(problem, cluster, constraints=pins)
        else:
            assert partition(problem, cluster, constraints=pins).bottleneck_s == pytest.approx(best, rel=1e-4)


def _bottleneck(blocks: Any, reads: Any, stages: Any) -> float:
    load = [0.0, 0.0]
    for block, stage in zip(blocks, stages, strict=True):
        load[stage] += block.forward_s[0] + block.backward_s[0]
    crossing = sum(stages[u] != stages[v] for u, v in reads) * 2 * (0.25 + 3 / 5)
    return max(load) + crossing


@pytest.mark.parametrize(
    ("wishes", "message"),
    [
        ({"stage_of": {"layers.7": 0}}, "called 'layers.7'; did you mean 'layers"),
        (
            {"whole": ("layer.*",)},
            r"called 'layer\.\*'; `\*` stands for one part of a path, .*; did you mean 'layers\.\*'",
        ),
        ({"stage_of": {"op1": 3}}, "'op1' is pinned to stage 3; the stages are 0 to 2"),
        ({"device_of": {"op1": "cpu:9"}}, "no device 'cpu:9'; it has cpu:0, cpu:1, cpu:2"),
        ({"stage_of": {"layers.1": 0, "op3": 1}}, "'op3' is pinned to stage 0 as 'layers.1' and to stage 1"),
        ({"stage_of": {"op1": 2, "op4": 1}}, "'op4' is pinned to stage 1 .* 'op1', pinned to stage 2"),
        ({"stage_of": {"op1": 0, "op2": 1}, "together": (("op1", "op2"),)}, "kept together"),
        ({"device_of": {"layers.0": 0, "op1": 1}}, "pinned to cpu:0 as 'layers.0' and to cpu:1 as 'op1'"),
        ({"together": (("op0", "op5"),)}, "1 block is left for 3 stages"),
        ({"together": ("op0", "op5")}, "give tuples of names"),
        ({"memory_bytes": {"cpu:0": "lots"}}, "'lots' is no number of bytes"),
        ({"device_of": {"op1": ()}}, r"device_of\['op1'\] names no device; one or more"),
    ],
)
def test_wish_that_cannot_be_granted_is_named(wishes: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        partition(chain(6, 3), roomy(3), constraints=Constraints(**wishes))


def test_no_constraints_change_nothing() -> None:
    plans = [partition(chain(7, 3), roomy(3), constraints=given) for given in (None, Constraints())]
    assert dataclasses.replace(plans[0], planning_s=0) == dataclasses.replace(plans[1], planning_s=0)


@pytest.mark.usefixtures("time_to_explain")
def test_wishes_that_exclude_one_another_are_the_only_ones_named() -> None:
    # cpu:0 takes one stage, and op0 and op5 can only share one if all six blocks are on it.
    wishes = Constraints(stage_of={"op2": 1}, device_of={"op0": "cpu:0", "op5": 0, "op3": 1})
    with pytest.raises(InfeasibleError, match=r"together on 3 stages, whatever the memory: ") as caught:
        partition(chain(6, 3), roomy(3), constraints=wishes)
    message = str(caught.value)
    assert "'op0' on device 0" in message
    assert message.count("' on ") == 2
    assert "kept together" not in message


@pytest.mark.usefixtures("time_to_explain")
def test_what_is_kept_together_with_a_pinned_block_is_named() -> None:
    wishes = Constraints(device_of={"op0": 0, "op4": 0}, together=(("op2", "op3"), ("op4", "op5")))
    with pytest.raises(InfeasibleError, match=r"'op4' on device 0 \('op4' and 'op5' kept together\); any"):
        partition(chain(6, 3), roomy(3), constraints=wishes)

    wishes = Constraints(stage_of={"op0": 0, "op3": 1}, together=(("op0", "op3"),))
    with pytest.raises(InputError, match="to stage 1 as 'op3'; 'op0' and 'op3' are kept together"):
        partition(chain(6, 3), roomy(3), constraints=wishes)


@pytest.mark.usefixtures("time_to_explain")
def test_infeasible_memory_names_the_devices_that_matter_and_what_would_do() -> None:
    capped = Constraints(memory_bytes={"cpu:0": 800, "cpu:1": 1900})
    # 500 bytes a block, 200 to step one, 20 a tensor at a cut: room for one on cpu:0, three on cpu:1.
    with pytest.raises(InfeasibleError, match=r"impossible because of cpu:0 .*; cpu:1") as caught:
        partition(chain(6, 2), roomy(2), constraints=capped)
    share = float(str(caught.value).split("All fits with ")[1].split(" times")[0]) * 1.01
    enough = Constraints(memory_bytes={"cpu:0": int(800 * share), "cpu:1": int(1900 * share)})
    assert partition(chain(6, 2), roomy(2), constraints=enough).num_stages == 2


@pytest.mark.usefixtures("time_to_explain")
def test_nearest_change_is_enough_and_little_less_is_not() -> None:
    capped = Constraints(memory_bytes={"cpu:0": 800, "cpu:1": 1900})
    with pytest.raises(InfeasibleError, match=r"With .* more on cpu:\d \(bottleneck") as caught:
        partition(chain(6, 2), roomy(2), constraints=capped)
    message = str(caught.value)
    found = re.findall(r"\((\d+) bytes\) more on (cpu:\d) \(bottleneck ([\d.]+) s\)", message)
    assert len(found) == 2
    for num_bytes, device, bottleneck_s in found:
        limit = {"cpu:0": 800, "cpu:1": 1900}
        enough = Constraints(memory_bytes=limit | {device: limit[device] + int(num_bytes)})
        plan = partition(chain(6, 2), roomy(2), constraints=enough)
        assert plan.bottleneck_s == pytest.approx(float(bottleneck_s), rel=0.01)
        less = Constraints(memory_bytes=limit | {device: limit[device] + int(int(num_bytes) * 0.97)})
        with pytest.raises(InfeasibleError):
            partition(chain(6, 2), roomy(2), constraints=less)


@pytest.mark.usefixtures("time_to_explain")
def test_recomputation_is_named_where_it_is_enough() -> None:
    problem = chain(6, 2)
    blocks = tuple(dataclasses.replace(block, saved_bytes=1000) for block in problem.blocks)
    problem = dataclasses.replace(problem, blocks=blocks)
    cluster = Cluster.uniform(2, memory_bytes=5200, bytes_per_s=1e3, latency_s=0.0)
    with pytest.raises(InfeasibleError, match=r'recompute="auto" \(bottleneck') as caught:
        partition(problem, cluster)
    stated = float(re.findall(r'recompute="auto" \(bottleneck ([\d.]+) s', str(caught.value))[0])
    assert partition(problem, cluster, recompute="auto").bottleneck_s == pytest.approx(stated, rel=0.01)


@pytest.mark.usefixtures("time_to_explain")
def test_only_what_was_not_tried_is_advised() -> None:
    # A block alone takes all the memory, so that no stage has room for a received tensor, however many there
    # are; recomputation has nothing to save.
    cluster = Cluster.uniform(2, memory_bytes=700, bytes_per_s=1e3, latency_s=0.0)
    with pytest.raises(InfeasibleError, match=r"on every device; or try a smaller microbatch$"):
        partition(chain(3, 2), cluster)


@pytest.mark.usefixtures("time_to_explain")
def test_fewest_stages_more_with_which_it_fits_are_named_and_really_are_enough() -> None:
    # 500 bytes a block, 200 to step one, 20 a tensor at a cut and in flight: three blocks at most.
    four, ten = roomy(4), chain(10, 4)
    devices = tuple(dataclasses.replace(device, memory_bytes=1900) for device in four.devices)
    cluster = dataclasses.replace(four, devices=devices)
    with pytest.raises(InfeasibleError, match=r"2 stages more on devices that are free") as caught:
        partition(ten, cluster, num_stages=2)
    stated = float(re.findall(r"num_stages=4\) \(bottleneck ([\d.]+) s", str(caught.value))[0])

    assert partition(ten, cluster, num_stages=4).bottleneck_s == pytest.approx(stated, rel=0.01)
    with pytest.raises(InfeasibleError):
        partition(ten, cluster, num_stages=3)


@pytest.mark.usefixtures("time_to_explain")
def test_devices_more_are_named_where_none_is_free() -> None:
    two = Cluster.uniform(2, memory_bytes=1900, bytes_per_s=1e3, latency_s=0.0)
    with pytest.raises(InfeasibleError, match=r"2 stages more on 2 more devices like cpu:1 \(") as caught:
        partition(chain(10, 2), two)
    stated = float(re.findall(r"like cpu:1 \(bottleneck ([\d.]+) s", str(caught.value))[0])

    four = Cluster.uniform(4, memory_bytes=1900, bytes_per_s=1e3, latency_s=0.0)
    assert partition(chain(10, 4), four).bottleneck_s == pytest.approx(stated, rel=0.01)
