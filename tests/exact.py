"""Compares an operator graph with its eager model: loss, gradients and buffers, to the last bit."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx, nn

from pd2bw_fx.graph import OperatorGraph
from pd2bw_fx.passes.normalise import normalise
from pd2bw_fx.passes.trace import trace
from pd2bw_fx.program import ProgramInterpreter

Batch = Mapping[str, Any]


def double(batch: Batch) -> dict[str, Any]:
    return {
        name: value.double() if isinstance(value, Tensor) and value.is_floating_point() else value
        for name, value in batch.items()
    }


def graph_of(model: nn.Module, batch: Batch) -> OperatorGraph:
    return normalise(trace(model, (), batch))


def assert_same(model: nn.Module, graph: OperatorGraph, batch: Batch, *, tolerance: float = 0.0) -> None:
    """Compares the graph with the eager model, with the same random draws: loss, gradients and buffers."""
    assert graph.fx is not None
    eager = copy.deepcopy(model)
    torch.manual_seed(7)
    output = eager(**batch)
    expected = output if isinstance(output, Tensor) else output["loss"]
    expected.backward()
    before = copy.deepcopy(model.state_dict())
    model.zero_grad()
    torch.manual_seed(7)
    results = graph.fx(*(batch[name] for name in graph.inputs))
    loss = dict(zip((output.name for output in graph.outputs), results, strict=True))["loss"]
    loss.backward()

    torch.testing.assert_close(loss, expected, rtol=tolerance, atol=tolerance)
    for (name, found), other in zip(model.named_parameters(), eager.parameters(), strict=True):
        assert (found.grad is None) == (other.grad is None), name
        if found.grad is not None:
            torch.testing.assert_close(found.grad, other.grad, rtol=tolerance, atol=tolerance, msg=name)
    for (name, buffer), other in zip(model.named_buffers(), eager.named_buffers(), strict=True):
        assert torch.equal(buffer, other[1]), name
    model.load_state_dict(before)


class _Recorder(ProgramInterpreter):
    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        self.seen = {**getattr(self, "seen", {}), n.name: value}
        return value


def assert_outputs_are_described(graph: OperatorGraph, batch: Batch) -> None:
    """Compares the types, shapes and gradients that the graph states with those of a real run."""
    assert graph.fx is not None
    recorder = _Recorder(graph.fx)
    recorder.run(*(batch[name] for name in graph.inputs))

    for name, operator in graph.operators.items():
        value = recorder.seen[name]
        found = [v for v in (value if isinstance(value, (tuple, list)) else [value]) if isinstance(v, Tensor)]
        assert [spec.requires_grad for spec in operator.outputs] == [v.requires_grad for v in found], name
        assert [spec.dtype for spec in operator.outputs] == [v.dtype for v in found], name
        assert [spec.example_shape for spec in operator.outputs] == [tuple(v.shape) for v in found], name
