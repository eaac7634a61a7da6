"""Visits every operator with its operands, in program order: once to count bytes, then to measure."""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Hashable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, fx, nn
from torch.func import functional_call
from torch.fx.node import map_aggregate

from pd2bw_fx.costs import OperatorCost
from pd2bw_fx.graph import OperatorGraph
from pd2bw_fx.program import ProgramInterpreter, region

from .keys import key_of
from .tape import differentiable

_WRITING = frozenset(
    {operator.iadd, operator.isub, operator.imul, operator.itruediv, operator.ipow, operator.setitem}
)


@dataclass(frozen=True, slots=True)
class Call:
    """One operator with its operands as leaves, so that gradients flow to those that need one, and no
    further.

    It can be run any number of times: an operator that writes into its operands is given copies of them.
    """

    name: str  # "linear" of aten.linear.default; the class of a whole layer
    run: Callable[[], Any]
    operands: tuple[Tensor, ...]
    parameters: tuple[Tensor, ...]
    copies_operands: bool


class Meter(Protocol):
    """Gives calls their seconds; the walk counts the bytes that they save and return.

    Calls with the same key take equally long.
    """

    @property
    def device(self) -> torch.device | None:
        """The device that calls run on, whichever the program was traced on; None for that of its tensors."""

    def convert(self, tensor: Tensor) -> Tensor:
        """Returns the tensor as this meter runs it: on its device, or without values."""

    def first(self, key: Hashable, call: Call) -> Any:
        """Runs the call for the first time, in which its bytes are counted, and returns its result."""

    def expect(self, keys: Collection[Hashable]) -> None:
        """Takes the keys that calls have; called once, after each has been run for the first time."""

    def wants_more(self) -> bool:
        """Returns whether to go through the program once more; called before each such pass."""

    def run(self, key: Hashable, call: Call) -> Any:
        """Runs the call, and returns its result, for the operands of later ones."""

    def end_pass(self) -> None:
        """Ends a pass: all calls have been run."""

    def timed(self, key: Hashable, cost: OperatorCost) -> OperatorCost:
        """Returns the cost with the times of its forward and backward."""


def _held_by(value: Any) -> tuple[Tensor, ...]:
    if isinstance(value, nn.Module):
        return (*value.parameters(), *value.buffers())
    return (value,) if isinstance(value, Tensor) else ()


class Walk(ProgramInterpreter):
    """Runs the program operator by operator, each on operands that are detached from the operators before.

    Calls are timed in the program's own order, so that the processor's caches are as in training: they have
    what was just computed, and not a weight that was last read a pass ago.
    """

    def __init__(self, graph: OperatorGraph, meter: Meter) -> None:
        assert graph.fx is not None, "a graph read from a file cannot be profiled"
        super().__init__(graph.fx)
        self._graph = graph
        self._meter = meter
        self._converted: dict[int, Tensor] = {}
        self._storages: set[int] = set()  # those of all converted tensors
        self._keys: dict[str, Hashable] = {}
        self._is_counting = True
        self._saved: set[int] = set()
        self._inputs: dict[int, str] = {}  # storages of inputs, and of what is computed from them alone
        self._sent: set[int] = set()  # storages of all other results
        self._alive: list[Any] = []  # storages are known by their address, so none may be freed and reused
        self._costs: dict[str, OperatorCost] = {}
        for value in (graph.root, *graph.fx.values.values()):
            for tensor in _held_by(value):
                self._parameter(tensor)

    def run(self, inputs: Mapping[str, Tensor]) -> dict[str, OperatorCost]:  # type: ignore[override]
        """Returns the cost of each operator, by name."""
        converted = [self._meter.convert(inputs[name]) for name in self._graph.inputs]

        def run_once() -> None:
            # The program may write into its inputs.
            super(Walk, self).run(*(tensor.clone() for tensor in converted), enable_io_processing=False)

        run_once()
        self._alive.clear()
        self._is_counting = False
        self._meter.expect(self.keys)
        while self._meter.wants_more():
            run_once()
            self._meter.end_pass()
        return {name: self._meter.timed(self._keys[name], cost) for name, cost in self._costs.items()}

    @property
    def keys(self) -> tuple[Hashable, ...]:
        """The keys of every operator, in program order; known once `run` has counted bytes."""
        return tuple(self._keys.values())

    def run_node(self, n: fx.Node) -> Any:
        if n.op == "get_attr":
            return self._parameter(super().run_node(n))
        if not n.op.startswith("call_"):
            value = super().run_node(n)
            if n.op == "placeholder" and self._is_counting:
                self._keep_as_input(n, value)
            return value
        call = self._call(n)
        if self._is_counting:
            layer = self.fetch_attr(str(n.target)) if n.op == "call_module" else None
            self._keys[n.name] = key_of(n, *self.fetch_args_kwargs_from_env(n), layer=layer)
            result = self._count(n, call)
        else:
            with torch.enable_grad(), region(n, self._device_type):
                result = self._meter.run(self._keys[n.name], call)
        if call.copies_operands:
            result = self._write(n)
        return self._as_leaves(n, result)

    @property
    def _device_type(self) -> str | None:
        return None if self._meter.device is None else self._meter.device.type

    def fetch_args_kwargs_from_env(self, n: fx.Node) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Puts the meter's device in place of those that the program was traced with."""
        given = super().fetch_args_kwargs_from_env(n)
        where = self._meter.device
        if where is None:
            return given
        args, kwargs = map_aggregate(given, lambda value: where if isinstance(value, torch.device) else value)
        return args, kwargs

    def _count(self, node: fx.Node, call: Call) -> Any:
        """Counts the bytes that one call returns, saves for its backward, and needs as workspace."""
        saved = _SavedStorages(self._saved, self._storages, self._inputs)

        def run() -> Any:
            with saved:
                return call.run()

        with torch.enable_grad(), region(node, self._device_type):
            result = self._meter.first(self._keys[node.name], replace(call, run=run))
        self._alive.append(result)
        if self._graph.operators[node.name].is_replicable:
            self._keep_as_input(node, result)
        else:
            self._sent |= {tensor.untyped_storage()._cdata for tensor in _tensors(result)}
        given = sum(_num_bytes(tensor) for tensor in _tensors(result))
        taken = sum(_num_bytes(operand) for operand in call.operands if operand.requires_grad)
        # Gradients of parameters are added to existing ones, and until then exist beside them.
        added = sum(_num_bytes(parameter) for parameter in call.parameters if parameter.requires_grad)
        self._costs[node.name] = OperatorCost(
            forward_s=0.0,
            backward_s=0.0,
            output_bytes=given,
            saved_bytes=saved.num_bytes,
            # While its backward runs, the gradients of its results and of its operands are both alive.
            workspace_bytes=given + taken + added if differentiable(result) else given,
            saved_inputs=tuple(saved.inputs.items()),
        )
        return result

    def _keep_as_input(self, node: fx.Node, value: Any) -> None:
        self._alive.append(value)
        for tensor in _tensors(value):
            if tensor.untyped_storage()._cdata not in self._sent:
                self._inputs.setdefault(tensor.untyped_storage()._cdata, node.name)

    def _as_leaves(self, node: fx.Node, result: Any) -> Any:
        """Returns detached results, which need a gradient where the program's do."""
        specs = iter(self._graph.operators[node.name].outputs)

        def leaf(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            return value.detach().requires_grad_(next(specs).requires_grad)

        return map_aggregate(result, leaf)

    def _call(self, node: fx.Node) -> Call:
        writes = self._writes_operands(node)
        operands: list[Tensor] = []
        parameters: list[Tensor] = []
        if node.op == "call_module":
            parameters += map(self._parameter, self.fetch_attr(str(node.target)).parameters())

        def leaf(value: Any) -> Any:
            if not isinstance(value, Tensor):
                return value
            if isinstance(value, nn.Parameter):
                parameters.append(value)
                return value
            operands.append(value.detach().requires_grad_(value.requires_grad))
            return operands[-1]

        args, kwargs = map_aggregate(self.fetch_args_kwargs_from_env(node), leaf)
        method = getattr(self, node.op)

        def run() -> Any:
            own_args, own_kwargs = map_aggregate((args, kwargs), _copy) if writes else (args, kwargs)
            return method(node.target, own_args, own_kwargs)

        return Call(self._name(node), run, tuple(operands), tuple(parameters), copies_operands=writes)

    def _name(self, node: fx.Node) -> str:
        if node.op == "call_module":
            return type(self.fetch_attr(str(node.target))).__name__
        if isinstance(node.target, torch._ops.OpOverload):
            return node.target._opname
        return node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")

    def _write(self, node: fx.Node) -> Any:
        """Runs an operator that writes into its operands on these themselves, once, for their readers."""

        def detached(value: Any) -> Any:
            return value.detach() if isinstance(value, Tensor) else value

        args, kwargs = map_aggregate(self.fetch_args_kwargs_from_env(node), detached)
        with torch.no_grad():
            return getattr(self, node.op)(node.target, args, kwargs)

    def _writes_operands(self, node: fx.Node) -> bool:
        """Returns whether an operator writes into its operands.

        The schema of an ATen operator says so. For what symbolic tracing leaves, its name or `inplace` does.
        """
        schema = getattr(node.target, "_schema", None)
        if schema is not None:
            return bool(schema.is_mutable)
        if node.op == "call_module":
            inside = self.fetch_attr(str(node.target)).modules()
            return any(getattr(module, "inplace", False) is True for module in inside)
        name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
        named = name.endswith("_") and not name.endswith("__")
        return named or node.target in _WRITING or node.kwargs.get("inplace") is True

    def call_module(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Runs a whole layer, with its parameters as the meter runs them."""
        module = self.fetch_attr(target)
        own = {**dict(module.named_parameters()), **dict(module.named_buffers())}
        converted = {name: self._parameter(tensor) for name, tensor in own.items()}
        if all(converted[name] is tensor for name, tensor in own.items()):
            return module(*args, **kwargs)
        return functional_call(module, converted, args, kwargs)

    def _parameter(self, tensor: Any) -> Any:
        if not isinstance(tensor, Tensor):
            return tensor
        if id(tensor) not in self._converted:
            converted = self._meter.convert(tensor)
            if isinstance(tensor, nn.Parameter) and not isinstance(converted, nn.Parameter):
                converted = nn.Parameter(converted, requires_grad=tensor.requires_grad)
            self._converted[id(tensor)] = converted
            self._storages.add(converted.untyped_storage()._cdata)
        return self._converted[id(tensor)]


class _SavedStorages:
    """Counts the bytes that autograd saves for the backward: each storage once, and no parameters.

    `inputs` has, by name, those inputs that this call saves, also if others save them.
    """

    def __init__(self, seen: set[int], parameters: set[int], inputs: Mapping[int, str]) -> None:
        self._seen = seen
        self._parameters = parameters
        self._names = inputs
        self.inputs: dict[str, int] = {}
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda packed: packed)
        self.num_bytes = 0

    def _pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata in self._parameters:
            return tensor
        if storage._cdata in self._names:
            self.inputs[self._names[storage._cdata]] = storage.nbytes()
        if storage._cdata not in self._seen:
            self._seen.add(storage._cdata)
            self.num_bytes += storage.nbytes()
        return tensor

    def __enter__(self) -> _SavedStorages:
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._hooks.__exit__(*error)


def _copy(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) and not isinstance(value, nn.Parameter) else value


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    if isinstance(value, list | tuple):
        return [tensor for item in value for tensor in _tensors(item)]
    return []


def _num_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.dtype.itemsize
