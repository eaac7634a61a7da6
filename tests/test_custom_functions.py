"""Custom autograd functions: kept whole in the trace, classes of their own in the generated code."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pd2bw_fx
from pd2bw_fx.runtime.reference import train_reference
from tests.custom_functions import batch, model_of


class Reversed(torch.autograd.Function):
    """Its gradient goes the other way, `strength` times."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, strength: float) -> Tensor:
        ctx.strength = strength
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return -ctx.strength * gradient, None


class Rounded(torch.autograd.Function):
    """A straight-through estimator with a trained scale, whose gradient is a mean over the batch."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        inside = (x / scale).abs() <= 8
        ctx.save_for_backward(inside, x > 0)
        ctx.rows = x.shape[0]
        return (x / scale).round().clamp(-8, 8) * scale

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        inside, positive = ctx.saved_tensors
        return gradient * inside * torch.where(positive, 1.0, 2.0), (gradient * ~inside).sum() / ctx.rows


class Parted(torch.autograd.Function):
    """Has the newer form with setup_context, and a mask among its results that has no gradient."""

    @staticmethod
    def forward(x: Tensor, limit: float = 0.5) -> tuple[Tensor, Tensor, Tensor]:
        above = (x > limit).to(x.dtype)
        return x * above, x.exp(), above

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        ctx.mark_non_differentiable(output[2])
        ctx.save_for_backward(output[1], output[2])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        grown, above = ctx.saved_tensors
        return gradients[0] * above * 3 + gradients[1] * grown, None


class Idle(torch.autograd.Function):
    """Turns gradients off where they are off, and saves what it does not read."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        with torch.no_grad():
            result = x * torch.tensor(2.0, dtype=x.dtype)
            ctx.save_for_backward(x.sin())
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        with torch.no_grad():
            return gradient * torch.tensor(3.0, dtype=gradient.dtype)


class Written(torch.autograd.Function):
    """Writes to what it made itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        result = x * 2
        result[:, 0] = 0
        result.add_(1)
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        gradient = gradient.clone()
        gradient[:, 0] = 7
        return gradient


class Noisy(torch.autograd.Function):
    """Draws a number for each element."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        noise = torch.rand_like(x)
        ctx.save_for_backward(noise)
        return x * noise

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (noise,) = ctx.saved_tensors
        return gradient * noise * 2


class Older(torch.autograd.Function):
    """Reads what it has saved by the name from before torch 0.4, as NAFNet's LayerNorm does."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.save_for_forward(x)
        return x * weight

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_variables
        return gradient * weight * 2, (gradient * x).sum(0)


reversed_ = Reversed.apply  # kept under a name, as many models do


class Model(nn.Module):
    """Each kind once, the first one twice with other constants."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(4))
        self.scale = nn.Parameter(torch.tensor(0.1))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = Rounded.apply(self.layers[0](x), self.scale)
        x = reversed_(self.layers[1](x), 0.5)
        low, grown, above = Parted.apply(self.layers[2](x))
        x = reversed_(low * above + grown, 2.0)
        return (Written.apply(Idle.apply(self.layers[3](x))) - y).square().mean()


def gradients_of(model: nn.Module, inputs: tuple[Tensor, ...]) -> dict[str, Tensor]:
    model.zero_grad()
    model(*inputs).backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("size", [1, 4])
def test_stages_have_the_functions_own_gradients_at_every_batch_size(size: int) -> None:
    model = model_of(Model)
    pipe = pd2bw_fx.split(model, batch(size), cluster=2, num_stages=2, costs="analytic")

    assert pipe.verify(model).exact
    for other in (2, 5):
        inputs = batch(other)
        expected = gradients_of(model, inputs)
        first, second = (stage.module for stage in pipe.stages)
        first.zero_grad()
        second.zero_grad()
        named = dict(zip(("x", "y"), inputs, strict=True))
        handed = first(*(named[port.name] for port in pipe.programs[0].inputs))
        values = (handed,) if isinstance(handed, Tensor) else handed
        named |= dict(zip((port.name for port in pipe.programs[0].outputs), values, strict=True))
        second(*(named[port.name] for port in pipe.programs[1].inputs)).backward()
        found = {n: p.grad for stage in (first, second) for n, p in stage.named_parameters()}
        for name, gradient in expected.items():
            assert torch.equal(found[name], gradient), name


def test_what_was_saved_has_its_old_name_too() -> None:
    class Scaled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return Older.apply(super().forward(x), self.bias)  # type: ignore[no-any-return]

    model = nn.Sequential(Scaled(6, 6), Scaled(6, 6))
    pipe = pd2bw_fx.split(model, torch.randn(4, 6), cluster=2, costs="analytic")

    assert pipe.verify(model).exact


class Runs:
    """Of the forward below; a trace puts plain counters of a file back, and this it does not know."""

    count = 0


def count_a_run() -> None:
    Runs.count += 1


class Counted(torch.autograd.Function):
    """Multiplies by a number that a layer may set on the class before it calls it."""

    factor = 2.0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        count_a_run()
        ctx.factor = Counted.factor
        ctx.save_for_backward(x)
        return x * ctx.factor  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * ctx.factor * x  # type: ignore[no-any-return]


class Counting(nn.Module):
    def __init__(self, factors: Sequence[float]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in factors)
        self.factors = factors

    def forward(self, x: Tensor) -> Tensor:
        for layer, factor in zip(self.layers, self.factors, strict=True):
            Counted.factor = factor
            x = Counted.apply(layer(x))
        return x


def runs_in_a_split(factors: Sequence[float]) -> int:
    Runs.count = 0
    options = {"cluster": 2, "costs": "analytic", "check": False}
    pd2bw_fx.split(Counting(factors), torch.randn(4, 6), **options)  # type: ignore[arg-type]
    return Runs.count - len(factors)  # without the run of the model itself


def test_calls_that_are_alike_are_traced_once() -> None:
    assert runs_in_a_split((2.0, 2.0, 2.0, 2.0)) == runs_in_a_split((2.0,)) < runs_in_a_split((2.0, 3.0))


def test_calls_that_read_another_number_are_not_alike() -> None:
    torch.manual_seed(0)
    model = Counting((2.0, 3.0, 2.0))
    pipe = pd2bw_fx.split(model, torch.randn(4, 6), cluster=2, costs="analytic")

    assert pipe.verify(model).exact


@dataclass
class Setting:
    factor: float = 2.0


SETTING = Setting()


class Set(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.factor = SETTING.factor
        return x * ctx.factor  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * ctx.factor * 2  # type: ignore[no-any-return]


class SetInTurn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        for factor, layer in enumerate(self.layers, start=1):
            SETTING.factor = float(factor)
            x = Set.apply(layer(x))
        return x


def test_calls_that_read_an_object_are_traced_one_by_one() -> None:
    torch.manual_seed(0)
    model = SetInTurn()
    pipe = pd2bw_fx.split(model, torch.randn(4, 6), cluster=2, costs="analytic")

    assert pipe.verify(model).exact


def test_the_class_reads_as_its_author_wrote_it() -> None:
    pipe = pd2bw_fx.split(model_of(Model), batch(4), cluster=1, costs="analytic")

    source = pipe.stages[0].source
    assert (
        """
class Rounded(torch.autograd.Function):
    \"\"\"A forward and a backward of its own, from test_custom_functions.py:"""
        in source
    )
    assert "    def forward(ctx, x: Tensor, scale: Tensor) -> Tensor:\n" in source
    assert "        inside = (x / scale).abs() <= 8\n        ctx.save_for_backward(inside, x > 0)\n" in source
    assert "        inside, gt = ctx.saved_tensors\n" in source
    assert "(gradient * ~inside).sum() / gradient.shape[0]\n" in source
    assert "        ctx.mark_non_differentiable(above)\n" in source
    assert "return -0.5 * gradient\n" in source
    assert "return -2.0 * gradient\n" in source
    assert "x = Rounded.apply(self.layers[0](x), self.scale)" in source
    assert "low, grown, above = Parted.apply(self.layers[2](x))" in source


class Wrapped(torch.autograd.Function):
    """Adds a penalty's gradient to a loss's, as RWKV does on its logits."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(y)
        return loss

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        (y,) = ctx.saved_tensors
        factor = 0.5 / (y.shape[0] * y.shape[1])
        largest, ids = torch.max(y, -1, keepdim=True)
        gy = torch.zeros_like(y)
        kept = gy + 1
        gy.scatter_(-1, ids, largest * factor)
        return gradient, gy * kept


def test_a_backward_that_writes_in_place_keeps_its_names_and_lines() -> None:
    class WithPenalty(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            y = self.layers(x) - y
            return Wrapped.apply(y.square().mean(), y)

    pipe = pd2bw_fx.split(model_of(WithPenalty), batch(4), cluster=2, costs="analytic", check="full")

    assert (
        """
        (y,) = ctx.saved_tensors
        factor = 0.5 / torch.sym_float(y.shape[0] * y.shape[1])
        largest, ids = torch.max(y, dim=-1, keepdim=True)
        gy = torch.zeros_like(y)
        kept = gy + 1
        gy.scatter_(-1, ids, largest * factor)
        return gradient, gy * kept
"""
        in pipe.stages[1].source
    )


def test_custom_functions_train_in_a_pipeline_as_in_one_process() -> None:
    model = model_of(Model)
    pipe = pd2bw_fx.split(model, batch(4), cluster=2, num_stages=2, costs="analytic", recompute=True)
    batches = [batch(8 + 4 * number) for number in range(4)]

    def sgd(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.05)

    found = pipe.train_local(batches, optimizer=sgd, microbatches_per_update=4)

    expected = train_reference(model, batches, optimizer=sgd, microbatches_per_update=4, method="2bw")
    assert found.losses == pytest.approx(expected.losses, rel=1e-12)


def test_a_function_that_draws_draws_the_same_again(tmp_path: Any) -> None:
    class Drawing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            x = nn.functional.dropout(Noisy.apply(self.layers[0](x)), 0.5)
            return (self.layers[1](Noisy.apply(x)) - y).square().mean()

    batches = [batch(4) for _ in range(3)]
    losses = []
    for stages, recompute in ((1, False), (2, False), (2, True)):
        model = model_of(Drawing)
        pipe = pd2bw_fx.split(
            model, batch(4), cluster=stages, num_stages=stages, costs="analytic", recompute=recompute
        )
        assert sum(operator.is_random for operator in pipe.graph.operators.values()) == 3
        pipe.save(tmp_path / f"{stages}{recompute}")
        pipe = pd2bw_fx.load(tmp_path / f"{stages}{recompute}")
        trained = pipe.train_local(
            batches, optimizer=lambda p: torch.optim.SGD(p, lr=0.05), microbatches_per_update=2
        )
        losses.append(trained.losses)

    assert losses[0] == pytest.approx(losses[1], rel=1e-12)
    assert losses[1] == losses[2]


class Assigned(torch.autograd.Function):
    """Puts a value into scratch memory behind autograd's back, as the solvers of torchdiffeq do."""

    @staticmethod
    def forward(ctx: Any, scratch: Tensor, value: Tensor, index: Any) -> Tensor:
        ctx.index = index
        scratch.data[index] = value
        return scratch

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        return gradient, gradient.data[ctx.index], None


def test_data_in_a_function_is_detached_read_or_written() -> None:
    class Assigning(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            hidden = self.layer(x)
            scratch = torch.empty(*hidden.shape, 2, dtype=x.dtype)
            for number, value in enumerate((hidden.tanh(), hidden.sigmoid())):
                scratch = Assigned.apply(scratch, value, (..., number))
            return scratch.square().mean()

    model = model_of(Assigning)
    pipe = pd2bw_fx.split(model, batch(4)[:1], cluster=1, costs="analytic", check="full")

    assert pipe.trace_report.tracer == "export"
    assert pipe.verify(model, example={"x": batch(7)[0]}).exact


class double(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 5


def test_names_of_classes_values_and_functions_do_not_meet() -> None:
    class Double(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            double_ = double.apply(x)
            return double_ * double_

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 6)
            self.inner = Double()

        def forward(self, x: Tensor) -> Tensor:
            Double = self.inner(self.layer(x))
            return double.apply(Double).sum()

    hostile = type('Evil:\n    boom()\nclass "', (Reversed,), {})

    class Other(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = hostile.apply(self.layer(x), 1.0)
            return result.sum()

    for kind in (Model, Other):
        model = model_of(kind)
        pipe = pd2bw_fx.split(model, batch(4)[:1], cluster=1, costs="analytic")
        assert pipe.verify(model).exact
        assert "boom()" not in pipe.stages[0].source
