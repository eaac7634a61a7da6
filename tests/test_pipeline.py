"""What a pipeline is given after the split: other weights, and arguments to be compared on."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import networkx
import pytest
import torch

import pd2bw_fx
from pd2bw_fx.errors import InputError
from pd2bw_fx.models.gpt import GPT, GPTConfig

SHARED = ("tokens.weight", "head.weight")


@pytest.fixture(scope="module")
def traced() -> pd2bw_fx.Pipeline:
    torch.manual_seed(0)
    model = GPT.from_config(GPTConfig(num_layers=2, width=16, num_heads=2, sequence_length=8))
    return pd2bw_fx.split(model, model.example_inputs(), cluster=1, costs="analytic", check=False)


@pytest.fixture
def pipe(traced: pd2bw_fx.Pipeline) -> pd2bw_fx.Pipeline:
    return pd2bw_fx.split(traced, cluster=2, check=False)


def test_weights_take_the_models_type_and_go_to_all_their_names(pipe: pd2bw_fx.Pipeline) -> None:
    matrix = torch.randn(256, 16, dtype=torch.float64)

    pipe.load_state_dict({"head.weight": matrix})

    assert all(torch.equal(pipe.state_dict()[name], matrix.float()) for name in SHARED)
    pipe.load_state_dict(pipe.state_dict())


@pytest.mark.parametrize(
    ("tensors", "error"),
    [
        ({"head.weight": 3.0}, "tensors['head.weight'] is 3.0; a tensor was expected"),
        ({"head.weigh": torch.zeros(3)}, "GPT has no tensor named 'head.weigh'; did you mean 'head.weight'?"),
        (
            {"module.norm.bias": torch.zeros(16)},
            "no tensor named 'module.norm.bias'; expected 'norm.bias', without the prefix 'module.'",
        ),
        ({"head.weight": torch.zeros(3)}, "'head.weight' has shape (3,), and GPT's has (256, 16)"),
        (
            {name: torch.full((256, 16), float(place)) for place, name in enumerate(SHARED)},
            "'head.weight' is given other values than it has by another name",
        ),
    ],
)
def test_weights_that_cannot_be_are_refused_and_none_replaced(
    pipe: pd2bw_fx.Pipeline, tensors: dict[str, Any], error: str
) -> None:
    before = pipe.state_dict()

    with pytest.raises(InputError, match=re.escape(error)):
        pipe.load_state_dict({"norm.weight": torch.zeros(16), **tensors})

    after = pipe.state_dict()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())


def test_what_is_no_dict_plan_or_metrics_is_refused_in_one_line(
    pipe: pd2bw_fx.Pipeline, tmp_path: Path
) -> None:
    wrong: Any = 3

    with pytest.raises(InputError, match="tensors is 3; a dict of tensors by name"):
        pipe.load_state_dict(wrong)
    with pytest.raises(InputError, match="plan is 3; a Plan"):
        pipe.check_plan(wrong)
    with pytest.raises(InputError, match="metrics is 3; a Metrics"):
        pipe.report(tmp_path / "report.html", metrics=wrong)
    assert not list(tmp_path.iterdir())


def test_arguments_of_a_model_that_is_not_given_are_not_passed_over(pipe: pd2bw_fx.Pipeline) -> None:
    with pytest.raises(InputError, match="are for the model that the stages are compared with: pass it too"):
        pipe.verify(example_args=(torch.zeros(2, 8),))


def test_the_operator_graph_is_one_of_networkx(pipe: pd2bw_fx.Pipeline) -> None:
    graph = pipe.graph.digraph()

    assert networkx.is_directed_acyclic_graph(graph)
    assert list(graph) == list(pipe.graph.operators)
    name, operator = next((n, o) for n, o in pipe.graph.operators.items() if len(o.reads) > 1)
    assert set(graph.predecessors(name)) == set(operator.reads) & pipe.graph.operators.keys()
    assert graph.nodes[name]["operator"] is operator
