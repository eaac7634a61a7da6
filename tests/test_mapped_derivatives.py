"""What a map in a forward differentiates is operators on whole batches, for any number of samples."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, grad_and_value, hessian, jacfwd, jacrev, vmap

import pd2bw_fx
from pd2bw_fx.passes.trace.patches.batch_rules import use_batch_rules_for_any_size
from tests.fields import Field
from tests.trained import assert_trained_by_the_rule

Function = Callable[..., Tensor]


class Slopes(Field):
    def forward(self, x: Tensor) -> Tensor:
        return vmap(grad(self.at))(x).square().mean()


class Laplacian(Field):
    def forward(self, x: Tensor) -> Tensor:
        sums = vmap(lambda point: torch.trace(hessian(self.at)(point)))(x)
        return (sums - self.at(x)).square().mean()


class Constants(Field):
    """What is detached, and what is computed without gradients, is no part of a slope."""

    def at(self, point: Tensor) -> Tensor:
        with torch.no_grad():
            scale = super().at(point)
        value = super().at(point)
        return value * value.detach() * scale + value.data

    def forward(self, x: Tensor) -> Tensor:
        return (vmap(grad(self.at))(x) + x).square().mean()


class WithinGrad(Field):
    def forward(self, x: Tensor) -> Tensor:
        return grad(lambda points: vmap(grad(self.at))(points).square().sum())(x).square().mean()


class Nested(Field):
    def forward(self, x: Tensor) -> Tensor:
        scaled = x.unsqueeze(1) * torch.tensor([[1.0], [2.0]], dtype=x.dtype)
        return vmap(vmap(grad(self.at)))(scaled).square().mean()


class Flow(nn.Module):
    """Residuals of a flow's equations; x, y and t are arguments of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(3, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 3)
        )

    def state(self, x: Tensor, y: Tensor, t: Tensor) -> Tensor:
        result: Tensor = self.layers(torch.stack([x, y, t]))
        return result

    def residuals(self, x: Tensor, y: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        u = self.state(x, y, t)
        in_x, in_y, in_t = jacrev(self.state, argnums=(0, 1, 2))(x, y, t)
        bent = jacfwd(jacrev(self.state, 0), 0)(x, y, t) + jacfwd(jacrev(self.state, 1), 1)(x, y, t)
        carried = in_t[:2] + u[0] * in_x[:2] + u[1] * in_y[:2]
        return carried + torch.cat([in_x[2:], in_y[2:]]) - 0.01 * bent[:2], in_x[0] + in_y[1]

    def forward(self, points: Tensor) -> Tensor:
        momentum, divergence = vmap(self.residuals)(*points.unbind(1))
        return momentum.square().mean() + divergence.square().mean()


class Memory(nn.Module):
    """Weights that take a step of their own on each sample, and read it with them."""

    def __init__(self) -> None:
        super().__init__()
        self.read = nn.Linear(3, 24)
        self.inner = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.GELU(), nn.Linear(8, 8))

    def forward(self, x: Tensor) -> Tensor:
        weights = dict(self.inner.named_parameters())

        def loss(weights: dict[str, Tensor], key: Tensor, value: Tensor) -> Tensor:
            return F.mse_loss(functional_call(self.inner, weights, (key,)), value)

        query, key, value = self.read(x).chunk(3, -1)
        slopes, losses = vmap(grad_and_value(loss), (None, 0, 0))(weights, key, value)
        adapted = {name: weights[name] - 0.1 * slope for name, slope in slopes.items()}
        found = vmap(lambda weights, query: functional_call(self.inner, weights, (query,)))(adapted, query)
        return found.square().mean() + losses.mean()


KINDS: Sequence[type[nn.Module]] = (Slopes, Laplacian, Constants, WithinGrad, Nested, Flow, Memory)


def split(kind: type[nn.Module], dtype: torch.dtype = torch.float64) -> tuple[nn.Module, pd2bw_fx.Pipeline]:
    torch.manual_seed(0)
    model = kind().to(dtype)
    example = torch.randn(6, 3, dtype=dtype)
    return model, pd2bw_fx.split(
        model, example, cluster=2, num_stages=2, costs="analytic", check="full", profile_cache=False
    )


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_with_mapped_derivatives_is_trained_by_the_rule(kind: type[nn.Module]) -> None:
    model, pipe = split(kind)
    batches = [torch.randn(6, 3, dtype=torch.float64) for _ in range(3)]

    assert pipe.graph.batch_symbol == "batch"
    assert_trained_by_the_rule(model, pipe, batches)


@pytest.mark.parametrize("kind", [Laplacian, Memory])
def test_a_model_with_mapped_derivatives_is_exported_with_them(kind: type[nn.Module], tmp_path: Path) -> None:
    _, pipe = split(kind, torch.float32)

    manifest = pipe.export_onnx(tmp_path / "onnx")

    assert manifest["compared_with"] == "the original model"
    assert max(manifest["largest_differences_from_model"].values()) < 1e-5


def test_layers_of_one_sample_are_called_with_whole_batches() -> None:
    _, pipe = split(Laplacian)

    source = "".join(program.source for program in pipe.programs)
    assert re.search(r"tanh = self\.layers\S+\(x\)\.tanh\(\)  # fields.py:\d+", source)
    assert "sums = self.layers" not in source  # which is what the author calls the traces
    assert ".unsqueeze(1).view(" not in source


def test_a_convolution_of_one_sample_is_traced_at_the_examples_batch_size() -> None:
    """torch has no rule for it that leaves the size open."""

    class Pictures(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Conv2d(1, 4, 3), nn.Tanh(), nn.Flatten(), nn.Linear(64, 1))

        def forward(self, x: Tensor) -> Tensor:
            return vmap(grad(lambda picture: self.layers(picture[None]).sum()))(x).square().mean()

    pipe = pd2bw_fx.split(Pictures().double(), torch.randn(4, 1, 6, 6).double(), cluster=2, costs="analytic")

    assert pipe.graph.batch_symbol is None
    assert "traced at batch size 4 alone" in str(pipe.trace_report)


def drawn(*sizes: int) -> Tensor:
    return torch.randn(sizes, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(sizes)))


def _normed(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return F.layer_norm(x, weight.shape, weight, bias).sin().sum()


ONE, ROW, ROWS = drawn(6), drawn(5, 6), drawn(5, 4, 6)
RULES: dict[str, tuple[Function, tuple[Tensor, ...], tuple[int | None, ...]]] = {
    "layer_norm, all": (_normed, (ROW, ROW + 1, ROW + 2), (0, 0, 0)),
    "layer_norm, the operand": (_normed, (ROW.t(), ONE, ONE + 1), (1, None, None)),
    "layer_norm, the weight": (_normed, (ONE, ROW, ONE + 1), (None, 0, None)),
    "layer_norm, the bias": (_normed, (ONE, ONE + 1, ROW), (None, None, 0)),
    "layer_norm, rows": (_normed, (ROWS, ROW, ROW + 1), (0, 0, 0)),
    "cat, one shared": (lambda x, y: torch.cat([x, x * y, ONE]).prod(), (ROW, ROW + 1), (0, 0)),
    "cat, nothing first": (lambda x: torch.cat([x.new_empty(0), x, x.sin()]).prod(), (ROWS,), (0,)),
    "cat, from behind": (lambda x: torch.cat([x, x.sin()], -1).prod(), (ROWS,), (1,)),
    "gelu": (lambda x: F.gelu(x).square().sum(), (ROW,), (0,)),
    "gelu, tanh": (lambda x: F.gelu(x, approximate="tanh").square().sum(), (ROW,), (0,)),
    "glu": (lambda x: F.glu(x, 0).sin().sum(), (ROWS,), (0,)),
    "glu, from behind": (lambda x: F.glu(x).sin().sum(), (ROWS,), (0,)),
    "slice": (lambda x: x[1:3, ::2].sin().sum(), (ROWS,), (0,)),
    "slice, from behind": (lambda x: x.narrow(-1, 2, 3).sin().sum(), (ROWS,), (0,)),
}


@pytest.mark.parametrize("name", RULES)
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_rules_for_open_sizes_are_as_torch_maps(name: str) -> None:
    function, operands, dims = RULES[name]
    numbers = torch.tensor([1.0, 2.0], dtype=torch.float64)
    for transform in (grad, hessian):
        for place in range(len(operands)):
            mapped = vmap(transform(function, argnums=place), in_dims=dims)

            def twice(number: Tensor, mapped: Function = mapped) -> Tensor:
                return mapped(*(operand * number for operand in operands))

            expected = mapped(*operands), vmap(twice)(numbers)
            with use_batch_rules_for_any_size():
                found = mapped(*operands), vmap(twice)(numbers)
            torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
