"""Facts about each value, by running the program once on fake tensors, which hold no data.

Torch itself tells whether a gradient flows to a value, whether it shares memory with another and what is
written in place; a table of operators would be wrong for the next operator.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode, ShapeEnv
from torch.utils import _pytree as pytree

from pd2bw_fx.program import FxProgram, ProgramInterpreter, silence_torch_errors
from pd2bw_fx.recurrent_operators import ON_SEQUENCES, of_one_step
from pd2bw_fx.selected_rows import take_selected_rows_for_many

from .nodes import writes


@dataclass(slots=True)
class Facts:
    """Facts about the values of a program, by node name."""

    mode: FakeTensorMode
    values: dict[str, Any] = field(default_factory=dict)  # fake values, with requires_grad and strides
    storages: dict[str, frozenset[int]] = field(default_factory=dict)  # the memory of a node's tensors
    aliases: dict[str, tuple[fx.Node, ...]] = field(default_factory=dict)  # operands that share its memory
    written: dict[str, tuple[fx.Node, ...]] = field(default_factory=dict)  # operands that it writes in place
    assumed_gradients: set[str] = field(default_factory=set)  # nodes with a gradient, if values are unknown
    working_casts: frozenset[str] = frozenset()  # casts that do something under autocast: see casts.py

    def is_view(self, name: str) -> bool:
        return bool(self.aliases.get(name))

    def requires_grad(self, name: str) -> bool:
        known = any(tensor.requires_grad for tensor in _tensors(self.values.get(name)))
        return known or name in self.assumed_gradients


def fake_mode() -> FakeTensorMode:
    """Returns a mode with a shape environment of its own, which sizes that depend on data need."""
    return FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())


def observe(program: FxProgram, example: Mapping[str, torch.Tensor]) -> Facts:
    """Runs the program at the example's sizes; `example` holds a tensor for each placeholder."""
    facts = Facts(fake_mode())
    _Observer(program, facts).run_on(example)
    return facts


def _fake(mode: FakeTensorMode, tensor: torch.Tensor) -> torch.Tensor:
    with mode:
        fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return fake.requires_grad_() if tensor.requires_grad else fake


class FakeRun(ProgramInterpreter):
    """Runs the program on parameters, buffers and constants that hold no data."""

    def __init__(self, program: FxProgram, mode: FakeTensorMode, *, keep_values: bool = False) -> None:
        super().__init__(program, garbage_collect_values=not keep_values)
        self.mode = mode

    def fetch_attr(self, target: str) -> Any:
        value = super().fetch_attr(target)
        return _fake(self.mode, value) if isinstance(value, torch.Tensor) else value

    def call_module(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A layer runs on tensors that hold no data either: a batch norm would count this run in its own."""
        layer = self.fetch_attr(target)
        held = dict(chain(layer.named_parameters(), layer.named_buffers()))
        fakes = {name: _fake(self.mode, tensor) for name, tensor in held.items()}
        return functional_call(layer, fakes, args, kwargs)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target not in ON_SEQUENCES:
            return super().call_function(target, args, kwargs)
        run = super().call_function
        return of_one_step(lambda *args, **kwargs: run(target, args, kwargs))(*args, **kwargs)

    def run_node(self, n: fx.Node) -> Any:
        try:
            return super().run_node(n)
        except (
            RuntimeError
        ) as error:  # a kernel in C++ asks for sizes as numbers, or fails where there are none
            with enable_python_dispatcher(), suppress(RuntimeError):
                return self._run_unasked(n)
            raise error

    def _run_unasked(self, n: fx.Node) -> Any:
        """Runs a node, with an answer to what its operator asks of how many rows values select."""
        try:
            return super().run_node(n)
        except GuardOnDataDependentSymNode:
            with take_selected_rows_for_many():
                return super().run_node(n)

    def run_on(self, example: Mapping[str, torch.Tensor]) -> None:
        """`example` holds a tensor for each placeholder."""
        placeholders = self.graph.find_nodes(op="placeholder")
        # An operator that fails here is run in another way, or named in an error of ours.
        with silence_torch_errors(), self.mode, torch.enable_grad():
            self.run(*(_fake(self.mode, example[str(node.target)]) for node in placeholders))


class _Observer(FakeRun):
    def __init__(self, program: FxProgram, facts: Facts) -> None:
        super().__init__(program, facts.mode, keep_values=True)
        self.facts = facts

    def run_node(self, n: fx.Node) -> Any:
        versions = {node: _versions(self.env[node]) for node in n.all_input_nodes}
        value = super().run_node(n)
        if n.op == "output":
            return value
        if n.meta.get("no_grad"):
            value = self._without_gradient(n, value)
        self.facts.values[n.name] = value
        storages = frozenset(tensor.untyped_storage()._cdata for tensor in _tensors(value))
        self.facts.storages[n.name] = storages
        self.facts.aliases[n.name] = tuple(
            node for node in n.all_input_nodes if self.facts.storages[node.name] & storages
        )
        self.facts.written[n.name] = self._written(n, versions)
        return value

    def _without_gradient(self, node: fx.Node, value: Any) -> Any:
        """Detaches what a node makes under `no_grad`.

        Torch says that a view made there requires a gradient, though none flows through it. A node that
        returns its operand keeps the operand's gradient.
        """
        given = {id(tensor) for operand in node.all_input_nodes for tensor in _tensors(self.env[operand])}

        def of_its_own(leaf: Any) -> Any:
            is_new = isinstance(leaf, torch.Tensor) and leaf.requires_grad and id(leaf) not in given
            return leaf.detach() if is_new else leaf

        return pytree.tree_map(of_its_own, value)

    def _written(self, node: fx.Node, versions: Mapping[fx.Node, list[int]]) -> tuple[fx.Node, ...]:
        """Returns the operands that a node writes.

        For an ATen operator its schema tells: views of one memory share a version counter.
        """
        if isinstance(node.target, torch._ops.OpOverload):
            return writes(node)
        return tuple(
            operand for operand, before in versions.items() if _versions(self.env[operand]) != before
        )


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor))


def _versions(value: Any) -> list[int]:
    return [tensor._version for tensor in _tensors(value)]
