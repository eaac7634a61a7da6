"""Containers of torch.nn keep their members' names, and are containers in the stages too."""

from __future__ import annotations

import re
from collections import OrderedDict
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import pd2bw_fx
from tests.stages import ruff_faults


class Residual(nn.Module):
    """A Sequential whose members have these names, and a value of its own behind it."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        layers = (nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        self.inner = nn.Sequential(OrderedDict(zip(names, layers, strict=True)))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = x + self.inner(x)
        return result


class Unit(nn.Sequential):
    def __init__(self, width: int, rate: float = 0.0) -> None:
        idle = nn.Dropout(rate) if rate else nn.Identity()
        super().__init__(nn.Linear(width, width), idle, nn.ReLU())


class Named(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(OrderedDict(inner=nn.Linear(8, 8), act=nn.Tanh()))


class Twice(nn.Sequential):
    """A Sequential in name alone."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self:
            x = layer(layer(x))
        return x


class Gated(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self[:3]:
            x = layer(x)
        result: Tensor = self[4](self[3](x) * x)
        return result


class Stacked(nn.Module):
    """Sequentials in one another, of classes of their own and of none."""

    def __init__(self) -> None:
        super().__init__()
        blocks = [nn.Sequential(nn.LayerNorm(8), *(Unit(8) for _ in range(3))) for _ in range(3)]
        self.levels = nn.Sequential(*blocks)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.levels(x)).square().mean()
        return result


def halves(model: nn.Module, second: dict[str, int], folder: Path) -> tuple[str, str]:
    """The sources of two stages, of which the second has these modules; compared with the model already."""
    constraints = pd2bw_fx.Constraints(stage_of=second)
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
    pipe = pd2bw_fx.split(model, x, cluster=2, num_stages=2, costs="analytic", constraints=constraints)
    pipe.save(folder)
    assert ruff_faults(folder) == ""
    assert pd2bw_fx.load(folder).verify(model).exact
    first, last = pipe.stages
    return first.source, last.source


def test_a_sequential_of_named_members_is_one_of_an_ordered_dict(tmp_path: Path) -> None:
    model = nn.Sequential(*(Residual("up", "act", "down") for _ in range(4)))

    first, _ = halves(model, {"1": 0, "2": 1}, tmp_path)

    inner = (
        "self.inner = nn.Sequential(OrderedDict(up=nn.Linear(8, 16), act=nn.GELU(), down=nn.Linear(16, 8)))"
    )
    assert "from collections import OrderedDict\n\nimport torch\n" in first
    assert inner in first


@pytest.mark.parametrize("names", [("1a", "b-c", "in"), ("0", "2", "3"), ("1", "0", "2")])
def test_names_that_are_no_words_are_kept(names: tuple[str, str, str], tmp_path: Path) -> None:
    model = nn.Sequential(Residual(*names), Residual(*names))

    halves(model, {"0": 0, "1": 1}, tmp_path)

    held = {name for program in pd2bw_fx.load(tmp_path).programs for name in program.parameters}
    assert held == {name for name, _ in model.named_parameters()}


FIRST = """\
class SequentialStage0(nn.ModuleList):
    def __init__(self) -> None:
        super().__init__([nn.Linear(8, 8), *(nn.Tanh() for _ in range(2))])

    def forward(self, input_: Tensor) -> Tensor:
        for block in self:
            input_ = block(input_)
        return input_
"""
SECOND = """\
class SequentialStage1(nn.ModuleDict):
    def __init__(self) -> None:
        super().__init__({"3": nn.Linear(8, 5), "4": nn.Sigmoid()})

    def forward(self, hidden: Tensor) -> Tensor:
        for block in self.values():
            hidden = block(hidden)
        return hidden
"""


def test_a_model_that_is_a_sequential_is_a_container_on_each_stage(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Tanh(), nn.Linear(8, 5), nn.Sigmoid())

    first, second = halves(model, {"0": 0, "2": 0, "3": 1}, tmp_path)

    assert FIRST in first
    assert SECOND in second


def test_a_part_of_the_stage_itself_is_looped_over(tmp_path: Path) -> None:
    model = Gated(*(nn.Linear(8, 8) for _ in range(4)), nn.Tanh())

    first, _ = halves(model, {"3": 0, "4": 1}, tmp_path)

    assert "for block in list(self)[:3]:\n            x = block(x)" in first


UNIT = '''\
class Unit(nn.Sequential):
    """levels.0.1 to levels.1.1 (4 of them)."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 8), nn.Identity(), nn.ReLU())
'''
LEVELS = """\
        self.levels = nn.ModuleList(
            [nn.Sequential(nn.LayerNorm(8), Unit(), Unit(), Unit()), nn.ModuleList([nn.LayerNorm(8), Unit()])]
        )
"""


def test_a_class_that_is_a_sequential_has_no_forward_of_its_own(tmp_path: Path) -> None:
    first, _ = halves(Stacked(), {"levels.1.1": 0, "levels.1.2": 1}, tmp_path)

    assert UNIT in first
    assert LEVELS in first


def test_a_loop_goes_over_the_part_of_a_container_in_a_container(tmp_path: Path) -> None:
    first, second = halves(Stacked(), {"levels.1.2": 0, "levels.1.3": 1}, tmp_path)

    assert "*(Unit() for _ in range(2))" in first
    assert "for block in self.levels[1]:\n            x = block(x)" in first
    assert "Unit()" in second


def test_sequentials_with_names_with_dropout_and_with_a_forward(tmp_path: Path) -> None:
    model = nn.Sequential(Named(), Unit(8, 0.5), Twice(nn.Linear(8, 8), nn.Tanh()), Named(), Twice(nn.ReLU()))

    first, second = halves(model, {"2": 0, "3": 1}, tmp_path)

    assert "super().__init__(OrderedDict(inner=nn.Linear(8, 8), act=nn.Tanh()))" in second
    assert "super().__init__(nn.Linear(8, 8), nn.Dropout(), nn.ReLU())" in first
    assert "class Twice(nn.ModuleList):" in first


def test_ties_and_frozen_weights_are_reached_through_containers(tmp_path: Path) -> None:
    model = nn.Sequential(Unit(8), Named(), nn.Linear(8, 8), Unit(8))
    model[2].weight = model[0][0].weight
    model[1].inner.bias.requires_grad_(False)

    first, _ = halves(model, {"2": 0, "3": 1}, tmp_path)

    assert "self[2].weight = self[0][0].weight" in first
    assert "self[1].inner.bias.requires_grad_(False)" in first


class Scaled(nn.Module):
    """Lists and dicts of parameters, one of them in a list of modules."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList(nn.Parameter(torch.full((8,), 0.5 + at)) for at in range(4))
        self.more = nn.ParameterDict({"in": nn.Parameter(torch.ones(8)), "out": nn.Parameter(torch.ones(8))})
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.pairs = nn.ModuleList(nn.ParameterList([nn.Parameter(torch.ones(8))]) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = x * self.more["in"]
        for layer, scale in zip(self.layers, self.scales, strict=True):
            x = torch.tanh(layer(x) * scale)
        for (pair,) in self.pairs:
            x = x + pair
        return (x * self.more["out"]).square().mean()


def test_lists_and_dicts_of_parameters_are_ones_in_the_stages(tmp_path: Path) -> None:
    first, second = halves(Scaled(), {"layers.2": 1, "layers.3": 1}, tmp_path)

    assert "self.scales = nn.ParameterList(nn.Parameter(torch.empty(8)) for _ in range(2))" in first
    assert "for layer, scale in zip(self.layers, self.scales, strict=True):" in first
    assert 'self.more = nn.ParameterDict({"in": nn.Parameter(torch.empty(8))})' in first
    assert "nn.ParameterDict({str(i): nn.Parameter(torch.empty(8)) for i in range(2, 4)})" in second
    assert "for layer, scale in zip(self.layers.values(), self.scales.values(), strict=True):" in second
    assert "x = x + pair[0]" in second
    assert 'self.more["out"]' in second
    assert "getattr" not in first + second


class Gapped(nn.Module):
    """Of whose layers one is left out."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) if number != 4 else nn.Tanh() for number in range(6))

    def forward(self, x: Tensor) -> Tensor:
        for number in (0, 1, 2, 3, 5):
            x = self.layers[number](x)
        return x.square().mean()


def test_members_from_the_first_on_are_counted_as_python_counts(tmp_path: Path) -> None:
    pipe = pd2bw_fx.split(Gapped(), torch.randn(4, 8), cluster=1, costs="analytic")
    pipe.save(tmp_path / "saved")

    assert "for i in range(4)}" in pipe.stages[0].source
    assert ruff_faults(tmp_path / "saved") == ""


class Keyed(nn.Module):
    """Dicts whose keys are in no alphabetical order, and are not all plain text."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleDict({f"layer{i}": nn.Linear(4, 4) for i in range(12)})
        self.paths = nn.ModuleDict({f"path\\{c}\\": nn.Linear(4, 4) for c in "ab"} | {'"c"': nn.Linear(4, 4)})
        self.shifts = nn.ParameterDict()
        for key in ("up", "down"):
            self.shifts[key] = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers.values():
            x = torch.tanh(layer(x))
        for key in self.paths:
            x = self.paths[key](x).sin()
        for shift in self.shifts.values():
            x = (x * shift).cos()
        return x


def test_a_dict_is_gone_through_in_the_order_of_the_model(tmp_path: Path) -> None:
    pipe = pd2bw_fx.split(Keyed(), (torch.randn(3, 4),), cluster=1, costs="analytic")
    pipe.save(tmp_path)

    assert ruff_faults(tmp_path) == ""
    source = pipe.stages[0].source
    assert "for layer in self.layers.values():\n            x = torch.tanh(layer(x))" in source
    keys = [
        '"path\\\\a\\\\": nn.Linear(4, 4)',
        '"path\\\\b\\\\": nn.Linear(4, 4)',
        "'\"c\"': nn.Linear(4, 4)",
    ]
    assert [source.find(key) for key in keys] == sorted(source.find(key) for key in keys)
    assert source.find(keys[0]) > 0
    shifts = re.findall(r'\(x \* self\.shifts\["(\w+)"\]\)\.cos\(\)', source)  # torch sorts a ParameterDict
    assert shifts == ["up", "down"]


class Factors(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.factors = nn.ParameterList(nn.Parameter(torch.full((4,), 0.2 * i)) for i in range(14))

    def forward(self, x: Tensor) -> Tensor:
        for factor in self.factors:
            x = (x * factor).sin()
        return x


def test_the_end_of_a_parameter_list_is_gone_through_by_number() -> None:
    pipe = pd2bw_fx.split(Factors(), (torch.randn(3, 4),), cluster=2, costs="analytic")

    end = pipe.stages[1].source
    assert re.search(r"for i in range\(\d, 14\):\n +x = \(x \* self\.factors\[str\(i\)\]\)\.sin\(\)", end)


def test_a_sequence_with_an_empty_one_in_it_is_called_whole() -> None:
    class Ghost(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.primary = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Sequential())

        def forward(self, x: Tensor) -> Tensor:
            x1: Tensor = self.primary(x)
            return torch.cat([x, x1], dim=-1)[:, 4:12].square().mean()

    pipe = pd2bw_fx.split(Ghost(), torch.randn(4, 8), cluster=1, costs="analytic", check="full")

    assert "x1 = self.primary(x)" in pipe.stages[0].source


class _Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for width in (2, 3, 3))

    def forward(self, x: Tensor) -> Tensor:
        parts = torch.split(x, [2, 3, 3], dim=1)
        outs = []
        for i, layer in enumerate(self.layers):
            outs.append(layer(parts[i]))
        joined = torch.cat(outs, dim=1)
        return (joined * x).square().mean()


def test_a_list_that_members_of_another_fill_is_filled_in_all_rounds() -> None:
    pipe = pd2bw_fx.split(_Branches(), torch.randn(4, 8), cluster=1, costs="analytic", check="full")
    source = pipe.stages[0].source

    assert "outs = [self.layers[i](parts[i]) for i in range(3)]" in source
    assert "joined = torch.cat(outs, dim=1)" in source


class _OneBelowTheOther(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(number))
        self.others = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        x = self.layers[1](x)
        if len(self.layers) > 2:
            x = self.layers[2](x)
        x = torch.tanh(x)
        for other in self.others:
            x = other(x)
        return x.square().mean()


def test_two_lines_of_the_author_are_no_loop_but_a_loop_of_two_rounds_and_three_lines_are() -> None:
    two, three = (
        pd2bw_fx.split(_OneBelowTheOther(number), torch.randn(4, 8), cluster=1, costs="analytic")
        .stages[0]
        .source
        for number in (2, 3)
    )

    assert "x = self.layers[0](x)" in two
    assert "x = self.layers[1](x)" in two
    assert "for layer in self.layers:" in three
    assert "for other in self.others:" in two
