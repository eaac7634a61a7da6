"""Choosing the microbatch before a model is split."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from torch import nn

import pd2bw_fx
from pd2bw_fx.errors import InfeasibleError, InputError, Pd2bwError
from pd2bw_fx.models import build
from pd2bw_fx.sweep import Sweep


def test_the_best_setting_is_one_that_split_takes() -> None:
    model = build("mlp")
    cluster = pd2bw_fx.Cluster.uniform(2, memory_bytes="1 GiB")

    found = pd2bw_fx.tune(model, batch_size=16, microbatch_sizes=(1, 4), cluster=cluster, costs="analytic")

    best = found.best
    assert best.microbatch_size * best.microbatches_per_update == 16
    assert best.update_s == min(setting.update_s for setting in found.settings)
    assert str(found).splitlines()[0] == str(best)
    assert "1 stage, 1 copy, microbatches of 4, 4 an update" in str(found)
    two = next(setting for setting in found.settings if setting.num_stages == 2)
    inputs = model.example_inputs(two.microbatch_size)  # type: ignore[operator]
    pipe = pd2bw_fx.split(model, inputs, cluster=cluster, costs="analytic", plan=two.plan)
    assert pipe.plan.microbatches_per_update == two.microbatches_per_update
    assert pipe.plan.bottleneck_s == pytest.approx(two.plan.bottleneck_s)


def test_memory_guards_the_microbatch() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))

    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return ((output - target) ** 2).mean()

    def tuned(memory_bytes: int, *sizes: int) -> Sweep:
        x = torch.randn(8, 64)
        return pd2bw_fx.tune(
            model,
            x,
            loss_fn=loss_fn,
            example_targets=x,
            batch_size=1024,
            microbatch_sizes=sizes,
            num_stages=(2,),
            cluster=pd2bw_fx.Cluster.uniform(2, memory_bytes=memory_bytes),
            costs="analytic",
            recompute=False,
        )

    needs = [
        max(stage.memory.total_bytes for stage in tuned(10**9, size).best.plan.stages) for size in (16, 256)
    ]
    assert needs[0] < needs[1]
    assert tuned(10**9, 16, 256).best.microbatch_size == 256
    assert tuned(needs[0] + 100, 16, 256).best.microbatch_size == 16
    with pytest.raises(InfeasibleError, match="no setting fits"):
        tuned(needs[0] // 4, 16, 256)


@pytest.mark.parametrize("costs", ["analytic", "measured"])
def test_sizes_that_a_model_cannot_run_are_left_out_or_named(costs: Literal["analytic", "measured"]) -> None:
    """BatchNorm cannot train on one sample."""
    model, x = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)), torch.randn(8, 8)

    found = pd2bw_fx.tune(model, x, batch_size=4, cluster=2, costs=costs)

    name, reason = found.skipped[0]
    assert name == "microbatches of 1"
    assert f"{name}: {reason}" in str(found)  # also what stands behind a colon in it
    slower = {name for name, reason in found.skipped if reason.startswith("not planned, since its work")}
    sizes = {size for size in (2, 4) if any(f"microbatches of {size}" in name for name in slower)}
    planned = {setting.microbatch_size for setting in found.settings}
    assert planned | sizes == {2, 4}
    assert costs == "measured" or planned == {2, 4}
    with pytest.raises(Pd2bwError, match="with microbatches of 1: "):
        pd2bw_fx.tune(model, x, batch_size=4, microbatch_sizes=(1, 2), cluster=2, costs=costs)
    with pytest.raises(Pd2bwError):
        pd2bw_fx.tune(model, x, batch_size=1, cluster=2, costs=costs)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"batch_size": 7, "microbatch_sizes": (2,)}, "divides a batch of 7"),
        (
            {"batch_size": 8, "num_stages": (9,)},
            r"num_stages=\(9,\): 9 stages need 9 devices, and the cluster has",
        ),
        ({"batch_size": 8, "microbatch_sizes": (0,)}, "each of microbatch_sizes is 0"),
        ({"batch_size": 8, "microbatch_sizes": ()}, "microbatch_sizes is empty"),
        ({"batch_size": 8, "microbatch_sizes": 4}, "microbatch_sizes is 4; a sequence of numbers"),
        ({"batch_size": 0.5}, "batch_size is 0.5"),
        ({"batch_size": 8, "method": "zb-h1"}, "method is 'zb-h1'; '2bw' or '1f1b' or 'gpipe'"),
    ],
)
def test_sizes_that_make_no_sense_are_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message):
        pd2bw_fx.tune(build("mlp"), cluster=2, costs="analytic", **arguments)  # type: ignore[arg-type]


def test_without_inputs_there_is_nothing_to_size() -> None:
    with pytest.raises(InputError, match="pass example_args"):
        pd2bw_fx.tune(nn.Linear(3, 3), batch_size=8)


class NeverRun(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise AssertionError("traced before the options of the search were looked at")


@pytest.mark.parametrize("wrong", [{"max_gap": 2.0}, {"time_limit_s": 0}])
def test_options_of_the_search_are_looked_at_before_the_model(wrong: dict[str, float]) -> None:
    with pytest.raises(InputError, match=next(iter(wrong))):
        pd2bw_fx.tune(NeverRun(), torch.randn(4, 3), batch_size=8, **wrong)  # type: ignore[arg-type]
