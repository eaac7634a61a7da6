"""`pipe.run`: all stages in this process, on a batch as a step of training takes it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pd2bw_fx
from pd2bw_fx.errors import InputError
from pd2bw_fx.models.gpt import GPT, GPTConfig


class Paired(nn.Module):
    """Nested inputs, several results, and a value that skips a stage."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor, *, pair: tuple[Tensor, dict[str, Tensor]]) -> dict[str, Any]:
        first = self.first(x + pair[0])
        second = self.second(first * pair[1]["scale"])
        return {"last": self.third(second) + first, "best": second.argmax(-1)}


def arguments(batch_size: int) -> dict[str, Any]:
    x, y, scale = torch.randn(3, batch_size, 8)
    return {"x": x, "pair": (y, {"scale": scale})}


def test_the_stages_return_what_the_model_returns_and_pass_gradients() -> None:
    torch.manual_seed(0)
    model = Paired()
    pipe = pd2bw_fx.split(model, example_kwargs=arguments(4), cluster=3, costs="analytic")
    batch = arguments(6)

    expected, found = model(**batch), pipe.run(batch)

    assert list(found) == ["last", "best"]
    torch.testing.assert_close(found, expected)
    expected["last"].square().sum().backward()
    found["last"].square().sum().backward()
    gradients = {name: p.grad for stage in pipe.stages for name, p in stage.module.named_parameters()}
    torch.testing.assert_close(gradients, {name: p.grad for name, p in model.named_parameters()})


def test_a_saved_pipeline_runs_without_the_model(tmp_path: Any) -> None:
    model = GPT.from_config(GPTConfig(num_layers=2, width=32, dropout=0.0))
    pipe = pd2bw_fx.split(model, model.example_inputs(2), cluster=2, costs="analytic")
    pipe.save(tmp_path / "gpt")

    batch = model.example_inputs(5)
    torch.testing.assert_close(pd2bw_fx.load(tmp_path / "gpt").run(batch)["loss"], model(*batch))


def test_batches_that_are_not_the_models_are_refused() -> None:
    pipe = pd2bw_fx.split(Paired(), example_kwargs=arguments(4), cluster=2, costs="analytic")

    with pytest.raises(InputError, match="the batch has no 'pair'"):
        pipe.run(torch.randn(4, 8))

    whole = nn.Sequential(nn.Flatten(0), nn.Linear(32, 8))
    fixed = pd2bw_fx.split(whole, torch.randn(4, 8), cluster=1, costs="analytic")
    with pytest.raises(InputError, match="'input' has 6 samples; the model was traced for 4 only: pass 4"):
        fixed.run(torch.randn(6, 8))

    traced = pd2bw_fx.split(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), cluster=2, costs="analytic")
    with pytest.raises(InputError, match="with example_args"):
        traced.run(torch.randn(4, 8))


class Repeating(nn.Module):
    """Returns its last hidden state as Hugging Face's models do with output_hidden_states: twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Any]:
        first = self.first(x).tanh()
        second = self.second(first)
        copy = torch.empty_like(first)
        copy.copy_(first)
        last = self.last(second)
        loss = nn.functional.mse_loss(last, y)
        states = (x, first, second, last)
        return {"loss": loss, "states": states, "copy": copy, "last": last, "total": loss, "input": x}


def test_what_a_model_returns_under_several_names_has_all_of_them(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, batch = Repeating(), (torch.randn(4, 8), torch.randn(4, 8))
    pipe = pd2bw_fx.split(model, batch, cluster=3, costs="analytic", check="full")

    found, wanted = pipe.run(batch), model(*batch)

    wanted |= {f"states_{place}": state for place, state in enumerate(wanted.pop("states"))}
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, msg=name)
    assert any(re.search(r"return (\w+, )*(\w+), \2\b", stage.source) for stage in pipe.stages)
    pipe.export_onnx(tmp_path)  # its own check runs them all
