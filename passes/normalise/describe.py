"""From nodes to operators: where each came from, what it reads, what it yields."""

from __future__ import annotations

import functools
import operator as python_operator
import re
from collections.abc import Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from pd2bw_fx.graph import Operator, ParameterSpec, TensorSpec
from pd2bw_fx.traced import Traced

from .assume import assumed_dtype
from .facts import Facts
from .heavy import is_heavy, is_product
from .lift import Draft, canonical_names
from .memory import Memory
from .nodes import asserts_assumption, is_random

_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_HERE = Path(__file__)
_MACHINERY = {Path(torch.__file__).parent}
_MACHINERY |= {folder.parent / "trace" for folder in (_HERE.parent, _HERE.resolve().parent)}


@dataclass(frozen=True, slots=True)
class Describer:
    draft: Draft
    facts: Facts
    memory: Memory
    symbols: Mapping[str, str]  # the shape environment's names -> ours
    canonical: Mapping[str, str]  # every name of a parameter or buffer -> the first one
    parameters: Set[str]
    model_type: str

    def input_spec(self, node: fx.Node) -> TensorSpec:
        fake = self.facts.values.get(node.name)
        return self._unknown(node) if fake is None else self._spec(fake, node.meta.get("val"))

    def _spec(self, fake: torch.Tensor, traced_value: Any) -> TensorSpec:
        """Returns a spec with the trace's symbolic shape, and size and gradient of the observed run."""
        shape = traced_value.shape if isinstance(traced_value, torch.Tensor) else fake.shape
        return TensorSpec(
            shape=tuple(self.size(size) for size in shape),
            dtype=fake.dtype,
            requires_grad=fake.requires_grad,
            example_shape=tuple(self.example_size(size) for size in fake.shape),
        )

    def _unknown(self, node: fx.Node) -> TensorSpec:
        return TensorSpec(None, assumed_dtype(node, self.draft), self.facts.requires_grad(node.name))

    def example_size(self, size: Any) -> int:
        """Returns the example's size; for one that depends on data its upper bound, or 1 if unknown."""
        return size if isinstance(size, int) else size.node.hint or 1

    def size(self, size: Any) -> int | str:
        if isinstance(size, int):
            return size
        expression = size.node.expr
        if expression.is_number:
            return int(expression)
        text = str(expression)
        return re.sub(r"\b[su]\d+\b", lambda match: self.symbols.get(match[0], match[0]), text)

    def operators(self) -> dict[str, Operator]:
        """Returns the operators; for their readers, heavy operators on inputs alone count as inputs."""
        of_inputs: set[str] = {node.name for node in self.draft.graph.nodes if node.op == "placeholder"}
        heavy: set[str] = set()
        operators: dict[str, Operator] = {}
        for node in self.draft.graph.nodes:
            if node.op in {"placeholder", "get_attr", "output"}:
                continue
            operator = self._operator(node, of_inputs, heavy)
            if operator.is_replicable or node.name in heavy:
                of_inputs.add(node.name)
            operators[node.name] = operator
        return operators

    def _operator(self, node: fx.Node, of_inputs: set[str], heavy: set[str]) -> Operator:
        path, kind = _module(node) or ("", self.model_type)
        names = self._state_read(node)
        parameters = tuple(name for name in names if name in self.parameters)
        outputs = self._outputs(node)
        written = self.memory.buffers_written.get(node.name, ())
        return Operator(
            name=node.name,
            target=target_name(node),
            module_path=path,
            module_type=kind,
            reads=tuple(arg.name for arg in node.all_input_nodes if arg.op != "get_attr"),
            parameters=parameters,
            buffers=tuple(name for name in names if name not in parameters),
            outputs=outputs,
            source_line=source_line(node.meta.get("stack_trace")),
            writes_buffers=written,
            is_view=self.facts.is_view(node.name),
            is_random=is_random(node, self.draft.module_of(node)),
            is_replicable=self._is_replicable(node, outputs, parameters, of_inputs, heavy),
            memory_group=self.memory.groups.get(node.name),
        )

    def _state_read(self, node: fx.Node) -> list[str]:
        """Returns the parameters and buffers that a node reads, by name; a whole layer reads all its own."""
        module = self.draft.module_of(node)
        if module is not None:
            state = [*module.named_parameters(), *module.named_buffers()]
            return [self.canonical[f"{node.target}.{name}"] for name, _ in state]
        return [str(arg.target) for arg in node.all_input_nodes if arg.op == "get_attr"]

    def _outputs(self, node: fx.Node) -> tuple[TensorSpec, ...]:
        if node.name not in self.facts.values:
            return (self._unknown(node),)
        fakes = pytree.tree_leaves(self.facts.values.get(node.name))
        traced = pytree.tree_leaves(node.meta.get("val"))
        if len(traced) != len(fakes):
            traced = [None] * len(fakes)
        pairs = zip(fakes, traced, strict=True)
        return tuple(self._spec(fake, value) for fake, value in pairs if isinstance(fake, torch.Tensor))

    def _is_replicable(
        self,
        node: fx.Node,
        outputs: tuple[TensorSpec, ...],
        parameters: tuple[str, ...],
        of_inputs: Set[str],
        heavy: set[str],
    ) -> bool:
        """Whether each stage may compute the node itself; if only its cost forbids that, it joins `heavy`."""
        if node.name in self.memory.groups or asserts_assumption(node):
            return False
        if not outputs and _is_size(self.facts.values.get(node.name)):
            return True
        if parameters or is_product(node) or node.op == "call_module" or is_random(node, None):
            return False
        if any(spec.requires_grad for spec in outputs):
            return False
        if not all(arg.op == "get_attr" or arg.name in of_inputs for arg in node.all_input_nodes):
            return False
        # Tuples are not sent: an element is taken in the stage that makes the tuple.
        takes_element = node.target is python_operator.getitem and node.all_input_nodes[0].name in heavy
        if takes_element or is_heavy(node, self._tensors(*node.all_input_nodes), self._tensors(node)):
            heavy.add(node.name)
            return False
        return True

    def _tensors(self, *nodes: fx.Node) -> list[torch.Tensor]:
        leaves = pytree.tree_leaves([self.facts.values.get(node.name) for node in nodes])
        return [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]


def _is_size(value: Any) -> bool:
    leaves = pytree.tree_leaves(value)
    return bool(leaves) and all(isinstance(leaf, (int, float, bool, torch.SymInt)) for leaf in leaves)


def _module(node: fx.Node) -> tuple[str, str] | None:
    """Returns path and class of the innermost module that the node came from, if the trace has it."""
    stack = list(node.meta.get("nn_module_stack", {}).values())
    if not stack:
        return None
    path, kind = stack[-1]
    return path, kind.rpartition(".")[2]


def target_name(node: fx.Node) -> str:
    if isinstance(node.target, str):
        return node.target
    if isinstance(node.target, torch._ops.OpOverload):
        return str(node.target)
    module = getattr(node.target, "__module__", "") or ""
    return f"{module.removeprefix('_')}.{getattr(node.target, '__name__', str(node.target))}"


def source_line(stack_trace: str | None) -> str | None:
    """Returns the innermost line outside of torch, which is the model author's."""
    frames = _FRAME.findall(stack_trace or "")
    for path, line in reversed(frames):
        if not _is_machinery(path):
            return f"{Path(path).name}:{line}"
    return None


@functools.cache
def _is_machinery(file: str) -> bool:
    """Whether the file has code of torch or of the front end."""
    path = Path(file)
    return path.parts[:1] == ("torch",) or any(folder in path.parents for folder in _MACHINERY)


def parameter_specs(
    traced: Traced, draft: Draft
) -> tuple[dict[str, ParameterSpec], dict[str, ParameterSpec]]:
    """Returns all parameters, and all buffers and constants, of the model, even if no operator reads them."""
    canonical = canonical_names(traced.model)
    ties: dict[str, list[str]] = {name: [] for name in canonical.values()}
    for name, first in canonical.items():
        if name != first:
            ties[first].append(name)
    parameters = {
        name: ParameterSpec(name, _state_spec(value), value.requires_grad, True, tuple(ties[name]))
        for name, value in traced.model.named_parameters()
    }
    persistent = set(_persistent_names(traced.model))
    buffers = {
        name: ParameterSpec(name, _state_spec(value), False, name in persistent, tuple(ties[name]))
        for name, value in traced.model.named_buffers()
    }
    read = {node.target for node in draft.graph.find_nodes(op="get_attr")}
    for name, value in draft.values.items():
        if isinstance(value, torch.Tensor) and name in read and name not in parameters | buffers:
            buffers[name] = ParameterSpec(name, _state_spec(value), False, False)
    return parameters, buffers


def _persistent_names(model: nn.Module) -> list[str]:
    return [
        f"{path}.{name}" if path else name
        for path, module in model.named_modules(remove_duplicate=False)
        for name, _ in module.named_buffers(recurse=False, remove_duplicate=False)
        if name not in module._non_persistent_buffers_set
    ]


def _state_spec(value: torch.Tensor) -> TensorSpec:
    shape = tuple(value.shape)
    return TensorSpec(shape, value.dtype, value.requires_grad, shape)
