"""A pipeline that is split again: planned anew, without another trace or profile."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import pd2bw_fx
from pd2bw_fx.models import build
from pd2bw_fx.passes import trace_and_profile


@pytest.fixture(scope="module")
def pipe() -> pd2bw_fx.Pipeline:
    torch.manual_seed(0)
    return pd2bw_fx.split(build("mlp"), cluster=2, costs="analytic")


def test_a_pipeline_is_planned_as_its_model_would_be_without_a_second_trace(
    pipe: pd2bw_fx.Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = pipe.graph.root
    assert model is not None
    wanted: dict[str, Any] = {"cluster": 3, "method": "1f1b", "microbatches_per_update": 5}
    expected = pd2bw_fx.split(model, costs="analytic", **wanted)
    monkeypatch.setattr(trace_and_profile, "trace", None)
    monkeypatch.setattr(trace_and_profile, "profile", None)

    again = pd2bw_fx.split(pipe, **wanted)

    assert again.plan.stage_of == expected.plan.stage_of
    assert again.plan.method == "1f1b"
    assert again.schedule == expected.schedule
    assert [stage.source for stage in again.stages] == [stage.source for stage in expected.stages]
    assert again.verify().exact
    assert pipe.plan.num_stages == 2


def test_the_second_pipeline_has_the_current_weights_and_the_first_keeps_its_own() -> None:
    torch.manual_seed(0)
    model = build("mlp")
    pipe = pd2bw_fx.split(model, cluster=1, costs="analytic")
    before = model.state_dict()
    trained = {name: tensor + 1 for name, tensor in before.items()}
    pipe.load_state_dict(trained)

    again = pd2bw_fx.split(pipe, cluster=2)
    again.load_state_dict({name: tensor + 1 for name, tensor in again.state_dict().items()})

    for name, tensor in trained.items():
        assert torch.equal(again.state_dict()[name], tensor + 1)
        assert torch.equal(pipe.state_dict()[name], tensor)


def test_costs_are_those_of_the_first_until_the_device_is_another(pipe: pd2bw_fx.Pipeline) -> None:
    devices = tuple(replace(device, flops_per_s=1e9) for device in pipe.cluster.devices)
    slower = replace(pipe.cluster, devices=devices)

    assert pd2bw_fx.split(pipe, cluster=4, check=False).costs is pipe.costs
    assert pd2bw_fx.split(pipe, cluster=4, costs="analytic", check=False).costs is pipe.costs
    again = pd2bw_fx.split(pipe, cluster=slower, costs="analytic", check=False)
    assert again.costs.forward_s > pipe.costs.forward_s


def test_what_belongs_to_tracing_and_a_pipeline_from_a_folder_are_refused(
    pipe: pd2bw_fx.Pipeline, tmp_path: Path
) -> None:
    pipe.save(tmp_path / "mlp")

    with pytest.raises(pd2bw_fx.InputError, match="was traced already, with its inputs and its loss"):
        pd2bw_fx.split(pipe, (torch.zeros(2, 32), torch.zeros(2, dtype=torch.long)), cluster=2)
    with pytest.raises(pd2bw_fx.InputError, match=r"was loaded from a folder.*split the model itself"):
        pd2bw_fx.split(pd2bw_fx.load(tmp_path / "mlp"), cluster=2)
