"""Names that the author gives a value elsewhere than on its line: in a caller, or in an attribute."""

from __future__ import annotations

import importlib
import textwrap
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pd2bw_fx


def _padded(x: Tensor, size: int) -> Tensor:
    x = F.pad(x, (size, 0))
    x = x.flip(-1)
    return x


class _Dilated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.filters = nn.ModuleList(nn.Conv1d(4, 4, 2) for _ in range(2))
        self.skips = nn.ModuleList(nn.Conv1d(4, 4, 1) for _ in range(2))
        self.mixers = nn.ModuleList(nn.Conv1d(4, 4, 1) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        skip: Tensor | int = 0
        for i in range(2):
            residual = _padded(x, 1)
            x = self.filters[i](residual)
            x = F.tanh(x) * F.sigmoid(x)
            s = x
            s = self.skips[i](s)
            skip = skip + s
            x = self.mixers[i](x)
            x = x + residual[:, :, 1:]
        return x + skip


class _Stateful(nn.Module):
    """Keeps its states in attributes, which only this forward reads."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(8, 6)
        self.out = nn.Linear(6, 8)

    def start(self, x: Tensor) -> None:
        self.state = x.new_zeros(x.shape[0], 6)
        self.memory = x.new_zeros(x.shape[0], 6)

    def forward(self, x: Tensor) -> Tensor:
        self.start(x)
        for _ in range(3):
            self.state, self.memory = self.cell(x, (self.state, self.memory))
            self.state = F.dropout(self.state, 0.1, self.training)
            x = self.out(self.state)
        return x


class _Part(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        size: Tensor | int = 0
        for layer in self.layers:
            x = layer(x)
            det = x.mean(1)
            size = size + det
        assert isinstance(size, Tensor)
        return x, size


class _Parts(nn.Module):
    """Adds up numbers of parts that add up numbers themselves, on a line of the same words."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = _Part(), _Part()

    def forward(self, x: Tensor) -> Tensor:
        size: Tensor | int = 0
        x, det = self.first(x)
        size = size + det
        x, det = self.last(x)
        size = size + det
        return x + size[:, None]  # type: ignore[no-any-return, index]


class _Described(nn.Module):
    """Its layers are described in a list, and each kind is another branch."""

    def __init__(self) -> None:
        super().__init__()
        self.kinds = "layer", "layer", "shortcut", "layer"
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in self.kinds)

    def forward(self, x: Tensor) -> Tensor:
        layer_outputs: list[Tensor] = []
        for kind, layer in zip(self.kinds, self.layers, strict=True):
            if kind == "layer":
                x = layer(x)
            elif kind == "shortcut":
                x = layer_outputs[-1] + layer_outputs[-2]
            layer_outputs.append(x)
        return x


@pytest.mark.parametrize(
    ("model", "shape", "lines"),
    [
        (
            _Described(),
            (2, 8),
            ["layer_output = self.layers[0](x)", "x = self.layers[1](layer_output)", "x = x + layer_output"],
        ),
        (
            _Dilated(),
            (2, 4, 9),
            [
                "residual = x.flip((-1,))",
                "x = self.filters[i](residual)",
                "x = torch.tanh(x) * torch.sigmoid(x)",
                "x = x + residual[:, :, 1:]",
            ],
        ),
        (
            _Stateful(),
            (2, 8),
            [
                "state, memory = self.cell(x, (state, memory))",
                "state = F.dropout(state, 0.1, training=self.training)",
            ],
        ),
        (_Parts(), (3, 8), ["size = 0 + det"]),
    ],
)
def test_a_value_has_its_authors_name(model: nn.Module, shape: tuple[int, ...], lines: list[str]) -> None:
    pipe = pd2bw_fx.split(model, torch.randn(shape), cluster=1, costs="analytic")

    found = [line.partition("#")[0].strip() for line in pipe.stages[0].source.splitlines()]
    assert not any(line.startswith("s = x") for line in found)
    assert [line for line in lines if line not in found] == []


def test_helpers_in_another_folder_of_a_repository_are_the_authors_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for file, code in _REPOSITORY.items():
        (tmp_path / file).parent.mkdir()
        (tmp_path / file).write_text(textwrap.dedent(code))
    monkeypatch.syspath_prepend(str(tmp_path))
    model = importlib.import_module("own_nets.net").Net()

    pipe = pd2bw_fx.split(model, torch.randn(4, 8), cluster=1, costs="analytic")

    assert "weights = first.mean(1, keepdim=True)  # masks.py:3 (batch, 1)" in pipe.stages[0].source


_REPOSITORY = {
    "own_nets/net.py": """
        from own_tools.masks import weighted
        from torch import nn

        class Net(nn.Module):
            def __init__(self):
                super().__init__()
                self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

            def forward(self, x):
                return self.last(weighted(self.first(x)))
        """,
    "own_tools/masks.py": """
        def weighted(x):
            weights = x.mean(1, keepdim=True)
            peaks = weights.exp()
            return x * peaks + weights
        """,
}


class _Encoding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = _Recurrent()

    def forward(self, x: Tensor) -> Tensor:
        outputs = torch.zeros_like(x)
        encoder_outputs, hidden = self.encoder(x)
        outputs = outputs + encoder_outputs.cumsum(1)
        return (outputs * encoder_outputs * hidden).mean()


class _Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.GRU(4, 4, batch_first=True)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        outputs, hidden = self.rnn(x)
        return outputs, hidden[-1][:, None]


def test_the_output_of_a_recurrent_layer_is_called_as_its_module_calls_it_and_elsewhere_as_callers_do() -> (
    None
):
    pipe = pd2bw_fx.split(_Encoding(), torch.randn(2, 6, 4), cluster=1, costs="analytic")
    source = pipe.stages[0].source

    assert "encoder_outputs, hidden = self.encoder(x)" in source
    assert "outputs, hidden = self.rnn(x)" in source


class _Brief(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        kept = []
        left = torch.tanh(self.first(x)); kept.append(left)  # fmt: skip # noqa: E702
        x = left; right = self.second(x).sin()  # fmt: skip # noqa: E702
        return (kept[0] * right + left).square().mean()


def test_a_line_has_one_statement_where_the_others_hand_on_what_it_makes() -> None:
    pipe = pd2bw_fx.split(_Brief(), torch.randn(4, 8), cluster=1, costs="analytic")

    for line in ("left = torch.tanh(self.first(x))", "right = self.second(left).sin()"):
        assert f"        {line}  # " in pipe.stages[0].source
