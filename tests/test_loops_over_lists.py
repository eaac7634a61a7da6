"""Loops over values that were made before, as those of a U-Net over its skips."""

from __future__ import annotations

import pytest
import torch
from loop_lines import lines_inside, source_of
from torch import Tensor, nn

from pd2bw_fx.passes.codegen.layout import Loop
from pd2bw_fx.passes.codegen.loops.given import with_lists_in_headers
from pd2bw_fx.passes.codegen.written import Statement


class _Levels(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.downs = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.ups = nn.ModuleList(nn.Linear(16, 8) for _ in range(4))
        self.mids = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.drop, self.last = nn.Dropout(0.1), nn.Linear(8, 8)


def test_what_one_loop_puts_into_a_list_another_goes_over_backwards() -> None:
    class UNet(_Levels):
        def forward(self, x: Tensor) -> Tensor:
            skips = []
            for down in self.downs:
                x = down(x)
                skips.append(x)
                x = self.drop(x)
            x = self.last(x)
            for up, mid, skip in zip(self.ups, self.mids, skips[::-1], strict=True):
                x = mid(x)
                x = up(torch.cat([skip, x], dim=-1))
            return x.square().mean()

    source = source_of(UNet(), torch.randn(3, 8))
    inside = ["x = down(x)", "skips.append(x)", "x = self.drop(x)"]
    assert lines_inside(source, "for down in self.downs:") == inside, source
    header = "for mid, up, skip in zip(self.mids, self.ups, skips[::-1], strict=True):"
    assert lines_inside(source, header) == ["x = mid(x)", "x = up(torch.cat([skip, x], dim=-1))"], source


def test_lists_that_several_loops_go_over_and_other_lines_read() -> None:
    class Twice(_Levels):
        def forward(self, x: Tensor, mask: Tensor) -> Tensor:
            keys, values = [], []
            for down, mid in zip(self.downs, self.mids, strict=True):
                k, v = down(x), mid(x)
                x = x + k * v
                keys.append(k)
                values.append(v)
            for up, k, v in zip(self.ups, keys, values, strict=True):
                x = up(torch.cat([k * x, v * mask], dim=-1))
                x = x.tanh()
            for number, k in enumerate(keys):
                x = self.last(x) + k
                x = self.drop(x[:, number : number + 1] * x)
            return torch.stack(values).mean() + x.mean()

    source = source_of(Twice(), torch.randn(3, 8), torch.randn(3, 8))
    for header in (
        "for down, mid in zip(self.downs, self.mids, strict=True):",
        "for up, k, v in zip(self.ups, keys, values, strict=True):",
        "for number, k in enumerate(keys):",
    ):
        assert len(lines_inside(source, header)) > 1, source
    assert "torch.stack(values)" in source


def test_names_are_those_of_the_lists_in_the_order_of_the_authors_zip() -> None:
    class Distilling(_Levels):
        def forward(self, x: Tensor) -> Tensor:
            taught, told = [], []
            for down in self.downs:
                told.append(down(x).tanh())
            for mid in self.mids:
                taught.append(mid(x).tanh())
            loss = x.new_zeros(())
            for ours, theirs in zip(taught, told, strict=True):
                loss = loss + self.last(theirs.detach() * 2).sub(ours).square().mean()
                loss = loss * 0.9
            return loss

    class Stepping(_Levels):
        def forward(self, x: Tensor, times: Tensor) -> Tensor:
            for t0, t1 in zip(times.split(1)[:-1], times.split(1)[1:], strict=True):
                x = x + (t1 - t0) * self.last(x.tanh())
                x = self.drop(x) + t0 * t1
            return x.mean()

    source = source_of(Distilling(), torch.randn(3, 8))
    assert "self.last(theirs.detach() * 2) - ours" in source, source
    assert "for theirs, ours in zip(" in source, source
    source = source_of(Stepping(), torch.randn(3, 8), torch.linspace(0, 1, 7))
    assert "(t1 - t0) * self.last" in source, source


def test_loops_that_differ_in_more_than_what_they_go_over_stay_unrolled() -> None:
    class Unlike(_Levels):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            a, b, c, d = x.sin(), x.cos(), x.exp(), x.tanh()
            x = self.ups[0](torch.cat([a, x], dim=-1))
            x = self.drop(x)
            x = self.ups[1](torch.cat([b, x], dim=-1))
            x = self.drop(x)
            x = self.ups[2](torch.cat([c, x], dim=-1))
            x = self.drop(x)
            for kept, number in zip((c, b, a, d), (1, 5, 3, 2), strict=True):
                x = self.last(x[:, :number].sum(1, keepdim=True) * kept)
                y = y * kept[:, number : number + 2].sum(1, keepdim=True)
            return (x * y * d).mean()

    source = source_of(Unlike(), torch.randn(3, 8), torch.randn(3, 8))
    assert "x = self.ups[1](torch.cat([b, x], dim=-1))" in source, source  # the author has no loop there
    assert "for " not in source.partition("    def forward")[2].partition("def main")[0], source


def test_a_loop_inside_another_takes_no_name_that_the_next_round_reads() -> None:
    def rounds(first: str) -> Loop:
        inner = Loop("for k_ in ks:", (Statement("y = f(y, k_)"),))
        return Loop("for t in range(3):", (Statement(first), inner))

    (reading,) = with_lists_in_headers([rounds("y = f(k)")])
    (making,) = with_lists_in_headers([rounds("k = f(y)")])
    assert isinstance(reading, Loop)
    assert isinstance(making, Loop)
    assert reading.body[1] == Loop("for k_ in ks:", (Statement("y = f(y, k_)"),))
    assert making.body[1] == Loop("for k in ks:", (Statement("y = f(y, k)"),))


class Waves(nn.Module):
    """It goes over the entries of a buffer; the `shown` ones are read behind the loop too."""

    def __init__(self, *, shown: bool) -> None:
        super().__init__()
        self.shown, self.last = shown, nn.Linear(14, 2)
        self.register_buffer("rates", 2.0 ** torch.arange(3))

    def forward(self, x: Tensor) -> Tensor:
        parts = [x]
        for rate in self.rates:
            parts += [torch.sin(x * rate), torch.cos(x * rate)]
        kept = self.last(torch.cat(parts, -1))
        return kept * self.rates.unbind()[0] * rate if self.shown else kept


@pytest.mark.parametrize("shown", [False, True])
def test_a_loop_goes_over_the_parts_of_a_tensor_itself_where_it_alone_reads_them(*, shown: bool) -> None:
    source = source_of(Waves(shown=shown), torch.randn(3, 2))

    assert ("in self.rates.unbind():\n            parts_.append(torch.sin(x * " in source) is not shown
    assert source.count("torch.sin(") == 1
