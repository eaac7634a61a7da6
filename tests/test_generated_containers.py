"""Containers of torch.nn keep their members' names, and are containers in the stages too."""

from __future__ import annotations

from collections import OrderedDict

import pytest
import torch
from torch import Tensor, nn

from pd2bw_fx.passes.codegen import generate
from pd2bw_fx.stage import StageProgram
from tests.stages import Case, by_hand, case_of, compared, planned


def in_one_stage(case: Case) -> StageProgram:
    (program,) = generate(case.graph, by_hand(case, {block.name: 0 for block in case.problem.blocks}))
    return program


class Residual(nn.Module):
    """A Sequential whose members have these names, and a value of its own behind it."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        layers = (nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        self.inner = nn.Sequential(OrderedDict(zip(names, layers, strict=True)))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


def test_a_sequential_of_named_members_is_one_of_an_ordered_dict() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(Residual("up", "act", "down") for _ in range(4))).double()
    case = case_of(model, (torch.randn(3, 8).double(),))

    source = in_one_stage(case).source

    assert "from collections import OrderedDict\n\nimport torch\n" in source
    assert "nn.Sequential(\n            OrderedDict(\n                up=nn.Linear(8, 16" in source
    assert compared(case, planned(case, 2)).exact


@pytest.mark.parametrize("names", [("1a", "b-c", "in"), ("0", "2", "3"), ("1", "0", "2")])
def test_names_that_are_no_words_are_kept(names: tuple[str, str, str]) -> None:
    torch.manual_seed(0)
    case = case_of(Residual(*names).double(), (torch.randn(3, 8).double(),))

    assert compared(case, planned(case, 2)).exact
    assert set(in_one_stage(case).parameters) == {name for name, _ in case.model.named_parameters()}
