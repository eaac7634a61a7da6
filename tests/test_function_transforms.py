"""What the transforms of torch.func compute in a forward is operators of the stages."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.functional import hessian as hessian_of
from torch.func import functional_call, grad, grad_and_value, jacfwd, jacrev, jvp, vjp

import pd2bw_fx
from pd2bw_fx.errors import TraceError
from tests.fields import Field
from tests.trained import assert_trained_by_the_rule


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


class Jacobian(Field):
    """Of weights, outside of a map: what is mapped here is the backward."""

    def forward(self, x: Tensor) -> Tensor:
        correlation = jacrev(lambda weight: torch.tanh(weight @ weight.t()).diagonal())(self.layers[2].weight)
        columns = jacfwd(lambda weight: torch.tanh(weight).sum(0))(self.layers[0].weight)
        return self.total(x).square() * (correlation.square().mean() + columns.square().mean())


class Displacement(Field):
    """A flow's change along a path, as MeanFlow's loss has it."""

    def forward(self, x: Tensor) -> Tensor:
        velocity, change = jvp(self.layers, (x,), (x.flip(0),))
        (_, bent) = jvp(grad(self.total), (x,), (torch.ones_like(x),))
        return (velocity - (x - change).detach()).square().mean() + bent.square().mean()


class Vectorized(Field):
    """torch.autograd's own way to map over gradients."""

    def forward(self, x: Tensor) -> Tensor:
        bias, points = self.layers[0].bias, x.clone().requires_grad_()
        bends = hessian_of(lambda b: (torch.tanh(b) ** 3).sum(), bias, create_graph=True, vectorize=True)
        hidden = self.layers[:2](points)
        seeds = torch.eye(16, dtype=x.dtype)[:, None, :].expand(16, x.shape[0], 16)
        (slopes,) = torch.autograd.grad(hidden, points, seeds, is_grads_batched=True, create_graph=True)
        return self.total(x).square() * bends.square().mean() + slopes.square().mean()


KINDS = (Slope, Curvature, Product, Step, Constant, Jacobian, Displacement, Vectorized)


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_with_function_transforms_is_trained_by_the_rule(kind: type[Field]) -> None:
    torch.manual_seed(0)
    model = kind().double()
    batches = [torch.randn(6, 3, dtype=torch.float64) for _ in range(3)]
    pipe = pd2bw_fx.split(
        model, batches[0], cluster=2, num_stages=2, costs="analytic", check="full", profile_cache=False
    )

    assert pipe.graph.batch_symbol == "batch"
    assert_trained_by_the_rule(model, pipe, batches)


def test_dual_numbers_are_refused_with_their_line() -> None:
    class Dual(Field):
        def forward(self, x: Tensor) -> Tensor:
            with forward_ad.dual_level():
                result = self.layers(forward_ad.make_dual(x, torch.ones_like(x)))
                slope: Tensor = forward_ad.unpack_dual(result).tangent
            return slope.square().mean()

    with pytest.raises(TraceError, match=r"dual numbers \(test_function_transforms.py:\d+: with .*func\.jvp"):
        pd2bw_fx.split(Dual(), torch.randn(4, 3), cluster=1, costs="analytic")


class Adversary(Field):
    """Calls its layers with weights that are given to them, and then with their own."""

    def forward(self, x: Tensor) -> Tensor:
        fixed = {name: weight.detach() for name, weight in self.layers.named_parameters()}
        deceived = functional_call(self.layers, fixed, (x,)).square().mean()
        return deceived + self.layers(x.detach()).exp().mean() + 0.5 * self.layers(x - 1).sin().mean()


def test_layers_that_are_given_weights_and_called_with_their_own_have_a_method_for_each() -> None:
    torch.manual_seed(0)
    model = Adversary().double()
    batches = torch.randn(3, 4, 3, dtype=torch.float64)

    pipe = pd2bw_fx.split(model, batches[0, :2], cluster=1, costs="analytic", method="1f1b")

    assert "forward_2(" in pipe.stages[0].source
    assert torch.equal(pipe.run(batches[0])["loss"], model(batches[0]))
