"""Loops of a model's author over numbers, which a trace unrolls, are loops in the generated code."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from pd2bw_fx import load, split
from pd2bw_fx.passes.codegen.counted import counting, spelled
from pd2bw_fx.passes.codegen.tokens import computed, line_of
from tests.drawn_loops import LENGTH, drawn_loops
from tests.drawn_modules import imported
from tests.stages import ruff_faults


def _source(model: nn.Module, *batch: Tensor, num_stages: int = 1) -> str:
    pipe = split(model, batch, cluster=2, num_stages=num_stages, costs="analytic", check="full")
    return "\n".join(stage.source for stage in pipe.stages)


def _inside(source: str, header: str) -> list[str]:
    """The lines of a loop, without their comments."""
    lines = [line.partition("  # ")[0] for line in source.splitlines()]
    start = next(at for at, line in enumerate(lines) if line.strip() == header)
    indent = len(lines[start]) - len(lines[start].lstrip())
    body = []
    for line in lines[start + 1 :]:
        if not line.startswith(" " * (indent + 1)):
            break
        body.append(line[indent + 4 :])
    return body


class Decoder(nn.Module):
    """Attention over a memory, a step at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(4, 8)
        self.cells = nn.ModuleList([nn.GRUCell(12, 8), nn.GRUCell(8, 8)])
        self.out = nn.Linear(8, 4)

    def forward(self, memory: Tensor, target: Tensor) -> Tensor:
        memory = self.embed(memory)
        h = memory.mean(1)
        state = memory.sum(1)
        outs = []
        for t in range(target.shape[1]):
            context = ((memory * h[:, None]).sum(-1).softmax(-1)[:, :, None] * memory).sum(1)
            h = self.cells[0](torch.cat([target[:, t], context], dim=-1), h)
            state = self.cells[1](h, state)
            outs.append(self.out(state))
        return (torch.stack(outs, dim=1) - target).square().mean()


def test_a_loop_over_time_fills_its_list() -> None:
    source = _source(Decoder(), torch.randn(3, 5, 4), torch.randn(3, 6, 4))
    *_, third, last = _inside(source, "for t in range(6):")
    assert third == "state = self.cells[1](h, state)"
    assert last == "outs.append(self.out(state))"
    assert "torch.stack(outs, dim=1)" in source
    assert source.count("self.cells[0](") == 1


def test_what_is_cut_out_of_a_loop_stands_by_itself() -> None:
    pipe = split(
        Decoder(), (torch.randn(3, 5, 4), torch.randn(3, 6, 4)), cluster=2, costs="analytic", check="full"
    )
    again = split(
        Decoder(), (torch.randn(3, 5, 4), torch.randn(3, 6, 4)), cluster=2, costs="analytic", check="full"
    )
    assert [stage.source for stage in pipe.stages] == [stage.source for stage in again.stages]
    assert any(" in range(" in stage.source for stage in pipe.stages)


class Shared(nn.Module):
    """One layer again and again, as in universal transformers, and an ODE's steps of unlike size."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.layer, self.norm = nn.Linear(8, 8), nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for _ in range(4):
            y = torch.relu(self.layer(self.norm(x)))
            x = x + y
        for step in (0.5, 0.25, 0.125):
            x = x + step * self.layer(x)
        return x.square().mean()


def test_one_layer_again_and_again() -> None:
    source = _source(Shared(), torch.randn(3, 8))
    assert _inside(source, "for _ in range(4):") == ["y = F.relu(self.layer(self.norm(x)))", "x = x + y"]
    assert _inside(source, "for value in (0.5, 0.25, 0.125):") == ["x = x + self.layer(x) * value"]


class Kept(nn.Module):
    """What a round makes is read by the next one and in the end, in the other order."""

    def __init__(self) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(4, 8)

    def forward(self, x: Tensor) -> Tensor:
        h, c = x.new_zeros(x.shape[0], 8), x.new_ones(x.shape[0], 8)
        hidden = []
        for t in range(4, -1, -1):
            h, c = self.cell(x[:, t], (h, c))
            hidden.append(h)
        backwards = torch.stack(hidden[::-1], dim=1)
        return backwards.square().mean() + sum(hidden).mean() + h.mean()


def test_a_state_that_is_kept_and_carried_on() -> None:
    source = _source(Kept(), torch.randn(3, 5, 4))
    assert _inside(source, "for t in range(4, -1, -1):")[-1].startswith("hidden.append(")
    assert "torch.stack(hidden[::-1], dim=1)" in source
    assert "+ sum(hidden).mean() +" in source


class Scan(nn.Module):
    """The greatest so far is read beside the one before it, as in RWKV."""

    def __init__(self) -> None:
        super().__init__()
        self.key = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        keys = self.key(x)
        state = torch.zeros_like(keys[:, 0])
        greatest = torch.zeros_like(keys[:, 0]) - 1e38
        for t in range(x.shape[1]):
            key = keys[:, t]
            greater = torch.maximum(greatest, key)
            state = (greatest - greater).exp() * state + (key - greater).exp()
            greatest = greater
        return (state.log() + greatest).square().mean()


def test_what_a_round_hands_on_under_another_name() -> None:
    assert _inside(_source(Scan(), torch.randn(3, 5, 8)), "for t in range(5):") == [
        "key = keys[:, t]",
        "greater = torch.maximum(greatest, key)",
        "state = (greatest - greater).exp() * state + (key - greater).exp()",
        "greatest = greater",
    ]


@pytest.mark.parametrize("seed", [3, 12, 94, 97, 99])
def test_a_drawn_model_with_loops(seed: int, tmp_path: Path) -> None:
    with imported(drawn_loops(seed), tmp_path / f"loops_{seed}.py") as module:
        torch.manual_seed(seed)
        model = module.Model()
    x = torch.linspace(-1, 1, 4 * LENGTH * 8).view(4, LENGTH, 8)
    pipe = split(model, (x,), cluster=1 + seed % 3, costs="analytic", check="full")
    assert any(" in range(" in stage.source for stage in pipe.stages)
    pipe.save(tmp_path / "saved")
    assert ruff_faults(tmp_path / "saved") == ""
    assert torch.equal(load(tmp_path / "saved").run((x,))["loss"], pipe.run((x,))["loss"])


@pytest.mark.parametrize(
    ("columns", "header", "written"),
    [
        ([["0", "1", "2"]], "for t in range(3):", "x[:, t]"),
        ([["7", "5", "3"]], "for t in range(7, 1, -2):", "x[:, t]"),
        ([["1", "2", "4"]], "for t in (1, 2, 4):", "x[:, t]"),
        ([["0.5", "1.0"]], "for t in (0.5, 1.0):", "x[:, t]"),
        ([["0", "2"], ["2", "4"]], "for t in range(0, 4, 2):", "x[:, t : t + 2]"),
        ([["1", "2"], ["3", "5"]], "for t in range(1, 3):", "x[:, t : 2 * t + 1]"),
        ([["3", "4"], ["4", "3"]], "for t in range(3, 5):", "x[:, t : 7 - t]"),
    ],
)
def test_numbers_are_counted(columns: list[list[str]], header: str, written: str) -> None:
    line = line_of("x[:, 11]" if len(columns) == 1 else "x[:, 11:12]")
    places = [at for at, token in enumerate(line.tokens) if token.kind == "number"]
    found = counting({(0, at): column for at, column in zip(places, columns, strict=True)}, len(columns[0]))
    assert found is not None
    assert found.header("t") == header
    tokens = [found.tokens.get((0, at), token) for at, token in enumerate(line.tokens)]
    assert spelled(tokens, "t") == written


def test_numbers_that_no_counter_gives() -> None:
    assert counting({(0, 0): ["1", "2", "4"], (0, 1): ["1", "3", "9"]}, 3) is None
    assert counting({(0, 0): ["0", "2", "4"], (0, 1): ["0", "3", "6"]}, 3) is None


_FILLED = ["a = []", "y = f(x)", "a.append(y)", "y = f(y)", "a.append(y)"]


@pytest.mark.parametrize(
    ("one", "other", "is_same"),
    [
        (["y = f(x)", "z = f(y)"], ["x = f(x)", "x = f(x)"], True),
        (["y = f(x)", "z = f(x)"], ["x = f(x)", "x = f(x)"], False),
        (["y = f(x)", "z = g(y)"], ["y = x", "z = g(f(y))"], False),
        (["y = f(x)", "z = g([y, x])"], ["a = []", "a.append(f(x))", "z = g([*a, x])"], True),
        (["y = f(x)", "z = f(y)", "w = g([z, y])"], [*_FILLED, "w = g(a[::-1])"], True),
        (["y = f(x)", "z = f(y)", "w = g([z, y])"], [*_FILLED, "w = g(a)"], False),
        (["y = f(x)", "z = f(y)", "w = y + 0 + z"], [*_FILLED, "w = sum(a)"], True),
        (["y = f(x)", "z = f(y)", "w = z + 0 + y"], [*_FILLED, "w = sum(a)"], False),
    ],
)
def test_bodies_compute_the_same_whatever_their_names(
    one: list[str], other: list[str], is_same: bool
) -> None:
    bodies = [list(computed(map(line_of, lines))) for lines in (one, other)]
    assert (bodies[0] == bodies[1]) == is_same


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.GRUCell(4, 4), nn.GRUCell(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = x[:, 0]
        outs = []
        for t in range(6):
            h = self.up(x[:, t], h)
            outs.append(h)
        x = torch.stack(outs, 1).tanh()
        outs = []
        for t in range(6):
            h = self.down(x[:, t], h)
            outs.append(h)
        return torch.stack(outs, 1).square().mean()


def test_a_second_loop_has_its_authors_names_where_the_first_is_done_with_them() -> None:
    source = _source(Twice(), torch.randn(3, 6, 4))

    for cell in ("up", "down"):
        assert f"outs = []\n        for t in range(6):\n            h = self.{cell}(x[:, t], h)" in source
