"""Loops of a model's author over numbers, which a trace unrolls, are loops in the generated code."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from pd2bw_fx import load, split
from tests.drawn_loops import LENGTH, drawn_loops
from tests.drawn_modules import imported
from tests.loop_lines import lines_inside, source_of
from tests.stages import ruff_faults


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
    source = source_of(Decoder(), torch.randn(3, 5, 4), torch.randn(3, 6, 4))
    *_, third, last = lines_inside(source, "for t in range(6):")
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
    source = source_of(Shared(), torch.randn(3, 8))
    assert lines_inside(source, "for _ in range(4):") == ["y = F.relu(self.layer(self.norm(x)))", "x = x + y"]
    assert lines_inside(source, "for value in (0.5, 0.25, 0.125):") == ["x = x + value * self.layer(x)"]


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
    source = source_of(Kept(), torch.randn(3, 5, 4))
    assert lines_inside(source, "for t in range(4, -1, -1):")[-1].startswith("hidden.append(")
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
    assert lines_inside(source_of(Scan(), torch.randn(3, 5, 8)), "for t in range(5):") == [
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
    source = source_of(Twice(), torch.randn(3, 6, 4))

    for cell in ("up", "down"):
        assert f"outs = []\n        for t in range(6):\n            h = self.{cell}(x[:, t], h)" in source


class Attending(nn.Module):
    """Of its last round nobody reads the cell's state and the sum of the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.query, self.out = nn.LSTMCell(16, 8), nn.Linear(8, 8), nn.Linear(16, 4)

    def forward(self, frames: Tensor, memory: Tensor) -> Tensor:
        hidden = cell = context = memory.new_zeros(memory.size(0), 8)
        weights_sum = memory.new_zeros(memory.size(0), memory.size(1))
        outputs = []
        for t in range(frames.size(1)):
            hidden, cell = self.cell(torch.cat((frames[:, t], context), -1), (hidden, cell))
            energy = (self.query(hidden).unsqueeze(1) * memory).sum(-1) - weights_sum
            weights = torch.softmax(energy, dim=1)
            context = torch.bmm(weights.unsqueeze(1), memory).squeeze(1)
            weights_sum = weights_sum + weights
            outputs.append(self.out(torch.cat((hidden, context), 1)))
        return torch.stack(outputs, 1).square().mean()


def test_a_loop_takes_a_last_round_that_computes_what_nobody_reads() -> None:
    source = source_of(Attending(), torch.randn(3, 6, 8), torch.randn(3, 5, 8))
    inside = lines_inside(source, "for t in range(6):")
    assert inside[0].startswith("hidden, cell = self.cell(torch.cat([frames[:, t], context]")
    assert inside[-2] == "weights_sum = weights_sum + weights"
    assert source.count("self.cell(") == 1


class Exponents(nn.Module):
    """Of RWKV: a round has two values of a name, and nobody reads the state after the last round."""

    def __init__(self) -> None:
        super().__init__()
        self.decay, self.first = nn.Parameter(torch.rand(8)), nn.Parameter(torch.rand(8))

    def forward(self, k: Tensor, v: Tensor) -> Tensor:
        aa, bb, pp = torch.zeros_like(k[:, 0]), torch.zeros_like(k[:, 0]), torch.zeros_like(k[:, 0]) - 1e30
        out = []
        for t in range(k.shape[1]):
            ww = self.first + k[:, t]
            p = torch.maximum(pp, ww)
            e1, e2 = torch.exp(pp - p), torch.exp(ww - p)
            out.append((e1 * aa + e2 * v[:, t]) / (e1 * bb + e2))
            ww = pp - self.decay
            p = torch.maximum(ww, k[:, t])
            e1 = torch.exp(ww - p)
            e2 = torch.exp(k[:, t] - p)
            aa = e1 * aa + e2 * v[:, t]
            bb = e1 * bb + e2
            pp = p
        return torch.stack(out, dim=1).square().mean()


def test_a_loop_takes_a_last_round_whose_names_have_two_values_each() -> None:
    source = source_of(Exponents(), torch.randn(3, 6, 8), torch.randn(3, 6, 8))
    inside = lines_inside(source, "for t in range(6):")
    assert inside[-1] == "bb = e1 * bb + e2"
    assert source.count("out.append(") == 1


class LooksAhead(nn.Module):
    """Each round takes the next step; behind the last one there is none, and nobody reads what is taken."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.next = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h, step = torch.zeros_like(x[:, 0]), x[:, 0]
        for t in range(4):
            h = torch.tanh(self.cell(step) + self.next(h))
            step = x[:, min(t + 1, 3)].sin()
        return h.square().mean()


def test_a_last_round_takes_no_step_that_no_line_of_it_takes() -> None:
    source = source_of(LooksAhead(), torch.randn(3, 4, 8))
    assert lines_inside(source, "for t in range(1, 4):")[-1] == "step = x[:, t].sin()"
    assert source.count("torch.tanh(") == 2


class Leaving(nn.Module):
    """The author leaves out lines of the last round."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.mix = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        total = torch.zeros_like(x)
        for step in range(4):
            y = torch.tanh(self.mix(x) + total.sin())
            x = self.layer(y) * 2
            if step < 3:
                total = total * 0.5 + x.cos()
        return x.square().mean()


def test_what_the_author_leaves_out_of_the_last_round_is_not_computed() -> None:
    source = source_of(Leaving(), torch.randn(3, 8))
    assert "total = total * 0.5 + x.cos()" in lines_inside(source, "for _ in range(3):")
    assert source.count("self.layer(") == 2


class Splines(nn.Module):
    """The bases of KAN, whose first round has a longer name in it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("grid", torch.linspace(-2, 2, 10).expand(4, -1).contiguous())
        self.base, self.last, self.act = nn.Linear(4, 6), nn.Linear(24, 6), nn.SiLU()

    def bases(self, x: Tensor) -> Tensor:
        g = self.grid; x = x.unsqueeze(-1); b = ((x >= g[:, :-1]) & (x < g[:, 1:])).to(x.dtype)  # fmt: skip # noqa: E702
        for k in range(1, 4): b = ((x-g[:,:-(k+1)])/(g[:,k:-1]-g[:,:-(k+1)])*b[:,:,:-1])+((g[:,k+1:]-x)/(g[:,k+1:]-g[:,1:(-k)])*b[:,:,1:])  # fmt: skip # noqa: E501, E701
        return b.contiguous()

    def forward(self, x: Tensor) -> Tensor:
        return (self.base(self.act(x)) + self.last(self.bases(x).flatten(1))).square().mean()


def test_rounds_are_written_alike_where_a_line_of_one_is_just_short_enough() -> None:
    inside = lines_inside(source_of(Splines(), torch.rand(3, 4)), "for k in range(1, 4):")
    assert inside[0].startswith("ratio = (widened - self.grid[:, : -(k + 1)]) / ")
    assert inside[-1] == "b = product + product_2"


class Feeding(nn.Module):
    """The first round begins with something else than the others."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.first, self.feed, self.out = (
            nn.GRUCell(8, 8), nn.Linear(8, 8), nn.Linear(4, 8), nn.Linear(8, 4),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        hidden = x.new_zeros(x.shape[0], 8)
        frame, frames = x[:, 0], []
        for t in range(5):
            given = torch.tanh(self.first(frame)) if t == 0 else self.feed(frame)
            hidden = self.cell(given, hidden)
            mixed = hidden * 2 + x[:, t]
            frame = self.out(mixed)
            frames.append(frame)
        return torch.stack(frames, 1).square().mean()


def test_a_loop_begins_where_the_authors_rounds_begin() -> None:
    inside = lines_inside(source_of(Feeding(), torch.randn(3, 5, 8)), "for t in range(1, 5):")
    assert inside[0].startswith("given = self.feed(")
    assert inside[-1].startswith("frames.append(")


class _Nested(nn.Module):
    """What a loop in a loop counts is not what the loop that is written counts."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 4))

    def forward(self, x: Tensor) -> Tensor:
        for j in range(3):
            for k in range(2):
                x = x + (torch.tanh(self.weight[2 * j + k]) / (j + 1) if j else torch.tanh(self.weight[k]))
        return x.square().mean()


def test_a_counter_has_the_authors_name_only_if_it_counts_the_same_numbers() -> None:
    source = source_of(_Nested(), torch.randn(2, 4))

    assert "for i in range(2, 4):" in source
    assert "for k in" not in source


class _NestedAlike(_Nested):
    def forward(self, x: Tensor) -> Tensor:
        for j in range(3):
            for k in range(2):
                x = x + torch.tanh(self.weight[2 * j + k]) / (j + 1)
        return x.square().mean()


def test_the_first_round_is_divided_by_one_like_the_others() -> None:
    source = source_of(_NestedAlike(), torch.randn(2, 4))

    inside = lines_inside(source, "for i in range(1, 4):")
    assert inside == [
        "x = x + torch.tanh(self.weight[2 * i - 2]) / i",
        "x = x + torch.tanh(self.weight[2 * i - 1]) / i",
    ]
    assert source.count("torch.tanh") == 2


class Experts(nn.Module):
    """Both sums begin with 0, the first share is a slice from the start, and a list fits in a line."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(8, size) for size in (8, 6, 4))
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.gate = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        shares = self.gate(x).softmax(-1)
        mixed, penalty = 0, 0.0
        for number, expert in enumerate(self.experts):
            y = expert(x)
            mixed = mixed + shares[:, number : number + 1] * y
            penalty += y.square().mean()
        parts = [head(mixed).sum(-1) for head in self.heads]
        return torch.stack(parts, dim=1).mean() + 0.1 * penalty


def test_a_sum_from_zero_and_a_slice_from_the_start_are_in_the_loop_and_a_list_is_in_one_line() -> None:
    source = source_of(Experts(), torch.randn(3, 8))
    header = "for number, expert in enumerate(self.experts):"
    assert f"mixed = 0\n        penalty = 0.0\n        {header}" in source
    inside = lines_inside(source, header)
    assert "mixed = mixed + shares[:, number : number + 1] * y" in inside
    assert "penalty = penalty + y.square().mean()" in inside
    assert "parts = [head(mixed).sum(-1) for head in self.heads]" in source
