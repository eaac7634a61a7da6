"""A backward in two halves gives the gradients that one backward gives."""

from __future__ import annotations

import random

import torch
from torch import Tensor, nn
from torch.autograd.graph import get_gradient_edge
from torch.nn import functional as F

from pd2bw_fx.runtime.split_backward import input_half

OPERATIONS = {
    "add": lambda a, b: (a + b,),
    "mul": lambda a, b: (a * b,),
    "matmul": lambda a, b: (a @ b / 4,),
    "tanh": lambda a, _: (torch.tanh(a),),
    "normalize": lambda a, _: (F.normalize(a, dim=1),),
    "t": lambda a, _: (a.t(),),
    "halves": lambda a, _: tuple(torch.cat([half, half]) for half in a.split(2)),
    "unbind": lambda a, _: (torch.unbind(a.reshape(2, 8))[1].view(2, 4).repeat(2, 1),),
    "view": lambda a, _: (a.reshape(2, 8).view(4, 4),),
    "linear": lambda a, b: (F.linear(a, b, b[0]),),
    "in place": lambda a, b: ((a + 0).mul_(b),),
    "detached": lambda a, b: (a * b.detach(),),
}


def drawn_stage(seed: int) -> tuple[list[Tensor], list[nn.Parameter], list[Tensor]]:
    """Inputs, weights and outputs, some of them of weights alone, of a graph of up to nine operations."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    inputs = [torch.randn(4, 4, dtype=torch.float64, requires_grad=True) for _ in range(draw.randint(1, 2))]
    weights = [nn.Parameter(torch.randn(4, 4, dtype=torch.float64)) for _ in range(draw.randint(1, 3))]
    values = [*inputs, *weights]
    for _ in range(draw.randint(2, 9)):
        values += OPERATIONS[draw.choice(list(OPERATIONS))](draw.choice(values), draw.choice(values))
    made = [value for value in values[len(inputs) :] if value.requires_grad]
    outputs = [draw.choice(made) for _ in range(draw.randint(1, 4))]
    return inputs, weights, outputs + inputs[: draw.random() < 0.2]


def test_halves_of_any_stage_give_the_gradients_of_one_backward() -> None:
    for seed in range(200):
        inputs, weights, outputs = drawn_stage(seed)
        upstream = [torch.randn_like(output) for output in outputs]
        leaves = [*inputs, *weights]
        expected = torch.autograd.grad(outputs, leaves, upstream, retain_graph=True, allow_unused=True)

        half = input_half([get_gradient_edge(output) for output in outputs], upstream, inputs)
        of_inputs = [tensor.grad for tensor in inputs]
        half.run()

        found = [*of_inputs, *(weight.grad for weight in weights)]
        for gradient, known in zip(found, expected, strict=True):
            torch.testing.assert_close(gradient, known, msg=lambda text, seed=seed: f"seed {seed}: {text}")


def test_a_weights_gradient_is_whole_where_an_output_made_of_it_alone_is_used_too() -> None:
    torch.manual_seed(0)
    weight, x = nn.Parameter(torch.randn(4, 4)), torch.randn(3, 4, requires_grad=True)
    rows = F.normalize(weight, dim=1)
    outputs = [torch.tanh(x @ rows), rows]
    upstream = [torch.randn_like(output) for output in outputs]
    (expected,) = torch.autograd.grad(outputs, [weight], upstream, retain_graph=True)

    input_half([get_gradient_edge(output) for output in outputs], upstream, [x]).run()

    torch.testing.assert_close(weight.grad, expected)


def test_gradients_of_a_backward_in_halves_lie_as_their_parameters() -> None:
    """einsum's is a transposed matrix, which a fused optimizer would take for another one."""
    x, weight = torch.randn(3, 6, requires_grad=True), torch.randn(4, 6, requires_grad=True)
    made = torch.einsum("bc,dc->bd", x * 2, weight)

    input_half([get_gradient_edge(made)], [torch.ones_like(made)], [x]).run()

    assert weight.grad is not None
    assert weight.grad.stride() == weight.stride()
    torch.testing.assert_close(weight.grad, 2 * x.detach().sum(0).expand(4, 6))


def test_gradients_of_a_backward_in_halves_are_each_parameter_s_own() -> None:
    x = torch.zeros(3, requires_grad=True)
    first, second = (nn.Parameter(torch.zeros(3)) for _ in range(2))
    edge = get_gradient_edge(x * 2 + first + second)
    upstream = torch.ones(()).expand(3)

    input_half([edge], [upstream], [x]).run()
    first.grad.mul_(0.5)  # as clipping does

    assert first.grad.tolist() == [0.5] * 3
    assert second.grad.tolist() == [1.0] * 3
    assert x.grad.tolist() == [2.0] * 3
    assert upstream.tolist() == [1.0] * 3
