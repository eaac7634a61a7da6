"""One class for what differs in sizes alone: what is different is an argument of its constructor."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from benchmarks.coverage_models import CASES, built
from pd2bw_fx import split
from pd2bw_fx.passes.codegen import generate
from pd2bw_fx.stage import StageProgram
from tests.stages import Case, by_hand, case_of, compared, planned, ruff_faults


class Projection(nn.Module):
    """Holds its sizes as Hugging Face's Conv1D does, and reads one of them in its forward."""

    def __init__(self, nx: int, nf: int, rate: float) -> None:
        super().__init__()
        self.nf = nf
        self.weight = nn.Parameter(torch.randn(nx, nf))
        self.drop = nn.Dropout(rate)

    def forward(self, x: Tensor) -> Tensor:
        y = x.view(-1, x.shape[-1]) @ self.weight
        return torch.tanh(self.drop(y.view(x.shape[0], -1, self.nf)))


class Hourglass(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = Projection(8, 6, 0.5)
        self.up = Projection(6, 8, 0.25)
        self.again = Projection(8, 6, 0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.again(self.up(self.down(x))).square().mean()


PROJECTION = '''\
class Projection(nn.Module):
    """down, up, again, from test_generated_classes.py."""

    def __init__(self, size: int, nf: int, p: float) -> None:
        super().__init__()
        self.size = size
        self.nf = nf
        self.weight = nn.Parameter(torch.empty(size, nf, dtype=torch.float64))
        self.drop = nn.Dropout(p)

    def forward(self, x: Tensor) -> Tensor:
        y = x.view(-1, self.size) @ self.weight  # (5*batch, nf)
        return torch.tanh(self.drop(y.view(x.shape[0], -1, self.nf)))
'''


def in_one_stage(case: Case) -> StageProgram:
    (program,) = generate(case.graph, by_hand(case, {block.name: 0 for block in case.problem.blocks}))
    return program


def test_sizes_rates_and_the_numbers_of_a_body_become_arguments_under_the_models_names() -> None:
    torch.manual_seed(0)
    case = case_of(Hourglass().double(), (torch.randn(3, 5, 8).double(),))

    program = in_one_stage(case)

    assert PROJECTION in re.sub(r"test_generated_classes.py:\d+ ", "", program.source)
    assert "self.down = Projection(size=8, nf=6, p=0.5)" in program.source
    assert "self.up = Projection(size=6, nf=8, p=0.25)" in program.source
    assert compared(case, planned(case, 2)).exact


def test_what_encloses_a_class_of_several_sizes_takes_arguments_for_it() -> None:
    class Pair(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.steps = nn.ModuleList(Projection(width, width, 0.0) for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            for step in self.steps:
                x = step(x)
            return x

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.narrow, self.wide, self.between = Pair(4), Pair(6), nn.Linear(4, 6)

        def forward(self, x: Tensor) -> Tensor:
            return self.wide(self.between(self.narrow(x))).square().mean()

    case = case_of(Both().double(), (torch.randn(3, 5, 4).double(),))

    source = in_one_stage(case).source

    assert source.count("class Pair") == source.count("class Projection") == 1
    assert "self.steps = nn.ModuleList(Projection(nf) for _ in range(3))" in source
    assert "self.narrow = Pair(4)" in source
    assert "self.wide = Pair(6)" in source


def test_an_argument_never_takes_the_place_of_what_a_module_has() -> None:
    class Rooted(nn.Module):
        def __init__(self, float_: int, kind: int) -> None:
            super().__init__()
            self.modules_, self.float = float_, kind  # type: ignore[assignment]
            self.weight = nn.Parameter(torch.ones(kind))

        def forward(self, x: Tensor) -> Tensor:
            return (x * self.weight).view(-1, self.weight.shape[0] // 2).sum()

    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = Rooted(1, 4), Rooted(2, 1 * 8)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return self.a(x) + self.b(y)

    case = case_of(Sum().double(), (torch.randn(3, 4).double(), torch.randn(3, 8).double()))

    source = in_one_stage(case).source

    assert "def __init__(self, size: int, size_2: int) -> None:" in source
    assert compared(case, planned(case, 1)).exact


def test_classes_that_differ_in_more_than_a_few_numbers_stay_apart() -> None:
    class Tower(nn.Module):
        def __init__(self, start: int) -> None:
            super().__init__()
            sizes = [start * factor for factor in (1, 3, 4, 7, 2, 9, 5, 8, 6, 11, 1)]
            self.layers = nn.Sequential(*(nn.Linear(a, b) for a, b in itertools.pairwise(sizes)))

        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(self.layers(x))

    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.small, self.large = Tower(1), Tower(2)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return self.small(x).sum() + self.large(y).sum()

    case = case_of(Two(), (torch.randn(3, 1), torch.randn(3, 2)))

    source = in_one_stage(case).source

    assert "class Tower(" in source
    assert "class Tower2(" in source
    assert "nn.Linear(22, 2)" in source


@pytest.mark.parametrize(
    ("name", "classes"), [("hf-resnet", 2), ("resnet", 2), pytest.param("hf-swin", 1, marks=pytest.mark.slow)]
)
def test_known_models_repeat_no_class_for_its_sizes(name: str, classes: int, tmp_path: Path) -> None:
    """Layers with and without an activation, blocks with and without a projection: two classes each."""
    model, inputs = built({case.name: case for case in CASES}[name])
    case = case_of(model, (), inputs)
    repeated = {"hf-resnet": "ResNetConvLayer", "hf-swin": "SwinMLP", "resnet": "BasicBlock"}[name]

    program = in_one_stage(case)

    (tmp_path / "stage_0.py").write_text(program.source)
    assert program.source.count(f"class {repeated}") == classes
    assert ruff_faults(tmp_path) == ""


class Spare(nn.Module):
    """Most of its layers are never called, and stand in lists and dicts."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Linear(4, 4)
        self.spare = nn.ModuleList([nn.Linear(4, 6, bias=False), nn.BatchNorm1d(6)])
        self.blocks = nn.ModuleDict({"a": nn.LayerNorm(4), "b": nn.Sequential(nn.Linear(4, 4), nn.ReLU())})
        self.odd = nn.ModuleList([nn.Linear(3, 3), Mixed()])

    def forward(self, x: Tensor) -> Tensor:
        return self.used(x).square().mean()


class Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.register_buffer("seen", torch.zeros(2))
        self.inner = nn.Linear(2, 2).requires_grad_(False)


def test_layers_that_nobody_calls_are_printed_as_layers(tmp_path: Path) -> None:
    case = case_of(Spare(), (torch.randn(3, 4),))
    (program,) = generate(case.graph, planned(case, 1))

    expected = """\
        self.used = nn.Linear(4, 4)
        self.spare = nn.ModuleList([nn.Linear(4, 6, bias=False), nn.BatchNorm1d(6)])
        self.blocks = nn.ModuleDict({"a": nn.LayerNorm(4), "b": nn.ModuleList([nn.Linear(4, 4)])})
        self.odd = nn.ModuleList([nn.Linear(3, 3), nn.Module()])
        self.odd[1].weight = nn.Parameter(torch.empty(2))
        self.odd[1].register_buffer("seen", torch.empty(2))
        self.odd[1].inner = nn.Linear(2, 2)
        self.odd[1].inner.requires_grad_(False)
"""
    assert expected in program.source
    (tmp_path / "stage_0.py").write_text(program.source)
    assert ruff_faults(tmp_path) == ""
    assert compared(case, planned(case, 1), (program,)).exact


class _Scaled(nn.Module):
    def __init__(self, heads: int) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.heads = heads

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x * (8 // self.heads) ** -0.5).tanh()


def test_a_factor_that_differs_is_no_size() -> None:
    pipe = split(nn.Sequential(_Scaled(2), _Scaled(4)), torch.randn(4, 8), cluster=1, costs="analytic")

    assert "def __init__(self, scale: float) -> None:" in pipe.stages[0].source


class _Turned(nn.Module):
    def __init__(self, order: tuple[int, ...]) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)
        self.order = order

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).permute(self.order).tanh()


def test_classes_that_turn_a_tensor_another_way_stay_apart() -> None:
    model = nn.Sequential(_Turned((0, 2, 1)), _Turned((1, 0, 2)))
    pipe = split(model, torch.randn(8, 8, 8), cluster=1, costs="analytic", check="full")

    for order in ("0, 2, 1", "1, 0, 2"):
        assert f".permute({order})" in pipe.stages[0].source


class _Frozen(nn.Module):
    """A backbone that is not trained, and a last layer of which the bias alone is."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8)).requires_grad_(False)
        self.adapter, self.head = nn.Linear(8, 8), nn.Linear(8, 8)
        self.head.weight.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.adapter(self.backbone(x))).square().mean()  # type: ignore[no-any-return]


def test_a_module_that_is_frozen_as_a_whole_is_frozen_in_one_line() -> None:
    pipe = split(_Frozen(), torch.randn(4, 8), cluster=1, costs="analytic", check="full")

    assert (
        """
        self.backbone.requires_grad_(False)
        self.head.weight.requires_grad_(False)

    def forward"""
        in pipe.stages[0].source
    )
    trained = [name for name, p in pipe.stages[0].module.named_parameters() if p.requires_grad]
    assert trained == ["adapter.weight", "adapter.bias", "head.bias"]


class Pyramid(nn.Module):
    """Its head is called with levels of several sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.head = Head()

    def forward(self, *levels: Tensor) -> Tensor:
        return torch.stack([self.head(level).square().mean() for level in levels]).sum()


class Head(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(4, 8, 3, padding=1), nn.Conv2d(8, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).relu()
        return self.last(x)


def test_a_module_that_is_called_with_several_sizes_has_one_forward() -> None:
    levels = tuple(torch.randn(2, 4, size, size) for size in (8, 4, 2))
    pipe = split(Pyramid(), levels, cluster=1, costs="analytic", check="full")

    source = pipe.stages[0].source
    assert "def forward_2" not in source
    assert re.search(
        r"x = F\.relu\(self\.first\(x\)\)  # test_generated_classes\.py:\d+ \(batch, 8, \?, \?\)", source
    )
