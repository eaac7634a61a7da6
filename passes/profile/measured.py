"""The clock: forward of every operator in program order, then every backward in the opposite one."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from pd2bw_fx.graph import OperatorGraph

from .tape import differentiable, leaves
from .walk import Call

_T = TypeVar("_T")

_ENOUGH_S = 0.5
_FEWEST, _MOST = 3, 30  # passes that count, besides a first one that meets cold allocators


@dataclass(frozen=True, slots=True)
class _Sample:
    """One forward that its backward has yet to follow."""

    key: Hashable
    forward_s: float
    result: Any


class Stopwatch:
    """Measures calls on a device; while it is open the caller's random state and buffers are safe."""

    def __init__(self, graph: OperatorGraph, device: torch.device) -> None:
        self._graph = graph
        self._device = device
        self._stack = ExitStack()
        self._autograd_s = 0.0
        self._forwards: list[_Sample] = []
        self._passes = 0
        self._spent_s = 0.0
        self._seconds: dict[Hashable, list[tuple[float, float]]] = defaultdict(list)

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

    def wants_more(self) -> bool:
        return self._passes <= _FEWEST or (self._spent_s < _ENOUGH_S and self._passes <= _MOST)

    def run(self, key: Hashable, call: Call) -> Any:
        copies_s = 0.0
        if call.copies_operands:
            copies_s, _ = self._timed(lambda: [operand.clone() for operand in call.operands])
        forward_s, result = self._timed(call.run)
        self._forwards.append(_Sample(key, max(forward_s - copies_s, 0.0), result))
        return result

    def end_pass(self) -> None:
        is_first = self._passes == 0
        while self._forwards:
            sample = self._forwards.pop()
            backward_s = self._backward_s(differentiable(sample.result))
            if not is_first:
                self._seconds[sample.key].append((sample.forward_s, backward_s))
                self._spent_s += sample.forward_s + backward_s
        self._passes += 1

    def seconds(self, key: Hashable) -> tuple[float, float]:
        forward_s, backward_s = zip(*self._seconds[key], strict=True)
        return statistics.median(forward_s), statistics.median(backward_s)

    def _backward_s(self, outputs: list[Tensor]) -> float:
        wanted = leaves(outputs)
        if not wanted:
            return 0.0
        seeds = [torch.ones_like(output) for output in outputs]
        took_s, _ = self._timed(lambda: torch.autograd.grad(outputs, wanted, seeds, allow_unused=True))
        return max(took_s - self._autograd_s, 0.0)

    def whole(self, run: Callable[[], Mapping[str, Tensor]]) -> tuple[float, float]:
        """Forward and backward seconds of the whole model, which `run` runs forward."""
        parameters = [p for p in _root(self._graph).parameters() if p.requires_grad]
        forward_s: list[float] = []
        backward_s: list[float] = []
        spent = 0.0
        while len(forward_s) <= _FEWEST or (spent < _ENOUGH_S and len(forward_s) <= _MOST):
            took_s, outputs = self._timed(run)
            roots = [output for output in outputs.values() if output.requires_grad]
            if self._graph.loss is not None:
                roots = roots[:1]  # the loss comes first, and it alone is trained on
            forward_s.append(took_s)
            backward_s.append(self._whole_backward_s(roots, parameters) if roots and parameters else 0.0)
            spent += forward_s[-1] + backward_s[-1]
        return statistics.median(forward_s[1:]), statistics.median(backward_s[1:])

    def _whole_backward_s(self, roots: list[Tensor], parameters: list[nn.Parameter]) -> float:
        seeds = [torch.ones_like(root) for root in roots]
        took_s, _ = self._timed(lambda: torch.autograd.grad(roots, parameters, seeds, allow_unused=True))
        return took_s

    def _timed(self, run: Callable[[], _T]) -> tuple[float, _T]:
        self._wait()
        began = time.perf_counter()
        result = run()
        self._wait()
        return time.perf_counter() - began, result

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize()

    def _empty_backward_s(self) -> float:
        """What entering and leaving autograd costs, which a stage pays once and not for each operator."""
        leaf = torch.zeros(1, device=self._device, requires_grad=True)
        output, seed = leaf.view(1), torch.ones(1, device=self._device)
        samples = (
            self._timed(lambda: torch.autograd.grad(output, leaf, seed, retain_graph=True))
            for _ in range(_MOST)
        )
        return statistics.median(took_s for took_s, _ in samples)


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
