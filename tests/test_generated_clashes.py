"""A model may use the names that a stage's file has for its own: the file runs, and computes what it did."""

from __future__ import annotations

import collections
import runpy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from pd2bw_fx import Constraints, split


def _tried_out(model: nn.Module, folder: Path, *inputs: Tensor) -> str:
    """The source of the only stage of the model, after its main has run."""
    source = split(model, inputs, cluster=1, costs="analytic").stages[0].source
    file = folder / "stage_0.py"
    file.write_text(source)
    runpy.run_path(str(file), run_name="__main__")
    return source


class _Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor, stage: Tensor) -> Tensor:
        scaled: Tensor = self.layer(x) * stage
        return scaled


def test_an_input_called_stage(tmp_path: Path) -> None:
    assert "stage_2(x, stage)" in _tried_out(_Scaled(), tmp_path, torch.randn(2, 4), torch.randn(2, 4))


class _Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mask = nn.Parameter(torch.eye(4, dtype=torch.bool), requires_grad=False)
        self.index = nn.Parameter(torch.tensor([2, 1, 0, 3]), requires_grad=False)
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x[:, self.index] @ (self.layer.weight * self.mask)


def test_parameters_that_are_whole_numbers_are_tried_out_at_zero(tmp_path: Path) -> None:
    assert "nn.init.zeros_(parameter)" in _tried_out(_Masked(), tmp_path, torch.randn(2, 4))


class _Called(nn.Module):
    """Two calls of it do different things, so that its class has two methods."""

    def __init__(self) -> None:
        super().__init__()
        self.forward_2, self.layer = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, factor: Tensor | None = None) -> Tensor:
        hidden: Tensor = self.forward_2(self.layer(x))
        return hidden if factor is None else hidden * factor


class _Calling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.called = _Called()

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.called(x, self.called(x))
        return result


def test_a_layer_called_as_a_second_method_would_be(tmp_path: Path) -> None:
    source = _tried_out(_Calling(), tmp_path, torch.randn(2, 4))
    assert "self.forward_2 = nn.Linear(4, 4)" in source
    assert "self.called.forward_3(x" in source


class main(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x))


class _Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = main()

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.inner(x) + 1
        return result


def test_a_class_called_main(tmp_path: Path) -> None:
    assert "self.inner = main2()" in _tried_out(_Holder(), tmp_path, torch.randn(2, 4))


def _causal(length: int, device: torch.device) -> Tensor:
    i = torch.arange(length, device=device)
    mask = (i[None, :] <= i[:, None]) & ((i[:, None] - i[None, :]) < 4)
    return torch.where(mask, 0.0, float("-inf"))[None, None]


class make_mask(nn.Module):
    """What a helper function for `mask` is called."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x))


class _Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.layer = make_mask(), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        make_mask = self.layer(self.inner(x))
        mask = _causal(x.shape[1], x.device)
        y = make_mask @ make_mask.mT + mask[0, 0]
        mask = y.softmax(-1)
        result: Tensor = mask @ make_mask
        return result


def test_a_value_and_a_class_called_as_a_helper_function(tmp_path: Path) -> None:
    source = _tried_out(_Attending(), tmp_path, torch.randn(2, 8, 8))
    assert "    layer = self.layer(self.inner(x))" in source
    assert "self.inner = make_mask2()" in source


class _Lettered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.F, self.mymath = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.F.weight @ self.mymath.weight


def test_layers_called_as_modules_of_the_library_import_nothing(tmp_path: Path) -> None:
    source = _tried_out(_Lettered(), tmp_path, torch.randn(2, 4))
    imports = [line for line in source.splitlines() if line.startswith(("import ", "from "))]
    assert imports == ["import torch", "from torch import Tensor, nn"]


class OrderedDict(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient * 2


class Doubled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(collections.OrderedDict(up=nn.Linear(4, 4), act=nn.Tanh()))

    def forward(self, DoubledStage0: Tensor) -> Any:
        return OrderedDict.apply(self.layers(DoubledStage0))  # type: ignore[no-untyped-call]


def test_a_function_called_as_an_imported_class_and_an_input_called_as_the_stage(tmp_path: Path) -> None:
    source = _tried_out(Doubled(), tmp_path, torch.randn(2, 4))

    assert "class OrderedDict(" not in source
    assert "    DoubledStage0_2 = torch.rand(2, 4)" in source


class _Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(20, 4)

    def forward(self, parts: list[Tensor]) -> Tensor:
        return self.layer(torch.cat(parts, 1)).square().mean()


class _Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(4, 4) for _ in range(5)).requires_grad_(False)
        self.mixer = _Mixer()

    def forward(self, x: Tensor) -> Tensor:
        return self.mixer([part(x) for part in self.parts])


def test_a_frozen_stage_of_many_results_is_tried_out_without_a_backward(tmp_path: Path) -> None:
    constraints = Constraints(stage_of={"parts": 0, "mixer": 1})
    options = {"cluster": 2, "num_stages": 2, "costs": "analytic", "constraints": constraints}
    pipe = split(_Frozen(), (torch.randn(2, 4),), **options)

    assert "results = stage(x)" in pipe.stages[0].source
    file = tmp_path / "stage_0.py"
    file.write_text(pipe.stages[0].source)
    runpy.run_path(str(file), run_name="__main__")
