"""Loops whose rounds put several values into one list."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.loop_lines import lines_inside, source_of

X = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))


class Waves(nn.Module):
    """Sines and cosines of multiples, one after another, as of a position."""

    def __init__(self) -> None:
        super().__init__()
        self.mixed = nn.Linear(66, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.mixed(torch.cat(self.waves(x), dim=-1)).square().mean()

    def waves(self, x: Tensor) -> list[Tensor]:
        waves = [x]
        for k in range(5):
            waves.append(torch.sin(x * 2.0**k))
            waves.append(torch.cos(x * 2.0**k))
        return waves


MULTIPLES = "(1.0, 2.0, 4.0, 8.0, 16.0)"


def test_a_round_that_puts_two_values_into_one_list_is_a_round_of_a_loop() -> None:
    source = source_of(Waves(), X)

    assert lines_inside(source, f"for value in {MULTIPLES}:") == [
        "waves.append(torch.sin(x * value))",
        "waves.append(torch.cos(x * value))",
    ]
    assert "torch.cat([x, *waves], dim=-1)" in source


def test_a_list_over_two_counters_is_filled_by_a_loop_over_one() -> None:
    class InOneLine(Waves):
        def waves(self, x: Tensor) -> list[Tensor]:
            return [x] + [f(x * 2.0**k) for k in range(5) for f in (torch.sin, torch.cos)]

    source = source_of(InOneLine(), X)

    assert lines_inside(source, f"for value in {MULTIPLES}:") == [
        "parts.append((x * value).sin())",
        "parts.append((x * value).cos())",
    ]


def test_values_that_lie_in_a_list_in_another_order_than_the_rounds_are_in_no_list_of_rounds() -> None:
    class Apart(Waves):
        def waves(self, x: Tensor) -> list[Tensor]:
            waves = super().waves(x)
            waves[1], waves[2] = waves[2], waves[1]
            return waves

    source = source_of(Apart(), X)

    assert f"for value in {MULTIPLES}:" not in source
    assert "cos, sin, " in source
