"""Custom autograd functions that write what they are given, or that no stage could keep."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pd2bw_fx
from pd2bw_fx.errors import TraceError, VerificationError
from tests.custom_functions import batch, model_of


class Shifted(torch.autograd.Function):
    """Takes its input for scratch memory, as TabNet's sparsemax does, which torch is not told."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        x -= x.max(-1, keepdim=True).values
        result = x.exp()
        ctx.save_for_backward(result)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * ctx.saved_tensors[0] * 2


@pytest.mark.parametrize("reads_it", [False, True])
def test_an_input_that_is_written_is_nobody_elses(reads_it: bool) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.layer(x)
            result: Tensor = Shifted.apply(hidden)
            return (result + hidden if reads_it else result).square().mean()

    def split() -> pd2bw_fx.Pipeline:
        return pd2bw_fx.split(model_of(Model), batch(4)[:1], cluster=1, costs="analytic")

    if reads_it:
        with pytest.raises(VerificationError, match="output loss differs from the model's"):
            split()
    else:
        assert "x.clone()" in split().stages[0].source


class Branching(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2 if x.sum() > 0 else x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class InPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


class TwiceNoisy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * torch.rand_like(x) + torch.rand_like(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


class Given(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: int) -> Tensor:
        return x / rows

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (Branching, "data-dependent"),
        (InPlace, "writes to its input"),
        (TwiceNoisy, "more than once"),
        (Given, "size as a number"),
    ],
)
def test_a_custom_function_that_cannot_be_kept_is_refused_with_the_reason(function: Any, reason: str) -> None:
    class Refused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            more = (x.shape[0],) if function is Given else ()
            result: Tensor = function.apply(self.layer(x), *more)
            return result.sum()

    with pytest.raises(TraceError, match=f"custom autograd function .*{function.__name__}") as raised:
        pd2bw_fx.split(model_of(Refused), batch(4)[:1], cluster=1, costs="analytic")
    assert reason in str(raised.value)
    assert "custom_op" in str(raised.value)


class Decorated(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 3


class Exact(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 3


@pytest.mark.parametrize(("function", "half"), [(Decorated, "backward"), (Exact, "forward")])
def test_one_that_enters_autocast_is_refused_and_what_is_advised_works(function: Any, half: str) -> None:
    class Tripled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = function.apply(x)
            return result

    def split(inner: nn.Module) -> None:
        model = nn.Sequential(nn.Linear(6, 6), inner, nn.Linear(6, 6)).double()
        pd2bw_fx.split(model, batch(4)[:1], cluster=1, costs="analytic")

    place = rf"{function.__name__} \(test_custom_refused.py:\d+\)"
    with pytest.raises(TraceError, match=f"{place} enters torch.autocast in its {half}, .*untraced"):
        split(Tripled())
    split(pd2bw_fx.untraced(Tripled(), returns=torch.empty_like))


def test_without_example_inputs_its_backward_would_be_lost() -> None:
    class Squashing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = Shifted.apply(self.layer(x))
            return result.mean()

    with pytest.raises(TraceError, match="does not see the backward of the custom autograd function Shifted"):
        pd2bw_fx.split(Squashing(), cluster=1)
