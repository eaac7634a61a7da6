"""Untraced parts whose backward runs them again, with the weights of its own microbatch."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import pd2bw_fx
from pd2bw_fx.errors import InputError, TraceError
from tests.trained import assert_trained_by_the_rule


class Checkpointed(nn.Module):
    def __init__(self, *, again: bool = True, reentrant: bool = False, rate: float = 0.0) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 6), nn.Dropout(rate), nn.GELU()) for _ in range(2)
        )
        self.again, self.reentrant = again, reentrant

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.reentrant) if self.again else layer(x)
        return x / 2 if x.abs().max() > 100 else x


class Reversed(torch.autograd.Function):
    """Has the block's input again from its output."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, block: nn.Module, *weights: Tensor) -> Tensor:
        one, other = x.chunk(2, -1)
        result = torch.cat([one + block(other), other], -1)
        ctx.block = block
        ctx.save_for_backward(result)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        other = ctx.saved_tensors[0].chunk(2, -1)[1].detach().requires_grad_()
        one_s, other_s = gradient.chunk(2, -1)
        with torch.enable_grad():
            found = torch.autograd.grad(ctx.block(other), [other, *ctx.block.parameters()], one_s)
        return torch.cat([one_s, other_s + found[0]], -1), None, *found[1:]


class Reversible(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(3, 8), nn.GELU(), nn.Linear(8, 3))

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = Reversed.apply(x, self.block, *self.block.parameters())
        return result


class Model(nn.Module):
    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.first, self.part, self.last = nn.Linear(6, 6), part, nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.part(self.first(x))).square().mean()


def made(part: nn.Module) -> tuple[nn.Module, nn.Module]:
    """A model whose part is run as it is written, and the same one before."""
    torch.manual_seed(0)
    model = Model(part).double()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    before = copy.deepcopy(model)
    pd2bw_fx.untraced(model.part, returns=torch.empty_like)
    return model, before


def rows(size: int = 6) -> Tensor:
    return torch.randn(size, 6, dtype=torch.float64)


def split(model: nn.Module, **options: Any) -> pd2bw_fx.Pipeline:
    return pd2bw_fx.split(
        model, rows(), **{"cluster": 2, "num_stages": 2, "costs": "analytic", "check": "full", **options}
    )


@pytest.mark.parametrize("part", [Checkpointed, Reversible])
def test_an_untraced_part_is_trained_as_by_the_model_itself(part: Any) -> None:
    model, before = made(part())
    assert_trained_by_the_rule(before, split(model), [rows() for _ in range(3)])


def test_what_is_drawn_again_is_what_was_drawn() -> None:
    torch.manual_seed(1)
    batches, losses = [rows() for _ in range(3)], []
    for again in (False, True):
        pipe = split(made(Checkpointed(again=again, rate=0.4))[0], check=False)
        settings: dict[str, Any] = {"optimizer": lambda p: torch.optim.SGD(p, lr=0.05), "seed": 3}
        losses.append(pipe.train_local(batches, microbatches_per_update=2, **settings).losses)
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)


def test_reentrant_checkpoints_are_told() -> None:
    with pytest.raises(
        InputError, match=r"Checkpointed\w* calls torch.utils.checkpoint .* use_reentrant=False$"
    ):
        split(made(Checkpointed(reentrant=True))[0], costs="measured", profile_cache=False)


def test_a_function_that_reads_the_weights_of_a_module_is_told_of() -> None:
    with pytest.raises(
        TraceError, match=r"Reversed, .*that it is not given \(test_untraced_\w+\.py.*pd2bw_fx\.untraced"
    ):
        split(made(Reversible())[1])
