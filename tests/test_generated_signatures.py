"""A generated forward takes and returns what the author's does: by the same names, in the same order."""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pd2bw_fx


class Film(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Linear(4, 8)
        self.inner = nn.Linear(8, 8)

    def forward(self, features: Tensor, condition: Tensor) -> tuple[Tensor, Tensor]:
        scale = self.scale(condition)
        return self.inner(features) * scale, scale.square().mean()


class Up(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 8)

    def forward(self, lower: Tensor, skip: Tensor | None = None, *, weight: Tensor) -> Tensor:
        assert skip is not None
        return skip * weight + self.up(lower)


class Rotary(nn.Module):
    def forward(self, x: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        cos = places.cos()
        sin = places.sin()
        return cos.to(x.dtype), sin.to(x.dtype)


class Turned(nn.Module):
    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        cos, sin = rope
        return x * cos + x.flip(-1) * sin


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.film = Film()
        self.up = Up()
        self.rotary = Rotary()
        self.turned = Turned()
        self.head = nn.Linear(8, 1)

    def forward(self, x: Tensor, condition: Tensor, places: Tensor) -> Tensor:
        start = self.first(x)
        hidden, penalty = self.film(condition=condition, features=start)
        rope = self.rotary(x, places)
        hidden = self.turned(self.up(hidden, weight=condition.mean(), skip=start), rope)
        return self.head(hidden).square().mean() + penalty


def sources(model: nn.Module, *inputs: Tensor, num_stages: int = 1) -> list[str]:
    pipe = pd2bw_fx.split(model, inputs, cluster=num_stages, costs="analytic", check="full")
    return [stage.source for stage in pipe.stages]


def test_arguments_have_the_names_and_the_order_of_the_authors_signature() -> None:
    (source,) = sources(Model(), torch.randn(3, 8), torch.randn(3, 4), torch.rand(3, 8))

    assert "def forward(self, features: Tensor, condition: Tensor) -> tuple[Tensor, Tensor]:" in source
    assert "def forward(self, lower: Tensor, skip: Tensor, weight: Tensor) -> Tensor:" in source
    assert "def forward(self, places: Tensor) -> tuple[Tensor, Tensor]:" in source
    assert "def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:" in source


def test_results_have_the_names_that_the_caller_gives_them_or_else_the_maker() -> None:
    (source,) = sources(Model(), torch.randn(3, 8), torch.randn(3, 4), torch.rand(3, 8))

    assert "hidden, penalty = self.film(start, condition)" in source
    assert "cos, sin = self.rotary(places)" in source


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, hidden_states: Tensor, mask: Tensor) -> Tensor:
        return hidden_states + self.linear(hidden_states) * mask


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(4))

    def forward(self, embedded: Tensor, padding: Tensor) -> Tensor:
        for layer in self.layers:
            embedded = layer(mask=padding, hidden_states=embedded)
        loss_function = nn.MSELoss()
        loss = loss_function(embedded.flatten(), padding.flatten())
        return loss * self.weighed(embedded.mean(), scale=2.0)

    def weighed(self, value: Tensor, scale: float) -> Tensor:
        return value.square() * scale


def test_calls_with_other_names_are_of_one_class_and_roll_up() -> None:
    first, second = sources(Layers(), torch.randn(3, 8), torch.rand(3, 8), num_stages=2)

    for source in (first, second):
        assert len(re.findall(r"^class Layer\d*\(", source, re.MULTILINE)) == 1
        assert "def forward(self, hidden_states: Tensor, mask: Tensor) -> Tensor:" in source
    assert re.search(r"for layer in self\.layers.*:\n +embedded = layer\(embedded, padding\)", first)


def test_a_loss_is_called_so_and_not_what_it_is_made_of() -> None:
    _, second = sources(Layers(), torch.randn(3, 8), torch.rand(3, 8), num_stages=2)

    assert re.search(
        r"loss = F\.mse_loss\(embedded\.flatten\(\), padding\.flatten\(\)\)  # test_generated_sig", second
    )


class Sometimes(nn.Module):
    """As in Tacotron: one of its dropouts is there in evaluation too."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(self.linear(x), 0.5, training=True)
        return F.dropout(x, 0.5, training=self.training)


def test_dropout_that_is_always_there_is_so_in_stages_for_evaluation() -> None:
    model = Sometimes().eval()
    pipe = pd2bw_fx.split(model, torch.randn(8, 64), cluster=1, costs="analytic")

    assert pipe.stages[0].source.count("training=True") == 1
    kept = (pipe.run(torch.randn(8, 64))["output"] != 0).float().mean()
    assert 0.3 < kept < 0.7


def test_slices_in_a_row_are_one_subscript() -> None:
    class Sliced(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x[:, ::2, 1:3].square() * self.scale

        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(2))

    (source,) = sources(Sliced(), torch.randn(3, 4, 5))

    assert "x[:, ::2, 1:3]" in source


class _Many(nn.Module):
    """Gives a stage many results."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.linears = nn.ModuleList(nn.Linear(4, 4) for _ in range(number))

    def forward(self, x: Tensor) -> list[Tensor]:
        return [linear(x) for linear in self.linears]


@pytest.mark.parametrize(("number", "annotation"), [(2, "tuple[Tensor, Tensor]"), (7, "tuple[Tensor, ...]")])
def test_results_are_annotated_one_by_one_while_they_are_few(number: int, annotation: str) -> None:
    pipe = pd2bw_fx.split(_Many(number), torch.randn(2, 4), cluster=1, costs="analytic")

    assert f"def forward(self, x: Tensor) -> {annotation}:" in pipe.stages[0].source
