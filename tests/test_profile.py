"""Costs: what is counted is checked against autograd and torch itself; times only for their order."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pd2bw_fx.cluster import Device
from pd2bw_fx.errors import InputError
from pd2bw_fx.models import build
from pd2bw_fx.passes.normalise import normalise
from pd2bw_fx.passes.profile import profile
from pd2bw_fx.passes.trace import trace

CPU = Device("cpu:0", 2**33)


class Uneven(nn.Module):
    """One linear layer has a thousand times the arithmetic of the other."""

    def __init__(self) -> None:
        super().__init__()
        self.small = nn.Linear(16, 512)
        self.large = nn.Linear(512, 4096)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.large(self.small(x))).mean()


def saved_by_autograd(model: nn.Module, inputs: tuple[Tensor, ...]) -> int:
    """Bytes that one forward of the eager model keeps, each storage once, parameters not counted."""
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(*inputs)
    assert loss.requires_grad
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@pytest.mark.parametrize("name", ["mlp", "gpt", "bert", "vgg", "moe"])
@pytest.mark.parametrize("method", ["measured", "analytic"])
def test_saved_bytes_are_what_autograd_saves(name: str, method: str) -> None:
    torch.manual_seed(0)
    model = build(name)
    inputs = model.example_inputs(batch_size=8)  # type: ignore[operator]
    traced = trace(model, inputs, {})

    costs = profile(normalise(traced), traced.examples, device=CPU, method=method)  # type: ignore[arg-type]

    saved = sum(cost.saved_bytes for cost in costs.operators.values())
    assert saved == pytest.approx(saved_by_autograd(model, inputs), rel=0.03)
    assert costs.origin == method


def test_output_bytes_are_the_tensors_bytes() -> None:
    traced = trace(Uneven(), (torch.randn(8, 16),), {})
    graph = normalise(traced)

    costs = profile(graph, traced.examples, device=CPU, method="analytic")

    for name, operator in graph.operators.items():
        assert costs.operators[name].output_bytes == sum(spec.num_bytes for spec in operator.outputs)


@pytest.mark.parametrize("method", ["measured", "analytic"])
def test_the_larger_operator_takes_longer_forward_and_backward(method: str) -> None:
    traced = trace(Uneven(), (torch.randn(64, 16),), {})
    graph = normalise(traced)

    costs = profile(graph, traced.examples, device=CPU, method=method)  # type: ignore[arg-type]

    small, large = (costs.operators[n] for n, o in graph.operators.items() if o.parameters)
    assert large.forward_s > small.forward_s
    assert large.backward_s > small.backward_s


def test_measured_times_add_up_to_the_whole_models() -> None:
    traced = trace(Uneven(), (torch.randn(64, 16),), {})
    graph = normalise(traced)
    calls = []
    assert traced.call is not None
    call = traced.call

    def whole(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        calls.append(1)
        return dict(call(inputs))

    costs = profile(graph, traced.examples, device=CPU, method="measured", whole=whole)  # type: ignore[arg-type]

    assert len(calls) >= 3
    assert costs.forward_s > 0
    assert costs.backward_s > 0


def test_measuring_leaves_buffers_gradients_and_random_state_alone() -> None:
    model = build("resnet")
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    traced = trace(model, model.example_inputs(), {})  # type: ignore[operator]
    state = torch.get_rng_state()

    profile(normalise(traced), traced.examples, device=CPU, method="measured", whole=traced.call)

    assert torch.equal(torch.get_rng_state(), state)
    for name, buffer in model.named_buffers():
        assert torch.equal(buffer, before[name]), name
    assert all(parameter.grad is None for parameter in model.parameters())


def test_costs_without_inputs_say_that_they_are_estimates() -> None:
    traced = trace(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 400)), None, None)
    graph = normalise(traced)

    costs = profile(graph, None, device=CPU)

    assert costs.origin == "parameters"
    assert "example_args" in costs.note
    small, large = costs.operators.values()
    assert large.forward_s > small.forward_s


def test_a_device_that_is_not_here_is_estimated_and_said_to_be() -> None:
    traced = trace(Uneven(), (torch.randn(8, 16),), {})
    elsewhere = Device("tpu:0", 2**33, kind="tpu")

    costs = profile(normalise(traced), traced.examples, device=elsewhere)

    assert costs.origin == "analytic"
    assert "estimates" in costs.note


@pytest.mark.parametrize(
    ("method", "kind", "said"), [("guess", "cpu", "unknown"), ("measured", "tpu", "no device of kind 'tpu'")]
)
def test_what_cannot_be_measured_is_refused(method: str, kind: str, said: str) -> None:
    traced = trace(Uneven(), (torch.randn(8, 16),), {})
    device = Device("x", 2**33, kind=kind)

    with pytest.raises(InputError, match=said):
        profile(normalise(traced), traced.examples, device=device, method=method)  # type: ignore[arg-type]
