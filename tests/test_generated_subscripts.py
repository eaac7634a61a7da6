"""Subscripts in generated code: one where the author wrote one, with the same numbers either way."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from pd2bw_fx.passes.codegen import generate
from tests.stages import case_of, compared, planned


class _Subscripts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: Tensor, rows: Tensor, mask: Tensor) -> Tensor:
        h = self.linear(x)
        a = h[:, 1:, 0] * (rows[0] // 2)
        b = h[..., 2, None]
        c = h[:, None, 0]
        d = h[:, 1:, None, :2]
        e = h[rows, None]
        f = h[:, rows[::2], 1:, None]
        g = h[1:].unsqueeze(1)[:, 0]
        j = h[:, :, 1:][1:, 2]
        k = h[mask][:, 0]
        m = h[:, 1:3][:, 0]
        return torch.stack([y.sin().mean() for y in (a, b, c, d, e, f, g, j, k, m)]).sum()


def test_a_subscript_is_written_as_the_author_wrote_it() -> None:
    torch.manual_seed(0)
    mask = torch.rand(4, 5) < 0.8
    case = case_of(_Subscripts().double(), (torch.randn(4, 5, 6).double(), torch.tensor([0, 2, 1, 3]), mask))

    for num_stages in (1, 2):
        plan = planned(case, num_stages)
        programs = generate(case.graph, plan)
        assert compared(case, plan, programs).exact

    (program,) = generate(case.graph, planned(case, 1))
    lines = [line.strip().partition("  # ")[0] for line in program.source.splitlines()]
    for line in (
        "a = h[:, 1:, 0] * (rows[0] // 2)",
        "b = h[:, :, 2, None]",
        "c = h[:, None, 0]",
        "d = h[:, 1:, None, :2]",
        "e = h[rows, None]",
        "f = h[:, rows[::2], 1:, None]",
        "g = h[1:].unsqueeze(1)[:, 0]",  # the author's method
        "j = h[:, :, 1:][1:, 2]",  # torch goes through a subscript from left to right
        "k = h[mask][:, 0]",
        "m = h[:, 1:3][:, 0]",
    ):
        assert line in lines, program.source
