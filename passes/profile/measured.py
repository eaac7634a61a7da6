"""The clock: an operator's forward and backward, run until the median is steady."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from pd2bw_fx.graph import OperatorGraph

from .tape import differentiable, leaves
from .walk import Call

_ENOUGH_S = 0.02  # of one operator, unless it takes longer than that
_ENOUGH_WHOLE_S = 0.5
_FEWEST, _MOST = 3, 30
_LONG_ENOUGH_S = 50e-6  # shorter calls are timed by the dozen: a clock reading costs a tenth of a microsecond
_DOZEN = 12


class Stopwatch:
    """Measures calls on a device; while it is open the caller's random state and buffers are safe."""

    def __init__(self, graph: OperatorGraph, device: torch.device) -> None:
        self._graph = graph
        self._device = device
        self._stack = ExitStack()
        self._autograd_s = 0.0

    def __enter__(self) -> Stopwatch:
        devices = list(range(torch.cuda.device_count())) if self._device.type == "cuda" else []
        self._stack.enter_context(torch.random.fork_rng(devices=devices))
        self._stack.callback(_restorer(self._graph))
        self._autograd_s = self._empty_backward_s()
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.close()

    def convert(self, tensor: Tensor) -> Tensor:
        return tensor if tensor.device.type == self._device.type else tensor.to(self._device)

    def measure(self, call: Call) -> tuple[float, float]:
        forward_s = self._median_s(call.run)
        if call.copies_operands:
            copies_s = self._median_s(lambda: [operand.clone() for operand in call.operands])
            forward_s = max(forward_s - copies_s, 0.0)
        outputs = differentiable(call.run())
        if not outputs:
            return forward_s, 0.0
        seeds = [torch.ones_like(output) for output in outputs]
        wanted = leaves(outputs)
        if not wanted:
            return forward_s, 0.0

        def backward() -> None:
            torch.autograd.grad(outputs, wanted, seeds, retain_graph=True, allow_unused=True)

        return forward_s, max(self._median_s(backward) - self._autograd_s, 0.0)

    def whole(self, run: Callable[[], Mapping[str, Tensor]]) -> tuple[float, float]:
        """Forward and backward seconds of the whole model, which `run` runs forward."""
        parameters = [p for p in _root(self._graph).parameters() if p.requires_grad]
        forward_s: list[float] = []
        backward_s: list[float] = []
        spent = 0.0
        while len(forward_s) <= _FEWEST or (spent < _ENOUGH_WHOLE_S and len(forward_s) < _MOST):
            outputs: list[Tensor] = []
            forward_s.append(self._timed(lambda: outputs.extend(run().values()), 1))  # noqa: B023
            roots = [output for output in outputs if output.requires_grad]
            if self._graph.loss is not None:
                roots = roots[:1]  # the loss comes first, and it alone is trained on
            seeds = [torch.ones_like(root) for root in roots]
            backward_s.append(
                self._timed(
                    lambda: torch.autograd.grad(roots, parameters, seeds, allow_unused=True),  # noqa: B023
                    1,
                )
                if roots and parameters
                else 0.0
            )
            spent += forward_s[-1] + backward_s[-1]
        # The first run meets cold caches and allocators.
        return statistics.median(forward_s[1:]), statistics.median(backward_s[1:])

    def _median_s(self, run: Callable[[], Any]) -> float:
        self._timed(run, 1)
        repeats = _DOZEN if self._timed(run, 1) < _LONG_ENOUGH_S else 1
        samples: list[float] = []
        spent = 0.0
        while len(samples) < _FEWEST or (spent < _ENOUGH_S and len(samples) < _MOST):
            took = self._timed(run, repeats)
            spent += took
            samples.append(took / repeats)
        return statistics.median(samples)

    def _timed(self, run: Callable[[], Any], repeats: int) -> float:
        self._wait()
        began = time.perf_counter()
        for _ in range(repeats):
            run()
        self._wait()
        return time.perf_counter() - began

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()

    def _empty_backward_s(self) -> float:
        """What entering and leaving autograd costs, which a stage pays once and not for each operator."""
        leaf = torch.zeros(1, device=self._device, requires_grad=True)
        output, seed = leaf.view(1), torch.ones(1, device=self._device)
        return self._median_s(lambda: torch.autograd.grad(output, leaf, seed, retain_graph=True))


def _root(graph: OperatorGraph) -> nn.Module:
    assert graph.root is not None, "a graph read from a file cannot be profiled"
    return graph.root


def _restorer(graph: OperatorGraph) -> Callable[[], None]:
    """Puts back the buffers that operators, or layers left whole, write while they are measured."""
    buffers = list(_root(graph).buffers())
    before = [buffer.detach().clone() for buffer in buffers]

    def restore() -> None:
        with torch.no_grad():
            for buffer, value in zip(buffers, before, strict=True):
                buffer.copy_(value)

    return restore
