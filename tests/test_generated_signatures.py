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


def test_a_slice_of_the_fifth_dimension_is_a_subscript() -> None:
    class Sliced(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(2))

        def forward(self, x: Tensor) -> Tensor:
            return x[..., 1:, :2] * self.scale + x[..., :1, 0, None]

    (source,) = sources(Sliced(), torch.randn(3, 2, 2, 2, 4))

    assert "x[:, :, :, 1:, :2]" in source
    assert "x[:, :, :, :1, 0, None]" in source


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


def mixed(u: Tensor, a: Tensor, k: Tensor, b: Tensor) -> Tensor:
    u = u.reshape(u.shape[0], 2, 4) * a
    v = torch.tanh(u) + torch.sigmoid(u)
    w = torch.cumsum(v, 1) * b
    z = (w - v).square() + k
    return (z * w).flatten(1)


def ruled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    a = torch.softmax(q * k, dim=-1)
    b = torch.cumsum(a * v, 1)
    c = torch.tanh(b) * torch.sigmoid(a)
    return (c - b).exp() + v


class _Calling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.q, self.k, self.v = (nn.Linear(8, 8) for _ in range(4))
        self.scale = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        y = mixed(self.first(x) * 2, -self.scale, self.scale + 1, x[:, :4].unsqueeze(1))
        q, k, v = map(lambda layer: layer(y), (self.q, self.k, self.v))  # noqa: C417
        return ruled(q, k, v).mean()


def test_a_function_keeps_its_parameters_whatever_signs_or_maps_make_what_it_is_given() -> None:
    source = pd2bw_fx.split(_Calling(), torch.randn(3, 8), cluster=1, costs="analytic").stages[0].source

    assert "def mixed(u: Tensor, a: Tensor, k: Tensor, b: Tensor) -> Tensor:" in source
    assert "mixed(self.first(x) * 2, -self.scale, self.scale + 1, x[:, :4].unsqueeze(1))" in source
    assert "def ruled(q: Tensor, k: Tensor, v: Tensor) -> Tensor:" in source


class _Turning(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        cos, sin = rope
        return self.layer(x) * cos + x * sin


class _Tables(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cos", torch.randn(1, 9, 8))
        self.register_buffer("sin", torch.randn(1, 9, 8))
        self.layers = nn.ModuleList(_Turning() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        rope = self.cos[:, : x.shape[1]], self.sin[:, : x.shape[1]]
        for layer in self.layers:
            x = layer(x, rope)
        return x.square().mean()


def test_the_part_of_a_table_that_is_read_is_called_as_the_table() -> None:
    source = pd2bw_fx.split(_Tables(), torch.randn(3, 5, 8), cluster=1, costs="analytic").stages[0].source

    assert "def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:" in source
    assert "        cos = self.cos[:, :5]" in source


class _Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, queries: Tensor, query_pe: Tensor) -> Tensor:
        queries = torch.tanh(self.first(queries))
        queries = self.second(queries + query_pe)
        return queries * query_pe


class _Queries(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 8)
        self.block = _Twice()

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.embed(x)
        out: Tensor = self.block(queries=tokens, query_pe=tokens)
        return out.square().mean()


def test_an_argument_that_is_given_twice_is_called_what_the_forward_does_not_assign() -> None:
    source = pd2bw_fx.split(_Queries(), torch.randn(4, 8), cluster=1, costs="analytic").stages[0].source
    lines = [line.partition("  # ")[0].strip() for line in source.splitlines()]
    at = lines.index("def forward(self, query_pe: Tensor) -> Tensor:")

    assert lines[at + 1 : at + 4] == [
        "queries = torch.tanh(self.first(query_pe))",
        "queries = self.second(queries + query_pe)",
        "return queries * query_pe",
    ]


class _Stepping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def step(self, action: Tensor, embed: Tensor, begins: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(action * begins) * begins)
        return self.second(hidden) * embed

    def forward(self, action: Tensor, embed: Tensor, begins: Tensor) -> Tensor:
        return self.step(action[:, 0], embed[:, 0], begins[:, 0]).square().mean()


def test_a_part_is_not_called_as_another_one_that_an_earlier_stage_does_not_need() -> None:
    halves = pd2bw_fx.Constraints(stage_of={"first": 0, "second": 1})
    inputs = tuple(torch.randn(4, 3, 8) for _ in range(3))
    pipe = pd2bw_fx.split(_Stepping(), inputs, cluster=2, costs="analytic", constraints=halves)

    assert "embed = begins" not in pipe.stages[0].source


class Unpacking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor, given: tuple[Tensor, Tensor]) -> Tensor:
        scale, mask = given
        mask = mask * 2
        return self.layer(x) * scale + mask


class TwoThatUnpack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = Unpacking(), Unpacking()

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x, (x.tanh(), (x > 0).float()))
        return self.last(x, (torch.ones_like(x), x.abs())).mean()


def test_elements_of_a_tuple_have_the_names_that_the_forward_unpacks_them_to() -> None:
    (source,) = sources(TwoThatUnpack(), torch.randn(3, 8))

    assert source.count("class Unpacking") == 1
    assert "def forward(self, x: Tensor, scale: Tensor, mask: Tensor) -> Tensor:" in source
    assert "mask = mask * 2" in source


class Routed(nn.Module):
    """Rows in another order and back; rows: (3 * batch, 8), places: (3 * batch, 2)."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, rows: Tensor, places: Tensor) -> Tensor:
        order = places.reshape(-1).argsort()
        back = torch.empty_like(order)
        back[order] = torch.arange(order.size(0))
        several = self.layer(rows).repeat_interleave(2, 0)[order][back]
        return several.view(rows.size(0), 2, 8).sum(1) + torch.zeros(4 * rows.size(0), 8)[::4]


class Routing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router, self.routed, self.head = nn.Linear(8, 4), Routed(), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.view(-1, 8)
        _, places = self.router(rows).topk(2)
        return self.head(self.routed(rows, places)).square().mean()


def test_multiples_of_the_batch_size_are_read_off_what_a_forward_is_given_or_has_made() -> None:
    (source,) = sources(Routing(), torch.randn(2, 3, 8))

    assert "def forward(self, rows: Tensor, places: Tensor) -> Tensor:" in source
    assert "torch.arange(order.shape[0], device=rows.device)" in source
    assert ".view(rows.shape[0], 2, 8)" in source
    assert "torch.zeros(4 * rows.shape[0], 8, device=rows.device)[::4]" in source
