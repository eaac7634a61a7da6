"""Arguments of the planner that cannot be: one line each, by the first that sees them."""

from __future__ import annotations

import functools
import json
import math
import tomllib
from collections.abc import Callable
from dataclasses import fields
from inspect import signature
from typing import Any, get_type_hints

import numpy as np
import pytest
import torch
from torch import nn

from pd2bw_fx.cluster import Cluster
from pd2bw_fx.compare import compare
from pd2bw_fx.constraints import Constraints
from pd2bw_fx.costs import MemoryModel
from pd2bw_fx.device import Device
from pd2bw_fx.errors import ClusterError, InputError, SolverError
from pd2bw_fx.metrics import Metrics
from pd2bw_fx.passes.partition import devices, partition, partition_replicated, plan_workload, sweep
from pd2bw_fx.passes.split import split
from pd2bw_fx.pipeline import Pipeline, load
from pd2bw_fx.plan import Plan
from pd2bw_fx.problem import Block, Problem
from pd2bw_fx.runtime.engine import Engine
from pd2bw_fx.runtime.local import train_local
from pd2bw_fx.runtime.options import EngineOptions, LocalOptions, RankOptions, TrainingOptions
from pd2bw_fx.workload import Workload

PROBLEM = Problem(tuple(Block(f"b{at}", (f"o{at}",), (1.0,) * 3, (2.0,) * 3) for at in range(4)), (), {})
CLUSTER = Cluster.uniform(3)
ROWS = torch.randn(2, 4)
WORKLOAD = Workload("none", 1, 0, 1.0, (), ())


def of(**device: Any) -> Cluster:
    return Cluster((Device(**{"name": "a", **device}),), ((0.0,),), ((0.0,),))


@functools.cache
def pipe() -> Pipeline:
    return split(
        nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)), torch.randn(2, 4), cluster=2, costs="analytic"
    )


WRONG: dict[str, tuple[Callable[[], Any], type[Exception]]] = {
    "device 'a': memory_bytes: 'lots' is no number of bytes": (lambda: of(memory_bytes="lots"), ClusterError),
    "memory_bytes is inf": (lambda: of(memory_bytes=math.inf), ClusterError),
    "speed is True": (lambda: of(memory_bytes=1, speed=True), ClusterError),
    "name is 3; a text": (lambda: of(memory_bytes=1, name=3), ClusterError),
    "host is None; a text": (lambda: of(memory_bytes=1, host=None), ClusterError),
    "kind is 'cuda:0'; 'cpu' or 'cuda' was expected": (
        lambda: Cluster.uniform(2, kind="cuda:0"),
        ClusterError,
    ),
    "1.5 is no whole number of bytes": (lambda: Cluster.uniform(2, memory_bytes=1.5), ClusterError),  # type: ignore[arg-type]
    "memory_bytes is 1.5; it must be a whole": (lambda: of(memory_bytes=1.5), ClusterError),
    "bytes_per_s is 1.0; a matrix was expected": (
        lambda: Cluster(CLUSTER.devices, 1.0, CLUSTER.latency_s),  # type: ignore[arg-type]
        ClusterError,
    ),
    r"devices\[0\] is \(0.0, .*; a Device was expected": (
        lambda: Cluster(CLUSTER.latency_s, CLUSTER.devices, CLUSTER.latency_s),  # type: ignore[arg-type]
        ClusterError,
    ),
    "there is no device 5; this cluster has 0 to 2": (lambda: CLUSTER.only([5]), ClusterError),
    "there is no device -1": (lambda: CLUSTER.only([-1]), ClusterError),
    "devices is 1; a sequence of indices": (lambda: CLUSTER.only(1), ClusterError),  # type: ignore[arg-type]
    "there is no device 3": (lambda: CLUSTER.transfer_s(0, 3, 1), ClusterError),
    "a message of -10 bytes": (lambda: CLUSTER.transfer_s(0, 1, -10), ClusterError),
    "num_devices is '2'; a whole number was": (lambda: Cluster.uniform("2"), ClusterError),  # type: ignore[arg-type]
    r"memory_bytes\[0\] is None": (
        lambda: Constraints(memory_bytes={0: None}),  # type: ignore[dict-item]
        InputError,
    ),
    "whole is 'blocks.0'; a tuple": (lambda: Constraints(whole="blocks.0"), InputError),  # type: ignore[arg-type]
    "1 among together or whole": (lambda: Constraints(whole=(1,)), InputError),  # type: ignore[arg-type]
    "2 among together": (lambda: Constraints(together=(("a", 2),)), InputError),  # type: ignore[arg-type]
    "optimizer_copies is -1": (lambda: MemoryModel(optimizer_copies=-1), InputError),
    r"order is \(0, 0\); expected 2 different devices of 0 to 2": (
        lambda: partition(PROBLEM, CLUSTER, num_stages=2, order=(0, 0)),
        InputError,
    ),
    "each microbatch size is 0": (lambda: sweep({0: PROBLEM}, CLUSTER, batch_size=8), InputError),
    "num_replicas is 2; a sequence": (
        lambda: sweep({1: PROBLEM}, CLUSTER, batch_size=8, num_replicas=2),  # type: ignore[arg-type]
        InputError,
    ),
    "before any of 3 settings had a plan": (
        lambda: sweep({1: PROBLEM}, CLUSTER, batch_size=8, time_limit_s=1e-9),
        SolverError,
    ),
    r"replicas is \(2, 1\), and num_stages=\(3,\)": (
        lambda: partition_replicated(PROBLEM, CLUSTER, replicas=(2, 1), num_stages=(3,)),
        InputError,
    ),
    "time_limit is no option of explain; did you mean time_limit_s": (
        lambda: pipe().explain(time_limit=4),
        InputError,
    ),
    "num_stage is no option of split; did you mean num_stages": (
        lambda: split(nn.Linear(4, 4), num_stage=2),  # type: ignore[call-arg]
        InputError,
    ),
    "pins is no option of Constraints; known are stage_of, device_of, together, whole, memory_bytes": (
        lambda: Constraints(pins={}),  # type: ignore[call-arg]
        InputError,
    ),
    "optimiser is no option of Pipeline.train_local; did you mean optimizer": (
        lambda: pipe().train_local([], optimiser=torch.optim.Adam),  # type: ignore[call-arg]
        InputError,
    ),
    "optimiser is no option of Engine.from_pipeline; did you mean optimizer": (
        lambda: Engine.from_pipeline(None, optimiser=torch.optim.Adam),  # type: ignore[call-arg]
        InputError,
    ),
    "batchsize is no option of sweep; did you mean batch_size": (
        lambda: sweep({1: PROBLEM}, CLUSTER, batchsize=2),  # type: ignore[call-arg]
        InputError,
    ),
    "updates is no option of simulate; did you mean num_updates": (
        lambda: pipe().simulate(updates=4),
        InputError,
    ),
    "strict is no option of Pipeline.load_state_dict; known is tensors": (
        lambda: pipe().load_state_dict({}, strict=False),  # type: ignore[call-arg]
        InputError,
    ),
    "compare: missing a required argument: 'cluster'; it takes model, cluster, methods": (
        lambda: compare(nn.Linear(4, 4), methd=1),  # type: ignore[call-arg]
        InputError,
    ),
    "Pipeline.save: too many positional arguments; it takes folder": (
        lambda: pipe().save("a", True),  # type: ignore[call-arg]
        InputError,
    ),
    "max_gap is 2; a share": (lambda: pipe().explain(max_gap=2), InputError),
    "time_limit_s is '5'; a positive number": (lambda: pipe().explain(time_limit_s="5"), InputError),
    "jitter is '0.1'; a share of": (lambda: pipe().simulate(jitter="0.1"), InputError),
    r"update_s is \[1.0\]; a number of seconds": (lambda: pipe().simulate(update_s=[1.0]), InputError),
    "update_s is -0.001; a number of seconds": (lambda: pipe().simulate(update_s=-1e-3), InputError),
    "calibration is 3; a Calibration": (lambda: pipe().simulate(calibration=3), InputError),
    "replicas is 'auto'; a whole number of one or more, or one for each stage, was": (
        lambda: pipe().simulate(replicas="auto"),  # type: ignore[arg-type]
        InputError,
    ),
    "microbatches_per_update is 1000000000; at most 10000": (
        lambda: pipe().simulate(microbatches_per_update=10**9),
        InputError,
    ),
    "num_updates is 1000000000, of 4 microbatches each; at most": (
        lambda: pipe().simulate(num_updates=10**9),
        InputError,
    ),
    r"costs=a dict \(.* \.\.\) is unknown; .*replace\(pipe.costs, operators=": (
        lambda: split(pipe(), cluster=2, costs=dict.fromkeys(range(99), 1.0)),
        InputError,
    ),
    "a timeline is None: nothing was recorded of that run": (lambda: pipe().calibration(None), InputError),
    "timeline is None; a Timeline": (lambda: pipe().peak_memory_bytes(None), InputError),  # type: ignore[arg-type]
    r"plan is a str \(.* \.\.\); a Plan": (lambda: pipe().check_plan(pipe().plan.dumps()), InputError),  # type: ignore[arg-type]
    r"tensors is a Sequential \(Sequential\(.*\); a dict": (
        lambda: pipe().load_state_dict(nn.Sequential(nn.Linear(9, 9))),  # type: ignore[arg-type]
        InputError,
    ),
    r"tensors\['0.weight'\] is a ndarray \(.*\); a tensor": (
        lambda: pipe().load_state_dict({"0.weight": np.ones((8, 4))}),  # type: ignore[dict-item]
        InputError,
    ),
    r"tensors\['0.bias'\] is 1": (lambda: pipe().load_state_dict({"0.bias": 1}), InputError),  # type: ignore[dict-item]
    "tolerance is '1e-3'; a number of zero": (lambda: pipe().verify(tolerance="1e-3"), InputError),  # type: ignore[arg-type]
    "tolerance is -1; a number of zero": (lambda: pipe().verify(tolerance=-1), InputError),
    r"example is a tuple \(.*; a dict of tensors": (lambda: pipe().verify(example=(ROWS,)), InputError),  # type: ignore[arg-type]
    r"example\['input'\] is 3; a tensor": (lambda: pipe().verify(example={"input": 3}), InputError),  # type: ignore[dict-item]
    "training is 'x'; True or False": (lambda: pipe().export_onnx("x", training="x"), InputError),  # type: ignore[arg-type]
    "external_above_bytes is '1 GB'; a whole": (
        lambda: pipe().export_onnx("x", external_above_bytes="1 GB"),  # type: ignore[arg-type]
        InputError,
    ),
    "path is None; a path": (lambda: pipe().report(None), InputError),  # type: ignore[arg-type]
    "path is 'x.pdf'; the page is HTML": (lambda: pipe().report("x.pdf"), InputError),
    "path is 3; a path": (lambda: pipe().draw("graph", 3), InputError),  # type: ignore[arg-type]
    "folder is 3; a path": (lambda: pipe().save(3), InputError),  # type: ignore[arg-type]
    "folder is 4; a path": (lambda: load(4), InputError),  # type: ignore[arg-type]
    "edited is 'yes'; True or False": (lambda: load("nowhere", edited="yes"), InputError),  # type: ignore[arg-type]
    "nowhere is no folder; one written": (lambda: load("nowhere"), InputError),
    "path is 5; a path": (lambda: Metrics.load(5), InputError),  # type: ignore[arg-type]
    "text is {}; the JSON": (lambda: Plan.loads({}), InputError),  # type: ignore[arg-type]
    "profile_cache is '/tmp/x'; True or False": (
        lambda: split(pipe(), cluster=2, profile_cache="/tmp/x"),  # type: ignore[arg-type]
        InputError,
    ),
    "'input' has 0 samples: the batch is empty; at least": (lambda: pipe().run(ROWS[:0]), InputError),
    "max_gap is nan": (lambda: plan_workload(WORKLOAD, max_gap=math.nan), InputError),
    "time_limit_s is -3": (lambda: plan_workload(WORKLOAD, time_limit_s=-3), InputError),
}


@pytest.mark.parametrize("message", WRONG)
def test_an_argument_that_cannot_be_is_refused_in_one_line(message: str) -> None:
    call, kind = WRONG[message]

    with pytest.raises(kind, match=message) as refused:
        call()
    assert "\n" not in str(refused.value)


def test_a_number_of_numpy_is_as_good_as_python_s() -> None:
    pair = tuple(Device(name, np.int64(2**30), speed=np.float32(1)) for name in "ab")  # type: ignore[arg-type]
    links = np.array([[0, 1e9], [1e9, 0]], dtype=np.float32)
    cluster = Cluster(pair, links, links / 1e15)  # type: ignore[arg-type]

    made = split(
        pipe(),
        cluster=cluster,
        num_stages=np.int32(2),  # type: ignore[arg-type]
        microbatches_per_update=np.int64(4),  # type: ignore[arg-type]
        max_gap=np.float32(0.01),  # type: ignore[arg-type]
        memory_model=MemoryModel(optimizer_copies=np.int64(1)),  # type: ignore[arg-type]
    )
    run = made.simulate(num_updates=np.int64(2), slack=np.float32(0), replicas=np.int8(1))  # type: ignore[arg-type]

    assert Cluster.of(np.int64(2)) == Cluster.uniform(2)  # type: ignore[arg-type]
    assert tomllib.loads(cluster.to_toml())["device"][0]["memory"] == 2**30
    written = [made.plan.to_json(), made.schedule.to_json(), cluster.to_json(), run.to_chrome_trace()]
    assert "numpy" not in json.dumps(written)
    with pytest.raises(InputError, match=r"num_stages is np.True_; a whole number"):
        split(pipe(), cluster=2, num_stages=np.True_)  # type: ignore[arg-type]


def test_the_memory_of_a_device_may_be_a_text() -> None:
    assert Device("a", "8 GiB") == Device("a", 8 * 2**30)


def test_a_device_is_compared_with_one_of_each_kind(monkeypatch: pytest.MonkeyPatch) -> None:
    cluster, compared = Cluster.uniform(3), []
    swappable = devices._swappable
    monkeypatch.setattr(devices, "_swappable", lambda *pair: compared.append(pair) or swappable(*pair))

    orders = devices.device_orders(PROBLEM, cluster, 2)

    assert orders == devices.DeviceOrders(((0, 1),))
    assert [pair[2:] for pair in compared] == [(1, 0), (2, 0)]


def test_no_more_microbatches_are_in_flight_than_an_update_has() -> None:
    plan = partition(PROBLEM, CLUSTER, method="1f1b", microbatches_per_update=2)

    assert [stage.microbatches_in_flight for stage in plan.stages] == [2, 2, 1]


def test_type_checkers_know_the_options_that_training_takes() -> None:
    of_a_rank, of_a_local_run = signature(Engine.from_pipeline).parameters, signature(train_local).parameters
    said = {"self", "pipeline", "batches", "optimizer", "method", "microbatches_per_update", "options"}
    both = {field.name for field in fields(EngineOptions)} | (set(of_a_rank) & set(of_a_local_run)) - said
    known = set(get_type_hints(TrainingOptions))
    assert known == both - {"optimizer"}
    assert set(get_type_hints(RankOptions)) == known | set(of_a_rank) - said
    assert set(get_type_hints(LocalOptions)) == known | set(of_a_local_run) - said
