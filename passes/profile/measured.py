"""Measures times: the forward of every operator in program order, then every backward in reverse order.

An operator too short to be timed alone is timed together with its short neighbours. It gets the share of
their time that it has in the sum of their times alone. Passes are repeated until the time of the program
settles. The lower quartile counts, because other work on the machine only makes samples longer. Time that a
thread waits for its core while other processes have it does not count (`clock_for`). The cost of the
measurement itself (reading the clock, an empty call, entering autograd) is measured first and subtracted.

Several threads wait for one another, so if other processes have the cores, all samples may be a hundred times
too long. Times from the cache are therefore compared with the model's own time now, and each operator's with
its first run.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from pd2bw_fx.attributes import keep_attributes, keep_model
from pd2bw_fx.costs import OperatorCost
from pd2bw_fx.errors import models_own_backward
from pd2bw_fx.graph import OperatorGraph

from .cache import ProfileCache, Seconds
from .tape import differentiable, gradients, leaves
from .walk import Call

_T = TypeVar("_T")

_ALONE = 2  # passes that time each operator alone; allocators are cold in the first of them
_FEWEST, _MOST = 5, 30  # passes after those, which count
_MOST_S = 1.0  # for all passes together, once there are the fewest
_SETTLED = 0.01  # relative change over the last three passes
# Times in the cache that are longer than a first run now are wrong, and measured again.
_BEYOND, _SLACK_S = 2.0, 20e-6
_NEAR = 2.0  # the model's time now over that in the cache: up to this the first run is believed
_SHORT_S = {"cpu": 50e-6, "cuda": 500e-6}  # shorter operators are timed together with their neighbours


@dataclass(frozen=True, slots=True)
class _Sample:
    """One forward, of an operator or of several together, whose backward has not been run yet."""

    keys: tuple[Hashable, ...]
    forward_s: float
    results: list[Any]


def clock_for(device: torch.device) -> Callable[[], float]:
    """Returns the clock for work on a device.

    On a CPU with one thread it is the time that this thread had a core. Several threads wait for one another,
    and a thread waits for its GPU, so for these it is the wall clock.
    """
    alone = device.type == "cpu" and torch.get_num_threads() == 1
    return time.thread_time if alone else time.perf_counter


class Stopwatch:
    """A meter that times calls on a device. While it is open the caller's random state and buffers are kept.

    A backward adds gradients of parameters to existing ones, as all microbatches of an update but the first
    do.
    """

    def __init__(self, graph: OperatorGraph, device: torch.device, cache: ProfileCache | None = None) -> None:
        self._graph = graph
        self._device = device
        self._cache = cache
        self._stack = ExitStack()
        self._now_s = clock_for(device)
        self._clock_s = self._call_s = self._autograd_s = 0.0
        self._wanted: frozenset[Hashable] = frozenset()
        self._group: list[tuple[Hashable, Call]] = []
        self._forwards: list[_Sample] = []
        self._passes = 0
        self._spent_s = 0.0
        self._totals_s: list[float] = []
        self._first_s: dict[Hashable, float] = {}
        self._alone_s: dict[Hashable, Seconds] = {}
        self._seconds: dict[Hashable, list[Seconds]] = defaultdict(list)
        self._sums: dict[int, Tensor] = {}
        self.knew_some = False  # times are from the cache
        self.takes_s = float("inf")  # the model itself, forward and backward, now

    def __enter__(self) -> Stopwatch:
        devices = list(range(torch.cuda.device_count())) if self._device.type == "cuda" else []
        self._stack.enter_context(state_as_it_was(self._graph, devices))
        self._clock_s = _quartile(self._timed(_nothing)[0] for _ in range(_MOST))
        calls = [_nothing] * 100
        self._call_s = (
            _quartile(self._timed(lambda: [call() for call in calls])[0] for _ in range(_MOST)) / 100
        )
        self._autograd_s = self._empty_backward_s()
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.close()
        if self._cache is not None:
            self._cache.save()

    @property
    def device(self) -> torch.device:
        return self._device

    def convert(self, tensor: Tensor) -> Tensor:
        return tensor if tensor.device == self._device else tensor.to(self._device)

    def first(self, key: Hashable, call: Call) -> Any:
        """Runs the call for the first time, which takes longer than any time that counts."""
        took_s, result = self._timed(call.run)
        self._first_s[key] = min(took_s, self._first_s.get(key, took_s))
        return result

    def expect(self, keys: Collection[Hashable]) -> None:
        if self._cache is not None:
            for key in keys:
                forward_s, _ = self._cache.get(key) or (0.0, 0.0)
                if forward_s > _BEYOND * self._first_s[key] + _SLACK_S:
                    self._cache.drop(key)
        self._wanted = frozenset(key for key in keys if self._known(key) is None)

    def wants_more(self) -> bool:
        counted = self._passes - _ALONE
        if not self._wanted:
            return False
        if counted < _FEWEST:
            return True
        last = self._totals_s[-3:]
        is_settled = max(last) <= min(last) * (1 + _SETTLED)
        return not is_settled and counted < _MOST and self._spent_s < _MOST_S

    def run(self, key: Hashable, call: Call) -> Any:
        if key not in self._wanted:
            return call.run()
        if self._passes >= _ALONE and not call.copies_operands and self._is_short(key):
            self._group.append((key, call))
            if sum(sum(self._alone_s[each]) for each, _ in self._group) >= self._short_s:
                self._end_group()
            return call.run()
        self._end_group()
        copies_s = 0.0
        if call.copies_operands:
            copies_s, _ = self._timed(lambda: [operand.clone() for operand in call.operands])
        forward_s, result = self._timed(call.run)
        self._forwards.append(_Sample((key,), max(forward_s - copies_s - self._call_s, 0.0), [result]))
        return result

    def end_pass(self) -> None:
        self._end_group()
        while self._forwards:
            sample = self._forwards.pop()
            self._add(sample, self._backward_s(sample.results))
        if self._passes >= _ALONE:
            self._totals_s.append(sum(sum(_lower(own)) for own in self._seconds.values()))
        self._passes += 1

    def timed(self, key: Hashable, cost: OperatorCost) -> OperatorCost:
        forward_s, backward_s = self._lowest_s(key)
        return replace(cost, forward_s=forward_s, backward_s=backward_s)

    def _lowest_s(self, key: Hashable) -> Seconds:
        known = self._known(key)
        if known is not None:
            self.knew_some = True
            return known
        seconds = _lower(self._seconds[key])
        if self._cache is not None:
            self._cache.put(key, seconds)
        return seconds

    def _known(self, key: Hashable) -> Seconds | None:
        return None if self._cache is None else self._cache.get(key)

    @property
    def _short_s(self) -> float:
        return _SHORT_S.get(self._device.type, 50e-6)

    def _is_short(self, key: Hashable) -> bool:
        return sum(self._alone_s[key]) < self._short_s

    def _end_group(self) -> None:
        """Times the calls of the group once more, together: operands exist, so nothing comes in between."""
        group, self._group = self._group, []
        if not group:
            return
        forward_s, results = self._timed(lambda: [call.run() for _, call in group])
        keys = tuple(key for key, _ in group)
        self._forwards.append(_Sample(keys, max(forward_s - len(group) * self._call_s, 0.0), results))

    def _add(self, sample: _Sample, backward_s: float) -> None:
        self._spent_s += sample.forward_s + backward_s
        if self._passes < _ALONE:
            self._alone_s[sample.keys[0]] = sample.forward_s, backward_s
        if self._passes == 0 or (self._passes < _ALONE and self._is_short(sample.keys[0])):
            return
        alone_s = [self._alone_s[key] for key in sample.keys]
        forward, backward = (sum(column) or 1.0 for column in zip(*alone_s, strict=True))
        for key, (alone_forward_s, alone_backward_s) in zip(sample.keys, alone_s, strict=True):
            share = alone_forward_s / forward, alone_backward_s / backward
            self._seconds[key].append((sample.forward_s * share[0], backward_s * share[1]))

    def _backward_s(self, results: list[Any]) -> float:
        outputs = [output for result in results for output in differentiable(result)]
        wanted = leaves(outputs)
        if not wanted:
            return 0.0
        seeds = [torch.ones_like(output) for output in outputs]
        sums = [self._sum_of(leaf) if isinstance(leaf, nn.Parameter) else None for leaf in wanted]

        def backward() -> None:
            for total, gradient in zip(sums, gradients(outputs, wanted, seeds), strict=True):
                if total is not None and gradient is not None:
                    total.add_(gradient)

        took_s, _ = self._timed(backward)
        return max(took_s - self._autograd_s, 0.0)

    def _sum_of(self, parameter: nn.Parameter) -> Tensor:
        if id(parameter) not in self._sums:
            self._sums[id(parameter)] = torch.zeros_like(parameter, requires_grad=False)
        return self._sums[id(parameter)]

    def whole(self, run: Callable[[], Mapping[str, Tensor]], *, key: Hashable) -> Seconds:
        """Returns the forward and backward seconds of the whole model; `run` is its forward."""
        self._sums.clear()
        parameters = [p for p in _root(self._graph).parameters() if p.requires_grad]
        known = self._known(key)
        if known is not None:
            for _ in range(_FEWEST):  # allocators are cold at first, and other processes may have the cores
                with keep_attributes(_root(self._graph)):
                    self.takes_s = min(self.takes_s, sum(self._whole_once(run, parameters)))
                if self.takes_s <= _NEAR * sum(known):
                    break
            if sum(known) <= _BEYOND * self.takes_s + _SLACK_S:
                return known
        samples: list[Seconds] = []
        totals_s: list[float] = []
        while len(samples) <= _FEWEST or (
            sum(map(sum, samples)) < _MOST_S
            and len(samples) <= _MOST
            and max(totals_s[-3:]) > min(totals_s[-3:]) * (1 + _SETTLED)
        ):
            with keep_attributes(_root(self._graph)):  # caches of the model would hold a graph
                samples.append(self._whole_once(run, parameters))
            totals_s.append(sum(_lower(samples[1:] or samples)))
        seconds = _lower(samples[1:])
        self.takes_s = sum(seconds)
        if self._cache is not None:
            self._cache.put(key, seconds)
        return seconds

    def _whole_once(self, run: Callable[[], Mapping[str, Tensor]], parameters: list[nn.Parameter]) -> Seconds:
        forward_s, outputs = self._timed(run)
        roots = [output for output in outputs.values() if output.requires_grad]
        if self._graph.loss is not None:
            roots = roots[:1]  # the loss comes first, and it alone is trained on
        return forward_s, self._whole_backward_s(roots, parameters) if roots and parameters else 0.0

    def _whole_backward_s(self, roots: list[Tensor], parameters: list[nn.Parameter]) -> float:
        seeds = [torch.ones_like(root) for root in roots]
        if any(parameter._post_accumulate_grad_hooks for parameter in parameters):
            # A backward would call the hooks as in training, and they may change the weights.
            with models_own_backward():
                took_s, _ = self._timed(
                    lambda: torch.autograd.grad(roots, parameters, seeds, allow_unused=True)
                )
            return took_s
        before = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            parameter.grad = self._sum_of(parameter)
        try:
            with models_own_backward():
                took_s, _ = self._timed(lambda: torch.autograd.backward(roots, seeds, inputs=parameters))
        finally:
            for parameter, gradient in zip(parameters, before, strict=True):
                parameter.grad = gradient
        return took_s

    def _timed(self, run: Callable[[], _T]) -> tuple[float, _T]:
        self._wait()
        began_s = self._now_s()
        result = run()
        self._wait()
        return max(self._now_s() - began_s - self._clock_s, 0.0), result

    def _wait(self) -> None:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _empty_backward_s(self) -> float:
        """Returns the cost of entering and leaving autograd, which a stage pays only once."""
        leaf = torch.zeros(1, device=self._device, requires_grad=True)
        output, seed = leaf.view(1), torch.ones(1, device=self._device)
        return _quartile(
            self._timed(lambda: torch.autograd.grad(output, leaf, seed, retain_graph=True))[0]
            for _ in range(_MOST)
        )


def _nothing() -> None:
    pass


def _quartile(samples: Iterable[float]) -> float:
    """Returns the lower quartile; of up to four samples it is the least."""
    ordered = sorted(samples)
    return ordered[(len(ordered) - 1) // 4]


def _lower(samples: Sequence[Seconds]) -> Seconds:
    forward_s, backward_s = zip(*samples, strict=True)
    return _quartile(forward_s), _quartile(backward_s)


def _root(graph: OperatorGraph) -> nn.Module:
    assert graph.root is not None, "a graph read from a file cannot be profiled"
    return graph.root


@contextmanager
def state_as_it_was(graph: OperatorGraph, devices: Sequence[int] = ()) -> Iterator[None]:
    """Keeps the random state and the model, parameters too: an embedding with max_norm writes to them."""
    with torch.random.fork_rng(devices=devices), keep_model(_root(graph)):
        yield
