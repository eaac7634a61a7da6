"""What split refuses, before it runs the model where that is possible: one line that says what to give."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pd2bw_fx
from pd2bw_fx.device import Device
from pd2bw_fx.models import build


def perceptron(depth: int = 6) -> nn.Sequential:
    return nn.Sequential(*(layer for _ in range(depth) for layer in (nn.Linear(16, 16), nn.ReLU())))


class TestBadInput:
    def test_more_stages_than_operators(self) -> None:
        with pytest.raises(pd2bw_fx.InputError, match="50"):
            pd2bw_fx.split(perceptron(2), (torch.randn(2, 16),), cluster=50, costs="analytic")

    def test_fewer_microbatches_than_stages(self) -> None:
        with pytest.raises(pd2bw_fx.InputError, match=r"2.*3|3.*2"):
            pd2bw_fx.split(perceptron(), (torch.randn(2, 16),), cluster=3, microbatches_per_update=2)

    def test_a_memory_limit_below_the_smallest_operator(self) -> None:
        cluster = pd2bw_fx.Cluster.uniform(2, memory_bytes=100)

        with pytest.raises(pd2bw_fx.InfeasibleError, match=r"cpu:\d.*100 B"):
            pd2bw_fx.split(perceptron(), (torch.randn(2, 16),), cluster=cluster, costs="analytic")

    def test_what_is_no_model(self) -> None:
        with pytest.raises(pd2bw_fx.InputError, match=r"nn\.Module"):
            pd2bw_fx.split("gpt")  # type: ignore[arg-type]

    def test_inputs_that_the_model_rejects(self) -> None:
        with pytest.raises(pd2bw_fx.InputError, match=r"shapes cannot be multiplied|size"):
            pd2bw_fx.split(perceptron(), (torch.randn(2, 3),), cluster=2)

    def test_example_args_of_the_wrong_kind(self) -> None:
        with pytest.raises(pd2bw_fx.InputError, match="tensor"):
            pd2bw_fx.split(perceptron(), (["not", "a", "tensor"],), cluster=2)

    def test_a_second_input_where_keyword_arguments_stand(self) -> None:
        with pytest.raises(
            pd2bw_fx.InputError, match=r"example_kwargs is a Tensor.*split\(model, \(x, y\)\)"
        ):
            pd2bw_fx.split(perceptron(), torch.randn(2, 16), torch.randn(2, 16))  # type: ignore[arg-type]

    def test_a_model_whose_path_depends_on_data(self) -> None:
        class Branching(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer = nn.Linear(4, 4)

            def forward(self, x: Tensor) -> Tensor:
                x = self.layer(x)
                return x if x.sum() > 0 else -x

        with pytest.raises(pd2bw_fx.TraceError, match=r"test_split_refused\.py"):
            pd2bw_fx.split(Branching(), (torch.randn(2, 4),), cluster=2)

    def test_a_plan_of_another_model(self, tmp_path: Path) -> None:
        pd2bw_fx.split(build("mlp"), cluster=2, costs="analytic").save(tmp_path / "mlp")
        loaded = pd2bw_fx.load(tmp_path / "mlp")

        with pytest.raises(pd2bw_fx.InputError, match="not the model that was split"):
            loaded.verify(build("gpt"))


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"num_stages": "2"}, "num_stages is '2'; a whole number of one or more was expected"),
        ({"microbatches_per_update": 10**9}, "microbatches_per_update is 1000000000; at most 10000 are laid"),
        ({"microbatches_per_update": 4.0}, "microbatches_per_update is 4.0; a whole number of one or more"),
        (
            {"microbatches_per_update": 1},
            "2bw with 1 microbatch an update on 2 stages: two weight versions",
        ),
        ({"method": "3bw"}, "method is '3bw'; expected one of 2bw, 1f1b"),
        (
            {"replicas": "all"},
            "replicas is 'all'; a whole number of one or more, or one for each stage, or \"auto\", was",
        ),
        ({"replicas": 0}, "replicas is 0; a whole number of one or more"),
        ({"replicas": (1, 0)}, r"replicas\[1\] is 0; a whole number of one or more"),
        ({"replicas": 1.5}, "replicas is 1.5; a whole number of one or more"),
        ({"recompute": "some"}, "recompute is 'some'; True or False or 'auto' was expected"),
        ({"method": ["2bw"]}, r"method is \['2bw'\]; expected one of 2bw, 1f1b"),
        (
            {"cluster": [Device(f"cpu:{at}", 2**30) for at in range(9)]},
            r"cluster is a list \(\[Device\(.* \.\.\);",
        ),
        ({"cluster": 10**6}, "a cluster of 1000000 devices was asked for; it may have 4096"),
        ({"constraints": {"whole": ("blocks",)}}, "constraints is {.*}; pd2bw_fx.Constraints was expected"),
        ({"plan": "plan.json"}, r"plan is 'plan.json'; a Plan, of Plan.loads\(text\) for one in a file, was"),
        ({"max_gap": "1%"}, "max_gap is '1%'; a share from 0 to below 1 was expected"),
        ({"time_limit_s": float("nan")}, "time_limit_s is nan; a positive number of seconds was expected"),
        ({"solver": 3}, "solver is 3; a name such as 'highs' or 'cbc' was expected"),
        ({"progress": True}, "progress is True; a function that takes the search's Progress was expected"),
        ({"check": "all"}, "check is 'all'; 'fast' or 'full' or True or False was expected"),
    ],
)
def test_an_option_that_cannot_be_is_refused_before_the_model_runs(
    options: dict[str, Any], error: str
) -> None:
    class Unused(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            raise AssertionError("the model was run")

    with pytest.raises((pd2bw_fx.InputError, pd2bw_fx.ClusterError), match=f"^{error}") as refused:
        pd2bw_fx.split(Unused(2, 2), (torch.zeros(4, 2),), **{"cluster": 2, **options})
    assert "\n" not in str(refused.value)


BY_MISTAKE: dict[str, dict[str, Any]] = {
    "loss_fn is the class CrossEntropyLoss; give one of it": {
        "loss_fn": nn.CrossEntropyLoss,
        "example_targets": torch.tensor([0, 1]),
    },
    "loss_fn is 'mse'; a function": {"loss_fn": "mse", "example_targets": torch.tensor([0, 1])},
    "loss_fn is 3; a function": {"loss_fn": 3},
    "example_targets were given without loss_fn": {"example_targets": torch.tensor([0, 1])},
    r"loss_fn was given without example_targets; .*, or a loss_fn\(output\) that needs none": {
        "loss_fn": F.cross_entropy,
    },
    r"expected what loss_fn\(output, targets\) accepts, or no example_targets": {
        "loss_fn": lambda output: output.sum(),
        "example_targets": torch.tensor([0, 1]),
    },
    r"expected an output that loss_fn\(output\) accepts, or example_targets": {
        "loss_fn": lambda output: output.logits.sum(),
    },
    r"Sequential itself raises on the example inputs \(input int64 \(2, 4\)\)": {
        "example_args": (torch.ones(2, 4, dtype=torch.long),)
    },
    r"loss_fn itself raises on .*; the model has run; expected what loss_fn\(output, targets\) accepts": {
        "loss_fn": lambda output, targets: F.cross_entropy(output["logits"], targets),
        "example_targets": torch.tensor([0, 1]),
    },
}


@pytest.mark.parametrize("costs", ["analytic", "measured"])
@pytest.mark.parametrize("said", BY_MISTAKE)
def test_inputs_and_losses_that_cannot_be_are_named(said: str, costs: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    given = {"example_args": (torch.randn(2, 4),), **BY_MISTAKE[said]}

    with pytest.raises(pd2bw_fx.InputError, match=said):
        pd2bw_fx.split(model, cluster=2, costs=costs, profile_cache=False, **given)


class WithoutItsScale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).sum() * self.scale


class WithoutItsMetadata(WithoutItsScale):
    def forward(self, x: Tensor) -> Tensor:
        raise ValueError("no metadata of the layer")


class AsksForASign(WithoutItsScale):
    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x).sum()
        return -y if y < 0 else y


def test_a_model_without_values_is_told_its_own_mistakes() -> None:
    with torch.device("meta"):
        model, x, narrow = WithoutItsScale(), torch.zeros(4, 8), torch.zeros(4, 7)

    with pytest.raises(pd2bw_fx.InputError, match=r"WithoutItsScale itself raises .* no attribute 'scale'"):
        pd2bw_fx.split(model, (x,), cluster=2)
    with pytest.raises(pd2bw_fx.InputError, match=r"WithoutItsScale itself raises .*\(4, 7\).* \[4, 7\]"):
        pd2bw_fx.split(model, (narrow,), cluster=2)
    with torch.device("meta"):
        model = WithoutItsMetadata()
    with pytest.raises(pd2bw_fx.InputError, match=r"WithoutItsMetadata itself raises .* no metadata"):
        pd2bw_fx.split(model, (x,), cluster=2)


def test_that_a_model_has_no_values_is_not_its_mistake() -> None:
    with torch.device("meta"):
        model, x = AsksForASign(), torch.zeros(4, 8)

    with pytest.raises(pd2bw_fx.TraceError, match="AsksForASign cannot be traced"):
        pd2bw_fx.split(model, (x,), cluster=2)
