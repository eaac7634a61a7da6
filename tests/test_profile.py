"""Costs: what is counted is checked against autograd and torch itself; times only for their order."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import pd2bw_fx
from pd2bw_fx.device import Device
from pd2bw_fx.errors import InputError
from pd2bw_fx.graph import OperatorGraph
from pd2bw_fx.models import build
from pd2bw_fx.models.gpt import GPT, GPTConfig
from pd2bw_fx.passes.normalise import normalise
from pd2bw_fx.passes.profile import measured, profile
from pd2bw_fx.passes.profile.analytic import LAUNCH_S
from pd2bw_fx.passes.profile.measured import Stopwatch
from pd2bw_fx.passes.profile.walk import Walk
from pd2bw_fx.passes.trace import trace

CPU = Device("cpu:0", 2**33)
METHODS = ("measured", "analytic")


class Uneven(nn.Module):
    """One linear layer has a thousand times the arithmetic of the other."""

    def __init__(self) -> None:
        super().__init__()
        self.small = nn.Linear(16, 512)
        self.large = nn.Linear(512, 4096)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.large(self.small(x))).mean()


def saved_by_autograd(model: nn.Module, inputs: tuple[Tensor, ...]) -> int:
    """Bytes that one forward of the eager model keeps, each storage once, parameters and buffers left out."""
    own = {tensor.untyped_storage().data_ptr() for tensor in (*model.parameters(), *model.buffers())}
    kept: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(*inputs)
    assert loss.requires_grad
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


@functools.cache
def of_our_own(name: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    model = build(name)
    return model, model.example_inputs(batch_size=8)  # type: ignore[operator]


@functools.cache
def traced_once(name: str) -> tuple[OperatorGraph, Mapping[str, Tensor]]:
    traced = trace(*of_our_own(name), {})
    return normalise(traced), traced.examples


@pytest.mark.parametrize(
    ("name", "method"),
    [
        *((name, "analytic") for name in ("mlp", "gpt", "bert", "vgg", "moe", "resnet")),
        *((name, "measured") for name in ("gpt", "resnet")),
        ("encdec", "measured"),  # a fake LSTM keeps less than a real one, which its costs' note says
    ],
)
def test_saved_bytes_are_what_autograd_saves(name: str, method: str) -> None:
    model, inputs = of_our_own(name)
    graph, examples = traced_once(name)

    costs = profile(graph, examples, device=CPU, method=method)  # type: ignore[arg-type]

    saved = sum(cost.saved_bytes for cost in costs.operators.values())
    assert saved == pytest.approx(saved_by_autograd(model, inputs), rel=0.03)
    assert costs.origin == method


def test_estimates_take_one_run_of_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[str] = []
    plain = Walk.run_node
    monkeypatch.setattr(Walk, "run_node", lambda walk, node: (runs.append(node.name), plain(walk, node))[1])

    profile(*traced_once("mlp"), device=CPU, method="analytic")

    assert runs
    assert len(runs) == len(set(runs))


def test_output_bytes_are_the_tensors_bytes() -> None:
    traced = trace(Uneven(), (torch.randn(8, 16),), {})
    graph = normalise(traced)

    costs = profile(graph, traced.examples, device=CPU, method="analytic")

    for name, operator in graph.operators.items():
        assert costs.operators[name].output_bytes == sum(spec.num_bytes for spec in operator.outputs)


@pytest.mark.parametrize("method", METHODS)
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


class _Normed(nn.Module):
    """An embedding whose forward writes its weight, and statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.norm = nn.Embedding(5, 4, max_norm=0.1), nn.BatchNorm1d(4)

    def forward(self, words: Tensor) -> Tensor:
        return self.norm(self.words(words)).square().sum()


def test_measuring_leaves_weights_buffers_gradients_and_random_state_alone() -> None:
    model = _Normed()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    traced = trace(model, (torch.arange(4),))
    state = torch.get_rng_state()

    profile(normalise(traced), traced.examples, device=CPU, method="measured", whole=traced.call)

    assert torch.equal(torch.get_rng_state(), state)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    assert all(parameter.grad is None for parameter in model.parameters())


def test_operators_too_short_to_be_timed_alone_share_the_time_they_take_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(measured._SHORT_S, "cpu", 1.0)  # on any machine, however slow
    traced = trace(nn.Sequential(*(nn.ReLU() for _ in range(40))), (torch.randn(4, 4),), {})
    graph = normalise(traced)
    timed: list[int] = []

    class Counting(Stopwatch):
        def end_pass(self) -> None:
            timed.append(len(self._forwards))
            super().end_pass()

    with Counting(graph, torch.device("cpu")) as stopwatch:
        costs = Walk(graph, stopwatch).run(traced.examples)

    assert timed[:2] == [40, 40]
    assert max(timed[2:]) == 0  # none before the end of the pass: the forty are one group
    assert len({cost.forward_s for cost in costs.values()}) == 1  # equal operators take equally long
    assert all(0 < cost.forward_s < 1.0 for cost in costs.values())


def test_what_was_traced_on_one_device_is_measured_on_another(monkeypatch: pytest.MonkeyPatch) -> None:
    class Places(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            with torch.autocast(x.device.type, enabled=False):
                x = self.linear(x)
            return (x + torch.arange(4, device=x.device)).mean()

    entered: list[str] = []

    class Recorded(torch.autocast):
        def __init__(self, device_type: str, *args: Any, **kwargs: Any) -> None:
            entered.append(device_type)
            super().__init__("cpu", *args, **kwargs)

    traced = trace(Places(), (torch.randn(4, 4),), {})
    graph = normalise(traced)
    monkeypatch.setitem(measured._SHORT_S, "meta", 50e-6)
    monkeypatch.setattr(torch, "autocast", Recorded)

    with Stopwatch(graph, torch.device("meta")) as stopwatch:
        costs = Walk(graph, stopwatch).run(traced.examples)

    assert costs.keys() == graph.operators.keys()
    assert {*entered} == {"meta"}


def test_workspace_holds_the_gradients_that_are_added_to_those_there_are() -> None:
    traced = trace(Uneven(), (torch.randn(8, 16),), {})
    graph = normalise(traced)

    costs = profile(graph, traced.examples, device=CPU, method="analytic")

    large = next(n for n, o in graph.operators.items() if "large.weight" in o.parameters)
    results, operands, parameters = 8 * 4096, 8 * 512, 4096 * 512 + 4096
    assert costs.operators[large].workspace_bytes == 4 * (results + operands + parameters)


def flops_of(model: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[float, float]:
    traced = trace(model, inputs, {})
    return flops(normalise(traced), traced.examples)


def flops(graph: OperatorGraph, examples: Mapping[str, Tensor]) -> tuple[float, float]:
    """Forward and backward operations as the analytic costs have them: seconds at one operation a second."""
    counting = Device("counting", 2**33, flops_per_s=1.0, memory_bytes_per_s=1e30)
    costs = profile(graph, examples, device=counting, method="analytic")
    launches_s = LAUNCH_S * len(costs.operators)
    return costs.forward_s - launches_s, costs.backward_s - launches_s


@pytest.mark.parametrize("name", ["mlp", "gpt", "vgg", "resnet"])
def test_analytic_costs_count_the_operations_that_torch_counts(name: str) -> None:
    model, inputs = of_our_own(name)
    with FlopCounterMode(display=False) as counter:
        loss = model(*inputs)
        forward = counter.get_total_flops()
        loss.backward()

    assert flops(*traced_once(name)) == pytest.approx(
        (forward, counter.get_total_flops() - forward), abs=0.01
    )


def test_fused_attention_and_lstm_count_though_torch_has_no_formula_for_them() -> None:
    (bert, inputs), encdec = of_our_own("bert"), nn.LSTM(12, 20, batch_first=True)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        bert(*inputs)

    attention, _ = flops(*traced_once("bert"))
    recurrent, _ = flops_of(encdec, (torch.randn(3, 7, 12),))

    assert attention == pytest.approx(counter.get_total_flops(), abs=0.01)
    assert recurrent == pytest.approx(2 * 3 * 7 * 4 * 20 * (12 + 20), abs=0.01)


@pytest.mark.parametrize(
    "convolution",
    [
        nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False),
        nn.Conv2d(8, 12, 3, stride=2, groups=4, bias=False),
        nn.ConvTranspose2d(8, 12, 3, stride=2, groups=4, bias=False),
        nn.ConvTranspose2d(8, 12, 3, bias=False),
    ],
)
def test_the_backward_of_a_convolution_has_twice_its_arithmetic_in_groups_too(convolution: nn.Module) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.convolution = nn.Parameter(torch.ones(8, 1, 1)), convolution

        def forward(self, image: Tensor) -> Tensor:
            return self.convolution(image * self.scale).sum()

    forward, backward = flops_of(Scaled(), (torch.randn(2, 8, 9, 9),))

    assert forward > 0
    assert backward == pytest.approx(2 * forward, abs=0.01)


def test_an_estimate_says_what_is_untraced_and_not_counted() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    pd2bw_fx.untraced(model[0], name="Own", returns=torch.empty_like)

    pipe = pd2bw_fx.split(model, torch.randn(3, 4), cluster=1, costs="analytic", check=False)

    assert "what is untraced (Own) is not run for them" in pipe.costs.note


def test_a_model_without_values_is_estimated_and_cannot_be_measured() -> None:
    with torch.device("meta"):
        model = GPT(GPTConfig(50257, sequence_length=512, num_layers=4, num_heads=16, width=2048))
        inputs = (torch.zeros(2, 512, dtype=torch.long), torch.zeros(2, 512, dtype=torch.long))
    traced = trace(model, inputs, {})
    graph = normalise(traced)

    costs = profile(graph, traced.examples, device=CPU)

    assert costs.origin == "analytic"
    # 6 operations a parameter and token (arXiv 2001.08361, section 2.1), and attention's few besides.
    expected = 6 * sum(p.numel() for p in model.parameters()) * 2 * 512
    assert (costs.forward_s + costs.backward_s) * CPU.flops_per_s == pytest.approx(expected, rel=0.1)
    with pytest.raises(InputError, match="hold no values"):
        profile(graph, traced.examples, device=CPU, method="measured")


@pytest.mark.parametrize("method", METHODS)
def test_layers_that_write_into_their_input_can_be_profiled_and_leave_it_as_it_was(method: str) -> None:
    layers = (nn.ReLU(inplace=True), nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True))
    model, x = nn.Sequential(*layers), torch.randn(4, 8)
    traced = trace(model, (x,), {}, tracer="fx")
    graph = normalise(traced)
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    example = {name: tensor.clone() for name, tensor in traced.examples.items()}

    costs = profile(graph, traced.examples, device=CPU, method=method)  # type: ignore[arg-type]

    assert all(cost.forward_s >= 0 for cost in costs.operators.values())
    assert costs.backward_s > 0
    assert all(torch.equal(tensor, example[name]) for name, tensor in traced.examples.items())
    assert all(torch.equal(tensor, state[name]) for name, tensor in model.state_dict().items())


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


class _CountingDistinct(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).tanh()
        return self.second(hidden + hidden.round().unique().numel()).square().mean()


@pytest.mark.parametrize("costs", ["analytic", "measured"])
def test_what_has_no_derivative_may_be_read_for_its_size(costs: Literal["analytic", "measured"]) -> None:
    model, x = _CountingDistinct(), torch.randn(4, 6)

    pipe = pd2bw_fx.split(model, x, cluster=2, num_stages=2, costs=costs)

    assert torch.equal(pipe.run(x)["loss"], model(x))
