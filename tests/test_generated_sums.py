"""The author's `sum` over the members of a container stands in the generated code as a sum."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pd2bw_fx
from pd2bw_fx.passes.codegen.loops.rolled_up import from_zero
from pd2bw_fx.passes.codegen.loops.sums import sum_of_names
from tests.loop_lines import source_of


class Sums(nn.Module):
    def __init__(self, num_layers: int, added: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(num_layers))
        self.out = nn.Linear(8, 8)
        self.added = added

    def forward(self, x: Tensor) -> Tensor:
        return self.added(self, x)


def read_by_a_layer(own: Any, x: Tensor) -> Tensor:
    return own.out(sum(layer(x) for layer in own.layers))


def weighted(own: Any, x: Tensor) -> Tensor:
    return sum(torch.tanh(layer(x)) * 0.5 for layer in own.layers) * 2


def taken_off(own: Any, x: Tensor) -> Tensor:
    return x - sum(layer(x) + x for layer in own.layers)


def added_to(own: Any, x: Tensor) -> Tensor:
    h = sum(layer(x) for layer in own.layers) + x
    return h * h


def listed(own: Any, x: Tensor) -> Tensor:
    return sum([layer(x) for layer in own.layers]) / len(own.layers)


CASES = {
    read_by_a_layer: "return self.out(sum(layer(x) for layer in self.layers))",
    weighted: "return sum(torch.tanh(layer(x)) * 0.5 for layer in self.layers) * 2",
    taken_off: "return x - sum(layer(x) + x for layer in self.layers)",
    added_to: "h = sum(layer(x) for layer in self.layers) + x",
    listed: "return sum(linear_list) / ",
}


@pytest.mark.parametrize("num_layers", [2, 5])
@pytest.mark.parametrize("added", CASES)
def test_a_sum_over_members_is_one_line(added: Callable[[Any, Tensor], Tensor], num_layers: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 8)
    pipe = pd2bw_fx.split(Sums(num_layers, added), x, cluster=1, costs="analytic")

    assert CASES[added] in pipe.stages[0].source


def test_a_sum_that_would_not_fit_in_a_line_stays_as_its_additions() -> None:
    def added(own: Any, x: Tensor) -> Tensor:
        return own.out(
            sum(torch.tanh(layer(x)) * torch.sigmoid(x) * torch.relu(x).exp() for layer in own.layers)
        )

    pipe = pd2bw_fx.split(Sums(3, added), torch.randn(4, 8), cluster=1, costs="analytic")

    assert "sum(" not in pipe.stages[0].source.partition("def main")[0]


def test_a_cut_sum_begins_with_the_part_that_its_first_stage_has() -> None:
    model = Sums(6, read_by_a_layer)
    first, second = pd2bw_fx.split(model, torch.randn(4, 8), cluster=2, costs="analytic").stages

    assert "return sum(layer(x) for layer in self.layers)" in first.source
    assert "total + " in second.source


def test_a_sum_that_counts_its_members_begins_with_zero() -> None:
    def added(own: Any, x: Tensor) -> Tensor:
        kept = sum(x[:, i : i + 1] * layer(x) for i, layer in enumerate(own.layers))
        size = sum(layer.bias.square().sum() for number, layer in enumerate(own.layers) if number != 1)
        return own.out(kept) * size

    pipe = pd2bw_fx.split(Sums(4, added), torch.randn(4, 8), cluster=1, costs="analytic")

    lines = [line.partition("  # ")[0].strip() for line in pipe.stages[0].source.splitlines()]
    at = lines.index("kept = 0")
    assert lines[at + 1 : at + 6] == [
        "for i, layer in enumerate(self.layers):",
        "kept = kept + x[:, i : i + 1] * layer(x)",
        "size = 0",
        "for value in (0, 2, 3):",
        "size = size + self.layers[value].bias.square().sum()",
    ]
    assert pipe.verify().exact


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("loss = a + 0 + b + c", "loss = sum([a, b, c])"),
        ("return (a + 0 + b) / 2", "return sum([a, b]) / 2"),
        ("x = self.out(a + 0 + b + f(c))", "x = self.out(sum([a, b]) + f(c))"),
        ("x = a + 0 + b * c", "x = a + 0 + b * c"),
        ("x = a + 0 + f(b)", "x = a + 0 + f(b)"),
        ("x = 2 * a + 0 + b", "x = 2 * a + 0 + b"),
        ("x = y.a + 0 + b.c", "x = y.a + 0 + b.c"),
        ("x = a + 0", "x = a + 0"),
    ],
)
def test_names_are_summed_in_a_list(text: str, wanted: str) -> None:
    assert sum_of_names(text) == wanted


@pytest.mark.parametrize(
    "text", ["x = a == b + 0", "x = a + b + 0", "x = a - b + 0", "x = -a + 0", "x = a @ b"]
)
def test_what_is_no_term_is_not_taken_out_of_a_sum(text: str) -> None:
    assert from_zero(text) == ("", "", "")


class Attending(nn.Module):
    """Each round adds to a sum what has an addition in it; the first one adds to a number."""

    def __init__(self) -> None:
        super().__init__()
        self.gates = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        entropy = 0
        for gate in self.gates:
            m = torch.softmax(gate(x), dim=-1)
            entropy = entropy + torch.mean(torch.sum(-m * torch.log(m + 1e-15), dim=1))
            x = m * x
        return x.square().mean() + entropy


def test_the_sum_has_its_name_and_not_what_is_added_within() -> None:
    source = source_of(Attending(), torch.randn(4, 6))

    assert re.search(
        r"        entropy = 0\n        for gate in self\.gates:\n            m = .*\n"
        r"            entropy = entropy \+ torch\.mean\(torch\.sum\(-m \* torch\.log\(m \+ 1e-15\), .*\n",
        source,
    )
