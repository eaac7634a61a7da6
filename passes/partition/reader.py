"""Checks a `Problem` on a `Cluster`, and reads it into an `Instance`."""

from __future__ import annotations

import functools
import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

import numpy as np

from pd2bw_fx.cluster import Cluster
from pd2bw_fx.costs import Kept, MemoryModel
from pd2bw_fx.errors import InputError
from pd2bw_fx.problem import Block, Problem, Value
from pd2bw_fx.units import counted

from .constrain import Pin
from .instance import Flags, Floats, Instance, Net, SharedBytes


def check_problem(problem: Problem, cluster: Cluster) -> None:
    """Raises InputError at the first cost, name or edge that makes no sense."""
    if not problem.blocks:
        raise InputError("the problem has no blocks; there is nothing to place")
    names = [block.name for block in problem.blocks]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise InputError(f"two blocks are named {twice!r}; block names must differ")
    for block in problem.blocks:
        _check_block(block, problem, len(cluster))
    known = set(names)
    for value in problem.values:
        _check_value(value, known)
    for name, size in problem.parameters.items():
        _check_number(f"parameter {name!r}: trainable_bytes", size.trainable_bytes)
        _check_number(f"parameter {name!r}: frozen_bytes", size.frozen_bytes)
    topological_order(problem)


def _check_block(block: Block, problem: Problem, num_devices: int) -> None:
    for key in ("forward_s", "backward_s"):
        costs: tuple[float, ...] = getattr(block, key)
        if len(costs) != num_devices:
            raise InputError(
                f"block {block.name!r}: {key} has {counted(len(costs), 'entry')} for "
                f"{counted(num_devices, 'device')}; "
                "give one for each device of the cluster"
            )
        for device, cost in enumerate(costs):
            _check_number(f"block {block.name!r}: {key}[{device}]", cost)
    _check_number(f"block {block.name!r}: saved_bytes", block.saved_bytes)
    _check_number(f"block {block.name!r}: workspace_bytes", block.workspace_bytes)
    for parameter in block.parameters:
        if parameter not in problem.parameters:
            raise InputError(f"block {block.name!r} names parameter {parameter!r}, whose size is not given")


def _check_value(value: Value, known: set[str]) -> None:
    for name in (value.producer, *value.consumers):
        if name not in known:
            raise InputError(f"value {value.name!r} names block {name!r}, which the problem does not have")
    _check_number(f"value {value.name!r}: bytes", value.bytes)
    _check_number(f"value {value.name!r}: gradient_bytes", value.gradient_bytes)


def _check_number(what: str, value: object) -> None:
    good = isinstance(value, int | float | np.number) and not isinstance(value, bool)
    if not good or not math.isfinite(float(value)) or float(value) < 0:  # type: ignore[arg-type]
        raise InputError(f"{what} is {value!r}; a finite number of zero or more was expected")


def topological_order(problem: Problem) -> list[int]:
    """Returns block indices with producers first, in the problem's own order where that already holds.

    Raises InputError naming a block on a cycle.
    """
    index = {block.name: at for at, block in enumerate(problem.blocks)}
    readers: list[set[int]] = [set() for _ in problem.blocks]
    waiting = [0] * len(problem.blocks)
    for value in problem.values:
        producer = index[value.producer]
        for consumer in {index[name] for name in value.consumers} - readers[producer] - {producer}:
            readers[producer].add(consumer)
            waiting[consumer] += 1
    ready = [at for at, count in enumerate(waiting) if count == 0]
    order = []
    while ready:
        at = heapq.heappop(ready)
        order.append(at)
        for reader in readers[at]:
            waiting[reader] -= 1
            if waiting[reader] == 0:
                heapq.heappush(ready, reader)
    if len(order) < len(problem.blocks):
        stuck = next(problem.blocks[at].name for at, count in enumerate(waiting) if count)
        raise InputError(f"the values form a cycle through or before block {stuck!r}; stages need an order")
    return order


class Reader:
    """Makes the instance of any device order. What does not depend on the order is made once.

    Nodes are blocks in `topological_order`, nets the values that leave their block.
    """

    def __init__(
        self,
        problem: Problem,
        cluster: Cluster,
        *,
        memory_model: MemoryModel,
        kept: Sequence[Kept],
        overlap: bool,
        recompute: bool | Literal["auto"],
        pins: Sequence[Pin] = (),
    ) -> None:
        blocks = [problem.blocks[at] for at in topological_order(problem)]
        node = {block.name: at for at, block in enumerate(blocks)}
        self.cluster = cluster
        self.values = crossing_values(problem)
        self.nets = tuple(_net(value, node) for value in self.values)
        self.edges = tuple(
            sorted({(net.producer, consumer) for net in self.nets for consumer in net.consumers})
        )
        self._parameters = functools.cache(functools.partial(_parameters, problem, blocks, memory_model))
        self.kept = tuple(kept)
        self.forward_s = np.array([block.forward_s for block in blocks], dtype=float).T
        self.backward_s = np.array([block.backward_s for block in blocks], dtype=float).T
        self.saved = np.array([float(block.saved_bytes) for block in blocks])
        self.workspace = np.array([float(block.workspace_bytes) for block in blocks])
        self.stepped = np.array([_stepped_bytes(block, problem, memory_model) for block in blocks])
        self.overlap = overlap
        self.recompute = recompute
        self.pins = tuple(pins)
        self.node = node

    @property
    def work_s(self) -> Floats:
        """The work of every device, also of those that an order leaves out: (devices, nodes)."""
        work_s: Floats = self.forward_s + self.backward_s
        return work_s

    def instance(self, order: Sequence[int]) -> Instance:
        devices, k = list(order), len(order)
        instance = Instance(
            num_stages=k,
            edges=self.edges,
            work_s=self.work_s[devices],
            again_s=self.forward_s[devices],
            nets=self.nets,
            cost_s=_link_costs(self.values, self.cluster, order),
            per_destination=True,
            overlap=self.overlap,
            recompute=self.recompute,
            may_be_empty=False,
            limit_bytes=np.array([float(self.cluster.devices[d].memory_bytes) for d in order]),
            in_flight=np.ones(k, dtype=np.int64),
            static_bytes=np.zeros((k, len(self.node))),
            gradient_bytes=np.zeros(len(self.node)),
            gradients_wait=np.zeros(k, dtype=bool),
            updates_each=np.zeros(k, dtype=bool),
            flushes=np.zeros(k, dtype=bool),
            saved_bytes=self.saved,
            workspace_bytes=self.workspace,
            stepped_bytes=self.stepped,
            forbidden=self._forbidden(order),
        )
        return self.keeping(instance, self.kept)

    def keeping(self, instance: Instance, kept: Sequence[Kept]) -> Instance:
        """Returns the instance for a method that keeps `kept` at its stages."""
        static, gradients, shared = self._parameters(tuple(kept))
        return replace(
            instance,
            in_flight=np.array([each.in_flight for each in kept], dtype=np.int64),
            static_bytes=static,
            gradient_bytes=gradients,
            gradients_wait=np.array([each.gradients_wait for each in kept], dtype=bool),
            updates_each=np.array([each.updates_each for each in kept], dtype=bool),
            flushes=np.array([each.flushes for each in kept], dtype=bool),
            shared=shared,
        )

    def _forbidden(self, order: Sequence[int]) -> Flags | None:
        if not self.pins:
            return None
        forbidden = np.zeros((len(order), len(self.node)), dtype=bool)
        for pin in self.pins:
            forbidden[:, self.node[pin.block]] |= [not pin.allows(s, d) for s, d in enumerate(order)]
        return forbidden


def _stepped_bytes(block: Block, problem: Problem, memory_model: MemoryModel) -> float:
    """Returns the temporary bytes for the optimizer step of the block's largest parameter."""
    largest = max((problem.parameters[name].trainable_bytes for name in block.parameters), default=0)
    return float(memory_model.step_copies * largest)


def _net(value: Value, node: Mapping[str, int]) -> Net:
    consumers = sorted({node[name] for name in value.consumers} - {node[value.producer]})
    return Net(node[value.producer], tuple(consumers), int(value.bytes))


def _parameters(
    problem: Problem, blocks: Sequence[Block], memory_model: MemoryModel, kept: Sequence[Kept]
) -> tuple[Floats, Floats, tuple[SharedBytes, ...]]:
    """Returns the bytes of parameters that a single block uses, by stage and node, those of their gradients
    by node, and the bytes of parameters that several blocks use."""
    copies = np.array([float(memory_model.copies(each)) for each in kept])
    users: dict[str, list[int]] = {}
    for at, block in enumerate(blocks):
        for name in dict.fromkeys(block.parameters):
            users.setdefault(name, []).append(at)
    trainable: dict[tuple[int, ...], int] = {}
    frozen: dict[tuple[int, ...], int] = {}
    for name, using in users.items():
        size, together = problem.parameters[name], tuple(using)
        trainable[together] = trainable.get(together, 0) + size.trainable_bytes
        frozen[together] = frozen.get(together, 0) + size.frozen_bytes
    static, gradients = np.zeros((len(kept), len(blocks))), np.zeros(len(blocks))
    shared = []
    for nodes, num_bytes in trainable.items():
        held = copies * num_bytes + frozen[nodes]
        if len(nodes) == 1:
            static[:, nodes[0]] = held
            gradients[nodes[0]] = memory_model.gradient_copies * num_bytes
        elif held.any():
            shared.append(SharedBytes(held, float(memory_model.gradient_copies * num_bytes), nodes))
    return static, gradients, tuple(shared)


def crossing_values(problem: Problem) -> list[Value]:
    """Returns the values that leave their block. Net n of an instance is the n-th of them."""
    return [value for value in problem.values if set(value.consumers) - {value.producer}]


def transfer_s(value: Value, cluster: Cluster, source: int, target: int) -> float:
    """Returns the seconds for a value to go to another device and for its gradient, if any, to come back."""
    seconds = cluster.transfer_s(source, target, value.bytes)
    if value.gradient_bytes:
        seconds += cluster.transfer_s(target, source, value.gradient_bytes)
    return seconds


def _link_costs(values: Sequence[Value], cluster: Cluster, order: Sequence[int]) -> Floats:
    """Returns the costs of crossing by [value, stage, other stage]; the earlier of the two is the source."""
    k = len(order)
    num_bytes = np.array([float(value.bytes) for value in values])
    gradient_bytes = np.array([float(value.gradient_bytes) for value in values])
    costs = np.zeros((len(values), k, k))
    for s in range(k):
        for t in range(s + 1, k):
            a, b = order[s], order[t]
            forward_s = cluster.latency_s[a][b] + num_bytes / cluster.bytes_per_s[a][b]
            back_s = cluster.latency_s[b][a] + gradient_bytes / cluster.bytes_per_s[b][a]
            costs[:, s, t] = costs[:, t, s] = forward_s + np.where(gradient_bytes > 0, back_s, 0.0)
    return costs
