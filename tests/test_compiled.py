"""Stages that torch.compile compiles: alone, and in training."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.backends.debugging import aot_eager

import pd2bw_fx
from pd2bw_fx.models import build
from pd2bw_fx.models.gpt import GPT, GPTConfig
from pd2bw_fx.stage import outputs_of
from tests.slow import slow

# RNNs of torch are not in a compiled graph: torch.compile runs them as they are.
COMPILED_WHOLE = ("gpt", "resnet", "moe", *slow(["mlp", "bert", "vgg"]))


@pytest.mark.parametrize("name", COMPILED_WHOLE)
def test_a_stage_compiles_as_one_graph_and_computes_the_same(name: str) -> None:
    model: Any = build(name)
    example = model.example_inputs(2)
    pipe = pd2bw_fx.split(model, example, cluster=2, costs="analytic")
    values = dict(zip(pipe.graph.inputs, example, strict=True))

    for stage in pipe.stages:
        torch._dynamo.reset()
        stage.module.eval()
        arguments = [values[port.value] for port in stage.program.inputs]
        expected = outputs_of(stage.program, stage.module(*arguments))
        compiled: Any = torch.compile(stage.module, backend="eager", fullgraph=True)
        found = outputs_of(stage.program, compiled(*arguments))

        assert found.keys() == expected.keys()
        assert all(torch.equal(found[value], expected[value]) for value in expected)
        values |= {value: tensor.detach() for value, tensor in expected.items()}


class Counting:
    """A backend that differentiates graphs ahead of time, and notes in a file how many nodes each had."""

    def __init__(self, notes: Path) -> None:
        self.notes = notes

    def __call__(self, graph: torch.fx.GraphModule, inputs: Sequence[Tensor]) -> Callable[..., Any]:
        with self.notes.open("a") as file:
            file.write(f"{len(graph.graph.nodes)}\n")
        compiled: Callable[..., Any] = aot_eager(graph, inputs)
        return compiled


def trained(
    *, num_stages: int, dropout: float = 0.0, **options: Any
) -> tuple[list[float], dict[str, Tensor]]:
    """Returns the losses of four updates and the weights after them."""
    torch.manual_seed(0)
    config = GPTConfig(61, sequence_length=8, num_layers=num_stages, num_heads=2, width=16, dropout=dropout)
    texts = torch.randint(0, 61, (4, 6, 8))
    pipe = pd2bw_fx.split(
        GPT(config).double(),
        (texts[0, :3], texts[0, :3]),
        cluster=num_stages,
        costs="analytic",
        microbatches_per_update=2,
        recompute=options.pop("recompute", False),
    )
    result = pipe.train_local(
        [(text, text) for text in texts],
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
        **options,
    )
    return list(result.losses), pipe.state_dict()


def test_compiled_stages_train_as_they_do_as_written(tmp_path: Path) -> None:
    losses, weights = trained(num_stages=2)
    notes = tmp_path / "graphs"

    compiled_losses, compiled_weights = trained(num_stages=2, compile={"backend": Counting(notes)})

    assert compiled_losses == losses
    assert all(torch.equal(compiled_weights[name], weights[name]) for name in weights)
    graphs = notes.read_text().split()
    assert len(graphs) == 2, "one graph a stage, for both versions of the weights"
    assert all(int(nodes) > 20 for nodes in graphs)


def test_a_compiled_forward_that_is_run_again_draws_the_same() -> None:
    options: Any = {"num_stages": 1, "dropout": 0.3, "compile": {"backend": "aot_eager"}}
    losses, weights = trained(**options)

    again_losses, again_weights = trained(**options, recompute=True)

    assert again_losses == losses
    assert all(torch.equal(again_weights[name], weights[name]) for name in weights)


def test_a_backward_in_halves_is_not_compiled() -> None:
    with pytest.raises(pd2bw_fx.WorkerError, match="zb-h1 computes each backward in two halves, and a comp"):
        trained(num_stages=2, compile=True, method="zb-h1")
