"""Plans for methods that place stages in their own way, and what a pipeline simulates of each method."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import pd2bw_fx
from pd2bw_fx.actions import Kind, Shape
from pd2bw_fx.costs import MemoryModel
from pd2bw_fx.errors import InfeasibleError, InputError, PlanMismatchError
from pd2bw_fx.passes.coarsen import coarsen
from pd2bw_fx.passes.schedule import METHODS, check_schedule, schedule_of
from pd2bw_fx.passes.simulate import Durations, simulate_durations, versions_alive
from pd2bw_fx.pipeline import Pipeline
from pd2bw_fx.plan import as_one_stage
from pd2bw_fx.report.devices import fullest_device
from pd2bw_fx.report.memory import memory_svg
from pd2bw_fx.report.summary import tiles_html
from pd2bw_fx.report.timeline import timeline_svg
from pd2bw_fx.units import format_bytes, parse_bytes
from tests.stages import split_of_our_own


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(8))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return ((x - y) ** 2).mean()


def cluster_of(num_devices: int, memory: str = "1GiB") -> pd2bw_fx.Cluster:
    return pd2bw_fx.Cluster.uniform(num_devices, memory_bytes=memory, bytes_per_s=1e12, latency_s=1e-7)


@functools.cache
def traced() -> Pipeline:
    torch.manual_seed(0)
    example = (torch.randn(64, 256), torch.randn(64, 256))
    return pd2bw_fx.split(Net(), example, cluster=1, costs="analytic", check=False)


def split(num_devices: int, **options: object) -> Pipeline:
    options = {"cluster": cluster_of(num_devices), "costs": "analytic", "check": False} | options
    return pd2bw_fx.split(traced(), **options)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def on_two() -> Pipeline:
    return split(2)


def test_interleaved_has_its_stages_on_the_devices_in_turn() -> None:
    pipe = split(2, method="interleaved", chunks=2, check="fast")

    assert [stage.device for stage in pipe.plan.stages] == [0, 1, 0, 1]
    assert [stage.memory_limit_bytes for stage in pipe.plan.stages] == [2**29] * 4
    assert {a.stage for a in pipe.schedule.ranks[1]} == {1, 3}
    check_schedule(pipe.schedule)
    assert pipe.simulate().num_ranks == 2


def test_interleaved_is_faster_than_1f1b_by_the_smaller_bubble() -> None:
    once, twice = (split(2, method=name).simulate(num_updates=1) for name in ("1f1b", "interleaved"))

    assert twice.bubble < 0.75 * once.bubble
    assert twice.span_s < once.span_s


def test_chimera_plans_for_two_stages_on_each_device() -> None:
    pipe = split(2, method="chimera")

    assert [stage.memory_limit_bytes for stage in pipe.plan.stages] == [2**29] * 2
    assert all({a.stage for a in rank} == {0, 1} for rank in pipe.schedule.ranks)


def test_each_direction_of_chimera_goes_over_the_links_of_its_own_ranks() -> None:
    latency_s = ((0.0, 1.0, 2.0, 3.0), (4.0, 0.0, 5.0, 6.0), (7.0, 8.0, 0.0, 9.0), (10.0, 11.0, 12.0, 0.0))
    cluster = replace(cluster_of(4), latency_s=latency_s)

    timeline = split(4, method="chimera", cluster=cluster).simulate(links="latency")

    took_s = {
        (event.rank, event.stage, event.kind): round(event.duration_s)
        for event in timeline.events
        if event.kind in (Kind.SEND_ACTIVATION, Kind.SEND_GRADIENT)
    }
    steps = {Kind.SEND_ACTIVATION: 1, Kind.SEND_GRADIENT: -1}
    assert took_s == {
        (rank, stage, kind): latency_s[rank][rank + step * way]
        for way in (1, -1)  # the pipelines: down, with stage s on rank s, and up
        for rank in range(4)
        for stage in (rank if way == 1 else 3 - rank,)
        for kind, step in steps.items()
        if 0 <= stage + step < 4
    }


def test_bapipe_keeps_the_order_that_fits_and_is_fastest() -> None:
    pipe = split(2, method="bapipe")
    shape = pipe.schedule.shape

    assert shape is not None
    assert shape.base in ("1f1b", "gpipe")
    for method in ("1f1b", "gpipe"):
        assert pipe.simulate().span_s <= split(2, method=method).simulate().span_s * (1 + 1e-9)


@pytest.mark.parametrize(("bytes_per_s", "order"), [(1e12, "1f1b"), (1e8, "gpipe")])
def test_bapipe_takes_the_same_order_for_its_own_plan(bytes_per_s: float, order: str) -> None:
    cluster = pd2bw_fx.Cluster.uniform(2, memory_bytes="1GiB", bytes_per_s=bytes_per_s, latency_s=1e-7)
    pipe = split(2, method="bapipe", cluster=cluster)
    again = split(2, plan=pipe.plan, cluster=cluster)

    assert pipe.schedule.shape is not None
    assert pipe.schedule.shape.base == order
    assert again.schedule.shape == pipe.schedule.shape


def test_bapipe_says_what_does_not_fit() -> None:
    with pytest.raises(InfeasibleError, match=r"no assignment fits|alone needs"):
        split(2, method="bapipe", cluster=cluster_of(2, "1MiB"))


def test_memory_counts_the_versions_of_the_method(on_two: Pipeline) -> None:
    versions = {
        method: split(2, method=method).plan.stages[0].memory.weight_bytes
        for method in ("1f1b", "pb", "pipedream")
    }

    assert versions["pb"] == versions["1f1b"]
    assert versions["pipedream"] == on_two.plan.stages[0].memory.weight_bytes == 2 * versions["1f1b"]


@pytest.mark.parametrize("method", sorted(METHODS.keys() - {"interleaved", "inference"}))
def test_every_method_is_simulated_on_an_ordinary_plan(on_two: Pipeline, method: str) -> None:
    timeline = on_two.simulate(method=method, microbatches_per_update=4, num_updates=2)

    assert timeline.method == method
    assert timeline.num_ranks == 2
    assert timeline.num_microbatches == 8
    assert 0 <= timeline.bubble < 1


def test_replicas_wait_for_one_another_at_an_update(on_two: Pipeline) -> None:
    timeline = on_two.simulate(method="1f1b", microbatches_per_update=8, replicas=2, num_updates=2)

    waits = [event for event in timeline.events if event.kind is Kind.ALL_REDUCE]
    assert timeline.num_ranks == 4
    assert waits
    assert all("all-reduce" in causes for causes in timeline.idle_by_cause_s)


@pytest.mark.parametrize("method", ["1f1b", "pipedream"])
def test_tied_weights_are_waited_for(method: str) -> None:
    pipe = split_of_our_own("gpt", cluster=2, method=method)  # one matrix is on both stages
    slow = pd2bw_fx.Cluster.uniform(2, bytes_per_s=1e6, latency_s=0.0)
    (tied,) = set(pipe.plan.stages[0].parameters) & set(pipe.plan.stages[1].parameters)
    added_up_s = pipe.graph.parameters[tied].spec.num_bytes / 1e6

    timeline = pipe.simulate(num_updates=3, cluster=slow)
    waits = [event for event in timeline.events if event.kind is Kind.ALL_REDUCE]

    assert {event.rank for event in waits} == {0, 1}
    assert min(event.duration_s for event in waits) <= added_up_s * (1 + 1e-9)
    assert max(event.duration_s for event in waits if event.rank) >= added_up_s * (1 - 1e-9)


def test_data_parallelism_has_the_whole_model_on_every_rank(on_two: Pipeline) -> None:
    sizes = coarsen(on_two.graph, on_two.costs, on_two.cluster).parameters
    together = as_one_stage(on_two.plan, sizes, MemoryModel())
    timeline = on_two.simulate(method="ddp", num_updates=1)

    m, d = on_two.plan.microbatches_per_update, on_two.plan.num_stages
    assert together.stages[0].forward_s == sum(stage.forward_s for stage in on_two.plan.stages)
    work_s = together.stages[0].forward_s + together.stages[0].backward_s
    assert timeline.busy_s == pytest.approx([m / d * work_s] * d)


@pytest.mark.parametrize("method", ["2bw", "gpipe", "pipedream"])
def test_data_parallelism_holds_what_a_plan_for_it_does(method: str) -> None:
    cut = split_of_our_own("gpt", cluster=2, num_stages=2, method=method)  # one matrix is on both stages
    planned = split_of_our_own("gpt", cluster=2, method="ddp")

    found, expected = (
        pipe.peak_memory_bytes(pipe.simulate(method="ddp", microbatches_per_update=4, num_updates=3))
        for pipe in (cut, planned)
    )
    assert found == pytest.approx(expected, rel=0.01)


def test_the_peak_of_a_timeline_is_what_the_plan_allows_for(on_two: Pipeline) -> None:
    planned = [stage.memory.total_bytes for stage in on_two.plan.stages]

    assert on_two.peak_memory_bytes(on_two.simulate()) == pytest.approx(planned, rel=1e-3)


@pytest.mark.parametrize("method", ["1f1b", "gpipe"])
def test_what_is_computed_again_is_gone_when_gradients_have_come(method: str) -> None:
    pipe = split(2, method=method, recompute=True, microbatches_per_update=1)
    planned = [stage.memory.total_bytes for stage in pipe.plan.stages]

    assert pipe.peak_memory_bytes(pipe.simulate()) == pytest.approx(planned, rel=1e-3)


@pytest.mark.parametrize("m", [1, 2, 4])
def test_a_few_microbatches_of_interleaved_go_through_all_stages(m: int) -> None:
    pipe = split(4, method="interleaved", microbatches_per_update=m)

    simulated_s = m / pipe.simulate(num_updates=6).throughput
    assert pipe.plan.update_s == pytest.approx(simulated_s, rel=0.05)
    assert pipe.plan.update_s >= sum(stage.forward_s + stage.backward_s for stage in pipe.plan.stages)


@pytest.mark.parametrize("method", ["interleaved", "chimera"])
def test_the_fullest_device_is_told_with_all_of_its_stages(method: str) -> None:
    pipe = split(2, method=method, cluster=cluster_of(2, "16MiB"))
    held = fullest_device(pipe.plan)
    told = f"{format_bytes(held.num_bytes)} of 16 MiB"

    assert max(pipe.peak_memory_bytes(pipe.simulate())) <= held.num_bytes
    assert (held.num_stages, held.limit_bytes) == (2, 2**24)
    assert f"fullest device: {held.place}, {told} with its 2 stages" in str(pipe)
    assert f"{held.place}: {told}" in tiles_html(pipe.plan, None, None)
    assert f"{held.place} with all its stages: {told}" in memory_svg(pipe.plan)


def test_the_figures_of_data_parallelism_are_said_to_be_each_devices() -> None:
    pipe = split(2, method="ddp")

    assert "microbatches/s on each device where" in str(pipe)
    assert "a microbatch, each device, of its own microbatches" in tiles_html(pipe.plan, None, None)


def test_methods_hold_what_their_versions_and_microbatches_take(on_two: Pipeline) -> None:
    peaks = {
        method: on_two.peak_memory_bytes(on_two.simulate(method=method, microbatches_per_update=4))
        for method in ("2bw", "1f1b", "gpipe", "chimera", "ddp")
    }
    weights = [stage.memory.gradient_bytes for stage in on_two.plan.stages]

    assert peaks["2bw"][0] - peaks["1f1b"][0] == weights[0]
    assert peaks["gpipe"][1] > peaks["1f1b"][1]
    for method in ("chimera", "ddp"):  # the whole model on both ranks
        assert min(peaks[method]) > sum(4 * size for size in weights)


@pytest.mark.parametrize(("method", "versions"), [("2bw", 2), ("1f1b", 1), ("pb", 1), ("pipedream", 3)])
def test_the_versions_alive_in_a_timeline_are_those_of_the_method(method: str, versions: int) -> None:
    shape = Shape(3, 3 if method == "2bw" else 1)
    timeline = simulate_durations(
        schedule_of(method, shape, updates=range(6), drain=True), Durations.chain([1.0] * 3, [2.0] * 3)
    )

    assert versions_alive(timeline)[0, 0] == METHODS[method].num_versions(shape, 0) == versions


def test_plans_of_all_methods_are_saved_and_those_with_a_device_for_each_stage_explained(
    tmp_path: Path,
) -> None:
    for method in ("zb-auto", "interleaved"):
        pipe = split(2, method=method)
        pipe.save(tmp_path / method)
        assert pd2bw_fx.load(tmp_path / method).schedule == pipe.schedule

    explained = split(2, method="zb-h1").explain()
    assert len(explained.cuts) == 1
    with pytest.raises(InputError, match="explain the plan of 1f1b"):
        split(2, method="interleaved").explain()


def test_a_plan_for_another_placement_is_refused_with_what_to_do(on_two: Pipeline) -> None:
    with pytest.raises(InputError, match=r"split\(.., method='interleaved', chunks=2\)"):
        on_two.simulate(method="interleaved")
    with pytest.raises(InputError, match="only interleaved runs"):
        split(2, method="interleaved").simulate(method="2bw")
    with pytest.raises(InputError, match="try num_stages=4"):
        split(3, method="chimera")
    with pytest.raises(InputError, match="need 3 devices, and the cluster has 2; try num_stages=4"):
        split(2, method="interleaved", num_stages=6, microbatches_per_update=6)
    with pytest.raises(InputError, match="expected one of"):
        split(2, method="zigzag")


@pytest.mark.parametrize("method", ["interleaved", "chimera"])
def test_the_bottleneck_of_several_stages_on_a_device_is_the_devices(method: str) -> None:
    pipe = split_of_our_own("gpt", cluster=2, method=method)
    loads = [stage.load_s for stage in pipe.plan.stages]
    expected = max(loads[0] + loads[2], loads[1] + loads[3]) if method == "interleaved" else sum(loads) / 2

    assert pipe.plan.bottleneck_s == pytest.approx(expected)
    assert pipe.plan.bound_s == 0
    assert "the slowest device, with all stages on it" in str(pipe)
    assert pipe.check_plan(pipe.plan).bottleneck_s == pytest.approx(expected)


def test_a_place_of_chimera_is_as_the_lesser_of_both_its_devices() -> None:
    devices = pd2bw_fx.Cluster.uniform(2, memory_bytes="1 GiB").devices
    small = (devices[0], replace(devices[1], memory_bytes=3 * 2**20))
    cluster = replace(pd2bw_fx.Cluster.uniform(2), devices=small)
    with pytest.raises(InfeasibleError, match=r"has 1\.5 MiB"):
        split_of_our_own("gpt", cluster=cluster, method="chimera")


def test_a_plan_of_bapipe_costs_again_what_it_was_planned_at() -> None:
    cluster = pd2bw_fx.Cluster.uniform(3, bytes_per_s=1e8, latency_s=1e-5)
    pipe = split_of_our_own("gpt", cluster=cluster, method="bapipe")
    data = json.loads(pipe.plan.dumps())
    for stage in data["stages"]:
        stage["weight_versions"] = -5

    again = pipe.check_plan(pd2bw_fx.Plan.loads(json.dumps(data)))

    assert (again.bottleneck_s, again.bound_s) == (pipe.plan.bottleneck_s, pipe.plan.bound_s)
    assert again.stages == pipe.plan.stages


def unlike(*speeds: float, memory: tuple[str, ...]) -> pd2bw_fx.Cluster:
    like = cluster_of(len(speeds))
    devices = tuple(
        replace(device, speed=speed, memory_bytes=parse_bytes(size))
        for device, speed, size in zip(like.devices, speeds, memory, strict=True)
    )
    return replace(like, devices=devices)


def test_data_parallelism_waits_for_the_slowest_device_and_fits_on_the_smallest() -> None:
    pipe = split(3, cluster=unlike(2.0, 1.0, 0.1, memory=("1 GiB",) * 3), method="ddp")
    problem = coarsen(pipe.graph, pipe.costs, pipe.cluster)
    slowest_s = sum(block.forward_s[2] + block.backward_s[2] for block in problem.blocks)
    assert pipe.plan.bottleneck_s == pytest.approx(slowest_s)
    assert pipe.check_plan(pipe.plan).bottleneck_s == pytest.approx(slowest_s)
    assert pipe.simulate(num_updates=4).throughput <= 3 / slowest_s
    by_stages = split(3, cluster=pipe.cluster, method="1f1b", microbatches_per_update=6)
    assert by_stages.simulate(method="ddp", num_updates=4).throughput <= 3 / slowest_s

    with pytest.raises(InfeasibleError, match=r"every device \(cpu:1 has least\), .* has 100 KiB"):
        split(3, cluster=unlike(1.0, 1.0, 1.0, memory=("1 GiB", "100 KiB", "1 GiB")), method="ddp")


@pytest.mark.parametrize(
    ("method", "device", "pinned"),
    [("interleaved", 0, "cpu:3"), ("interleaved", "cpu:1", "cpu:3"), ("chimera", 0, "cpu:2")],
)
def test_a_cap_and_a_pin_are_kept_by_all_places_of_a_device(
    method: str, device: int | str, pinned: str
) -> None:
    wishes = pd2bw_fx.Constraints(memory_bytes={device: 2**20}, device_of={"head": pinned})
    pipe = split_of_our_own("gpt", cluster=4, method=method, constraints=wishes, max_gap=0.2)
    peaks = pipe.peak_memory_bytes(pipe.simulate(num_updates=4))
    assert peaks[0 if device == 0 else 1] <= 2**20 < max(peaks)
    head = next(n for n, operator in pipe.graph.operators.items() if operator.module_path == "head")
    rank = pipe.schedule.ranks[int(pinned[-1])]
    assert pipe.plan.stage_of[head] in {action.stage for action in rank}
    assert pipe.check_plan(pipe.plan).bottleneck_s == pytest.approx(pipe.plan.bottleneck_s)


def test_a_plan_of_bapipe_is_explained_with_the_overlap_that_it_was_made_with(tmp_path: Path) -> None:
    cluster = pd2bw_fx.Cluster.uniform(3, bytes_per_s=1e8, latency_s=1e-5)
    pipe = split_of_our_own("gpt", cluster=cluster, method="bapipe")
    assert pipe.schedule.shape is not None
    assert pipe.schedule.shape.slack > 0
    pipe.save(tmp_path / "gpt")
    for each in (pipe, pd2bw_fx.load(tmp_path / "gpt")):
        told = each.explain()
        assert all(slack.used <= slack.limit * (1 + 1e-9) for slack in told.slacks)
    with pytest.raises(PlanMismatchError, match=r"takes .* and .* overlap=False .*; explain"):
        pipe.explain(overlap=False)


@pytest.mark.parametrize("method", ["pipedream", "2bw"])
@pytest.mark.parametrize("num_updates", [None, 5, 24])
def test_the_throughput_is_that_of_the_steady_state_however_few_updates_are_simulated(
    method: str, num_updates: int | None
) -> None:
    pipe = split(4, cluster=unlike(2.0, 1.0, 1.0, 0.5, memory=("1 GiB",) * 4), method=method)
    slowest_s = max(stage.forward_s + stage.backward_s for stage in pipe.plan.stages)
    timeline = pipe.simulate(num_updates=num_updates)
    assert timeline.throughput == pytest.approx(1 / slowest_s, rel=0.02)
    assert f"{timeline.throughput:.3g} microbatches/s in the steady state" in timeline_svg(timeline)
