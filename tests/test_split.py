"""split on models that people have: what comes out computes what went in."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pd2bw_fx
from pd2bw_fx.models import MODELS, build
from tests.stages import split_of_our_own


class Perceptron(nn.Module):
    def __init__(self, depth: int = 6, width: int = 16) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


class KeywordsAndNests(nn.Module):
    """Takes a nested tuple and a dict, returns a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.left = nn.Linear(4, 8)
        self.right = nn.Linear(6, 8)
        self.head = nn.Linear(8, 3)

    def forward(self, pair: tuple[Tensor, Tensor], *, extra: dict[str, Tensor]) -> dict[str, Tensor]:
        hidden = torch.tanh(self.left(pair[0]) + self.right(pair[1]))
        logits = self.head(hidden * extra["scale"])
        return {"loss": F.cross_entropy(logits, extra["labels"]), "logits": logits}


@pytest.mark.parametrize("name", sorted(MODELS))
def test_the_stages_of_every_model_compute_what_the_model_computes(name: str) -> None:
    torch.manual_seed(0)

    pipe = pd2bw_fx.split(build(name).double(), cluster=2, costs="analytic", check=False)

    assert len(pipe.stages) == 2
    assert pipe.verify().worst.relative <= 1e-12


def test_a_loss_function_takes_what_the_model_returns_and_the_targets() -> None:
    model = Perceptron().double()
    x, y = torch.randn(4, 16, dtype=torch.float64), torch.randn(4, 16, dtype=torch.float64)

    pipe = pd2bw_fx.split(model, (x,), loss_fn=F.mse_loss, example_targets=y, cluster=3, costs="analytic")

    assert pipe.graph.loss == "loss"
    assert pipe.verify().exact
    assert pipe.state_dict().keys() == model.state_dict().keys()


def test_nested_and_keyword_arguments_go_to_the_stages_that_read_them() -> None:
    extra = {"scale": torch.rand(5, 8), "labels": torch.tensor([0, 1, 2, 0, 1])}
    kwargs = {"extra": extra}

    pipe = pd2bw_fx.split(
        KeywordsAndNests(), ((torch.randn(5, 4), torch.randn(5, 6)),), kwargs, cluster=2, costs="analytic"
    )

    assert {output.name for output in pipe.graph.outputs} == {"loss", "logits"}
    assert pipe.verify().exact


def test_a_model_alone_is_split_on_estimates_and_says_so() -> None:
    pipe = pd2bw_fx.split(Perceptron(), cluster=2)

    assert pipe.costs.origin == "parameters"
    assert "example_args" in str(pipe)
    assert len(pipe.stages) == 2


def test_the_merged_state_dict_loads_into_the_original_model(tmp_path: Path) -> None:
    model = build("gpt")
    pipe = pd2bw_fx.split(model, cluster=2, costs="analytic")

    pipe.save(tmp_path / "gpt")
    loaded = pd2bw_fx.load(tmp_path / "gpt")
    fresh = build("gpt")
    fresh.load_state_dict(loaded.state_dict())

    for name, tensor in model.state_dict().items():
        assert torch.equal(fresh.state_dict()[name], tensor), name
    assert loaded.plan == pipe.plan
    assert [p.source for p in loaded.programs] == [p.source for p in pipe.programs]
    assert str(loaded) == str(pipe)


def test_a_loaded_pipeline_is_verified_against_the_model_it_is_given(tmp_path: Path) -> None:
    model = build("mlp")
    pd2bw_fx.split(model, cluster=2, costs="analytic").save(tmp_path / "mlp")
    loaded = pd2bw_fx.load(tmp_path / "mlp")

    with pytest.raises(pd2bw_fx.InputError, match="pass the original model"):
        loaded.verify()

    assert loaded.verify(build("mlp")).exact


def test_the_same_input_gives_the_same_plan_and_the_same_bytes() -> None:
    torch.manual_seed(0)
    model = build("gpt")

    first = pd2bw_fx.split(model, cluster=2, costs="analytic")
    second = pd2bw_fx.split(model, cluster=2, costs="analytic")

    assert first.plan.stage_of == second.plan.stage_of
    assert [p.source for p in first.programs] == [p.source for p in second.programs]


def test_the_printed_plan_names_devices_cuts_memory_and_proof() -> None:
    text = str(pd2bw_fx.split(build("gpt"), cluster=2, costs="analytic"))

    for word in ("stage", "device", "parameters", "forward", "-> stage 1", "bottleneck", "proven", "/ "):
        assert word in text


def test_what_the_user_pins_stays_where_it_is_pinned() -> None:
    constraints = pd2bw_fx.Constraints(stage_of={"layers.4": 0}, whole=("layers.*",))

    pipe = pd2bw_fx.split(
        Perceptron(), (torch.randn(2, 16),), cluster=2, costs="analytic", constraints=constraints
    )

    placed = {pipe.graph.operators[name].module_path: stage for name, stage in pipe.plan.stage_of.items()}
    assert placed["layers.4"] == 0
    assert "layers.4.weight" in pipe.programs[0].parameters
    assert "cut 0 | 1" in str(pipe.explain())
    with pytest.raises(pd2bw_fx.Pd2bwError, match="nowhere"):
        pd2bw_fx.split(
            Perceptron(),
            (torch.randn(2, 16),),
            cluster=2,
            constraints=pd2bw_fx.Constraints(stage_of={"nowhere": 0}),
        )


def test_a_plan_edited_by_hand_is_what_the_stages_are_made_from() -> None:
    model = build("gpt")
    plan = pd2bw_fx.split(model, cluster=2, costs="analytic", check=False).plan
    data = plan.to_json()
    moved = data["stages"][1]["operators"][0]
    data["stages"][0]["operators"] = [*data["stages"][0]["operators"], moved]
    data["stages"][1]["operators"] = [*data["stages"][1]["operators"][1:]]
    edited = pd2bw_fx.Plan.loads(json.dumps(data))

    pipe = pd2bw_fx.split(model, cluster=2, costs="analytic", plan=edited)

    assert pipe.plan.stage_of[moved] == 0
    assert pipe.plan.bottleneck_s > plan.bottleneck_s
    assert pipe.verify().exact
    told = (
        "made for graph .* of other operators: the plan has the operator '.*', which is not here; plan again"
    )
    with pytest.raises(pd2bw_fx.PlanMismatchError, match=told):
        pd2bw_fx.split(build("mlp"), cluster=2, costs="analytic", plan=edited)


def test_a_full_check_compares_another_batch_of_another_size() -> None:
    class Biased(nn.Module):
        """Right for the example's batch size alone."""

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) * (2.0 if x.shape[0] == 3 else 3.0)

    pipe = pd2bw_fx.split(build("gpt").double(), cluster=2, costs="analytic", check="full")
    assert pipe.verify().exact

    with pytest.raises(pd2bw_fx.Pd2bwError):
        pd2bw_fx.split(Biased(), (torch.randn(3, 4),), cluster=1, tracer="fx", costs="analytic", check="full")


def test_a_full_check_runs_on_other_values_another_batch_and_another_length(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ran: list[dict[str, Tensor]] = []

    def noted(self: pd2bw_fx.Pipeline, *, example: dict[str, Tensor] | None = None) -> None:
        ran.append(example or dict(self.example or {}))

    monkeypatch.setattr(pd2bw_fx.Pipeline, "verify", noted)
    model = build("bert")

    pd2bw_fx.split(model, cluster=1, costs="analytic", tracer="export-sequence", check="full")

    fast, full = ran
    for name, tensor in full.items():
        batch, *rest = fast[name].shape
        assert tensor.shape == (batch + 1, *(size - 1 for size in rest)), name
        assert set(tensor.flatten().tolist()) <= set(fast[name].flatten().tolist())
        is_mask = fast[name].unique().numel() <= 2
        assert is_mask or not torch.equal(tensor[:batch], fast[name][:, : tensor.shape[1]])


def test_a_model_of_one_batch_size_says_so_to_other_batches() -> None:
    class Fixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x).view(3, 2, 2).square().mean()

    pipe = pd2bw_fx.split(Fixed(), (torch.randn(3, 4),), cluster=1, costs="analytic")

    with pytest.raises(pd2bw_fx.InputError, match="traced for 3 only"):
        pipe.train_local([torch.randn(8, 4)], optimizer=torch.optim.SGD, microbatches_per_update=2)


def test_other_schedules_are_simulated_on_the_same_plan() -> None:
    pipe = split_of_our_own("gpt", cluster=4)

    own = pipe.simulate(num_updates=8)
    flushed = pipe.simulate(method="1f1b", num_updates=8)

    assert own.span_s < flushed.span_s
    assert {event.version for event in flushed.events} == set(range(9))
    with pytest.raises(pd2bw_fx.InputError, match="microbatches"):
        pipe.simulate(microbatches_per_update=2)


class Writing(nn.Module):
    """Changes the tensor that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x.add_(1)
        return self.second(torch.relu(self.first(x))).mean()


@pytest.mark.parametrize("costs", ["analytic", "measured"])
def test_the_example_inputs_stay_as_they_are(costs: Any) -> None:
    x = torch.zeros(2, 4)

    pipe = pd2bw_fx.split(Writing(), (x,), cluster=2, costs=costs, profile_cache=False)

    assert pipe.verify().exact
    assert x.count_nonzero() == 0
    assert pipe.example["x"].count_nonzero() == 0


def test_the_fastest_number_of_stages_leaves_out_what_only_slows_it_down() -> None:
    torch.manual_seed(0)
    near, far = 1e12, 1e3
    devices = tuple(
        pd2bw_fx.Device(name, memory_bytes=2**30, speed=1.0 if at < 2 else 0.01)
        for at, name in enumerate(("fast:0", "fast:1", "slow:0", "slow:1"))
    )
    between = tuple(tuple(near if a < 2 and b < 2 else far for b in range(4)) for a in range(4))
    cluster = pd2bw_fx.Cluster(devices, between, tuple((0.0,) * 4 for _ in range(4)))
    given = {"example_args": (torch.randn(4, 16),), "cluster": cluster, "costs": "analytic", "check": False}

    all_devices = pd2bw_fx.split(Perceptron(), **given)
    found = pd2bw_fx.split(Perceptron(), num_stages="auto", **given)

    by_number = [pd2bw_fx.split(Perceptron(), num_stages=count, **given).plan for count in range(1, 5)]
    assert found.plan.bottleneck_s == min(plan.bottleneck_s for plan in by_number)
    assert found.plan.bound_s <= min(plan.bound_s for plan in by_number)
    assert "no plan of any number of stages is faster than" in found.plan.proof
    assert found.check_plan(pd2bw_fx.Plan.loads(found.plan.dumps())).proof == found.plan.proof
    assert (all_devices.plan.num_stages, found.plan.num_stages) == (4, 2)
    assert [stage.device_name for stage in found.plan.stages] == ["fast:0", "fast:1"]
    assert found.schedule.shape is not None
    assert found.schedule.shape.num_stages == 2
    with pytest.raises(pd2bw_fx.InfeasibleError):
        tiny = pd2bw_fx.Constraints(memory_bytes=dict.fromkeys(range(4), 8))
        pd2bw_fx.split(Perceptron(), num_stages="auto", constraints=tiny, **given)


@pytest.mark.parametrize(("method", "microbatches", "bytes_per_s"), [("1f1b", 1, 1e8), ("gpipe", 2, 1.2e8)])
def test_the_fastest_number_of_stages_counts_the_time_in_which_the_pipeline_fills(
    method: str, microbatches: int, bytes_per_s: float
) -> None:
    layers = [layer for _ in range(8) for layer in (nn.Linear(512, 512), nn.ReLU())]
    given: dict[str, Any] = {
        "example_args": (torch.randn(64, 512),),
        "cluster": pd2bw_fx.Cluster.uniform(4, memory_bytes=2**32, bytes_per_s=bytes_per_s, latency_s=1e-5),
        "costs": "analytic",
        "check": False,
        "method": method,
        "microbatches_per_update": microbatches,
    }
    model = nn.Sequential(*layers)

    found = pd2bw_fx.split(model, num_stages="auto", **given)

    by_number = [pd2bw_fx.split(model, num_stages=count, **given) for count in range(1, 5)]
    fastest = max(by_number, key=lambda pipe: pipe.simulate(num_updates=3).throughput)
    assert found.plan.num_stages == fastest.plan.num_stages
    slowest_stages_s = [pipe.plan.bottleneck_s for pipe in by_number]
    assert found.plan.bottleneck_s > min(slowest_stages_s)
    assert "proven" in found.plan.proof
