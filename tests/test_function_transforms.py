"""`torch.func.grad`, `grad_and_value` and `vjp` in a forward are operators of the stages."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, grad_and_value, vjp, vmap

import pd2bw_fx
from pd2bw_fx.errors import TraceError
from tests.trained import assert_trained_by_the_rule


class Field(nn.Module):
    """A scalar field of points (batch, 3)."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1)
        )

    def total(self, x: Tensor) -> Tensor:
        total: Tensor = self.layers(x).sum()
        return total


class Slope(Field):
    def forward(self, x: Tensor) -> Tensor:
        slopes, total = grad_and_value(self.total)(x)
        return (slopes - x).square().mean() + total.square()


class Curvature(Field):
    def forward(self, x: Tensor) -> Tensor:
        steepness = grad(lambda points: grad(self.total)(points).square().sum())(x)
        return (steepness + x).square().mean()


class Product(Field):
    def forward(self, x: Tensor) -> Tensor:
        values, backward = vjp(self.layers, x)
        (found,) = backward(values)
        return (found - x).square().mean()


class Step(Field):
    """Adapts its weights to the batch by a step that the loss is differentiated through."""

    def forward(self, x: Tensor) -> Tensor:
        def loss(weights: dict[str, Tensor], points: Tensor) -> tuple[Tensor, Tensor]:
            values = functional_call(self.layers, weights, (points,))
            return values.square().mean(), values

        weights = dict(self.layers.named_parameters())
        slopes, values = grad(loss, has_aux=True)(weights, x)
        adapted = {name: weight - 0.1 * slopes[name] for name, weight in weights.items()}
        return loss(adapted, x)[0] + 0.1 * values.square().mean()


class Constant(Field):
    """No gradient flows through the slope."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            slopes = grad(self.total)(x)
        result: Tensor = self.layers(x + slopes).square().mean()
        return result


KINDS = (Slope, Curvature, Product, Step, Constant)


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_trained_as_the_rule_says(kind: type[Field]) -> None:
    torch.manual_seed(0)
    model = kind().double()
    batches = [torch.randn(6, 3, dtype=torch.float64) for _ in range(3)]
    pipe = pd2bw_fx.split(
        model, batches[0], cluster=2, num_stages=2, costs="analytic", check="full", profile_cache=False
    )

    assert pipe.graph.batch_symbol == "batch"
    assert_trained_by_the_rule(model, pipe, batches)


def test_what_a_map_differentiates_is_refused_with_its_line() -> None:
    class Mapped(Field):
        def forward(self, x: Tensor) -> Tensor:
            return vmap(grad(self.total))(x).square().mean()

    with pytest.raises(TraceError, match=r"\(test_function_transforms.py:\d+: return vmap\(grad\(self.total"):
        pd2bw_fx.split(Mapped(), torch.randn(4, 3), cluster=1, costs="analytic")
