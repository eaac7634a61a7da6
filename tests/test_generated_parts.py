"""Parts of a tensor are a list where the author has one, and rounds over them are a loop."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pd2bw_fx import split


class Cell(nn.Module):
    """Steps through time, as LSTMs written by hand do."""

    def __init__(self) -> None:
        super().__init__()
        self.given, self.kept = nn.Linear(8, 32), nn.Linear(8, 32)

    def forward(self, steps: Tensor, h: Tensor, c: Tensor) -> Tensor:
        outputs = []
        for x in steps.unbind(0):
            gates = self.given(x) + self.kept(h)
            i, f, g, o = gates.chunk(4, 1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
            outputs += [h]
        return torch.stack(outputs)


class ForgetMult(nn.Module):
    """The pooling of a quasi-recurrent network, whose first round is another."""

    def forward(self, f: Tensor, x: Tensor) -> Tensor:
        result: list[Tensor] = []
        forgets = f.split(1, dim=0)
        before = None
        for i, h in enumerate((f * x).split(1, dim=0)):
            if before is not None:
                h = h + (1 - forgets[i]) * before
            h = h.squeeze(0)
            result.append(h)
            before = h
        return torch.stack(result)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.last, self.mult = Cell(), nn.Linear(8, 16), ForgetMult()

    def forward(self, x: Tensor) -> Tensor:
        y = self.cell(x.transpose(0, 1), x[:, 0], x[:, 1])
        halves = self.last(y).chunk(2, -1)
        z = halves[0] * halves[1].sigmoid() + halves[0]
        pooled: Tensor = self.mult(z.sigmoid(), z)
        return pooled.square().mean()


def test_rounds_over_the_parts_of_a_tensor_are_a_loop() -> None:
    torch.manual_seed(0)
    pipe = split(
        Recurrent().double(), torch.randn(4, 6, 8).double(), cluster=1, costs="analytic", check="full"
    )

    lines = [line.partition("  # ")[0] for line in pipe.stages[0].source.splitlines()]
    text = "\n".join(lines)
    assert (
        """
        parts = steps.unbind()
        outputs = []
        for i_ in range(6):
            gates = self.given(parts[i_]) + self.kept(h)
            i, f, g, o = gates.chunk(4, dim=1)
            c = f.sigmoid() * c + i.sigmoid() * g.tanh()
            h = o.sigmoid() * c.tanh()
            outputs.append(h)
        return torch.stack(outputs)
"""
        in text
    )
    assert "        forgets = f.split(1)\n        parts = (f * x).split(1)\n" in text
    assert "        for i in range(1, 6):\n            total = parts[i] + (1 - forgets[i]) * " in text
    assert "        z = halves[0] * halves[1].sigmoid() + halves[0]\n" in text


class Modulation(nn.Module):
    """Returns the entries of its list, as the blocks of diffusion transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 48)

    def forward(self, x: Tensor) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        out = self.linear(x).chunk(6, dim=-1)
        return out[:3], out[3:]


class Modulated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.modulation, self.head = Modulation(), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        (shift, scale, gate), (other_shift, other_scale, other_gate) = self.modulation(x)
        x = x + gate * (x * scale + shift)
        x = x + other_gate * (x * other_scale + other_shift)
        head: Tensor = self.head(x)
        return head.square().mean()


def test_parts_that_a_call_returns_are_variables() -> None:
    torch.manual_seed(0)
    pipe = split(Modulated(), torch.randn(4, 8), cluster=1, costs="analytic", check="full")
    assert "        first, second, third, fourth, part_5, part_6 = self.linear(x)" in pipe.stages[0].source
