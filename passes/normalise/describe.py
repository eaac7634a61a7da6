"""From nodes to operators: where each came from, what it reads, what it yields."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from pd2bw_fx.graph import Operator, ParameterSpec, TensorSpec
from pd2bw_fx.traced import Traced

from .facts import Facts
from .lift import Draft, canonical_names
from .memory import Memory
from .nodes import is_random, operator_name

_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_HEAVY = {
    "linear",
    "matmul",
    "mm",
    "bmm",
    "addmm",
    "baddbmm",
    "einsum",
    "convolution",
    "conv1d",
    "conv2d",
    "conv3d",
    "scaled_dot_product_attention",
    "embedding",
    "layer_norm",
    "batch_norm",
    "group_norm",
}


@dataclass(frozen=True, slots=True)
class Describer:
    draft: Draft
    facts: Facts
    memory: Memory
    symbols: Mapping[str, str]  # the shape environment's names -> ours

    def spec(self, node: fx.Node, fake: torch.Tensor | None, traced_value: Any) -> TensorSpec:
        """The shape in symbols from the trace, its size and gradient from the observed run."""
        tensor = fake if fake is not None else traced_value
        shape: tuple[int | str, ...] | None = None
        if isinstance(traced_value, torch.Tensor):
            shape = tuple(self.size(size) for size in traced_value.shape)
        elif fake is not None:
            shape = tuple(int(size) for size in fake.shape)
        return TensorSpec(
            shape=shape,
            dtype=tensor.dtype,
            requires_grad=bool(fake is not None and fake.requires_grad),
            example_shape=None if fake is None else tuple(int(size) for size in fake.shape),
        )

    def size(self, size: Any) -> int | str:
        if isinstance(size, int):
            return size
        expression = size.node.expr
        if expression.is_number:
            return int(expression)
        text = str(expression)
        return re.sub(r"\b[su]\d+\b", lambda match: self.symbols.get(match[0], match[0]), text)

    def operators(self) -> dict[str, Operator]:
        replicable: set[str] = {node.name for node in self.draft.graph.nodes if node.op == "placeholder"}
        operators: dict[str, Operator] = {}
        for node in self.draft.graph.nodes:
            if node.op in {"placeholder", "get_attr", "output"}:
                continue
            operator = self._operator(node, replicable)
            if operator.is_replicable:
                replicable.add(node.name)
            operators[node.name] = operator
        return operators

    def _operator(self, node: fx.Node, replicable: set[str]) -> Operator:
        path, kind = _module(node)
        state = [arg for arg in node.all_input_nodes if arg.op == "get_attr"]
        names = [str(arg.target) for arg in state]
        parameters = tuple(name for name in names if isinstance(self.draft.values[name], nn.Parameter))
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
            source_line=_source_line(node.meta.get("stack_trace")),
            writes_buffers=written,
            is_view=self.facts.is_view(node.name),
            is_random=is_random(node),
            is_replicable=self._is_replicable(node, outputs, parameters, replicable),
            memory_group=self.memory.groups.get(node.name),
        )

    def _outputs(self, node: fx.Node) -> tuple[TensorSpec, ...]:
        fakes = pytree.tree_leaves(self.facts.values.get(node.name))
        traced = pytree.tree_leaves(node.meta.get("val"))
        if len(traced) != len(fakes):
            traced = [None] * len(fakes)
        pairs = zip(fakes, traced, strict=True)
        return tuple(self.spec(node, fake, value) for fake, value in pairs if isinstance(fake, torch.Tensor))

    def _is_replicable(
        self,
        node: fx.Node,
        outputs: tuple[TensorSpec, ...],
        parameters: tuple[str, ...],
        replicable: set[str],
    ) -> bool:
        if not outputs and isinstance(self.facts.values.get(node.name), (int, float, bool, torch.SymInt)):
            return True
        if parameters or node.name in self.memory.groups or is_random(node) or operator_name(node) in _HEAVY:
            return False
        if any(spec.requires_grad for spec in outputs):
            return False
        return all(arg.op == "get_attr" or arg.name in replicable for arg in node.all_input_nodes)


def _module(node: fx.Node) -> tuple[str, str]:
    stack = list(node.meta.get("nn_module_stack", {}).values())
    if not stack:
        return "", ""
    path, kind = stack[-1]
    return path, kind.rpartition(".")[2]


def target_name(node: fx.Node) -> str:
    if isinstance(node.target, str):
        return node.target
    if isinstance(node.target, torch._ops.OpOverload):
        return str(node.target)
    module = getattr(node.target, "__module__", "") or ""
    return f"{module.removeprefix('_')}.{getattr(node.target, '__name__', str(node.target))}"


def _source_line(stack_trace: str | None) -> str | None:
    """The innermost line outside torch: the model author's."""
    frames = _FRAME.findall(stack_trace or "")
    own = [(path, line) for path, line in frames if "/torch/" not in path and not path.startswith("torch/")]
    own = [(path, line) for path, line in own if not path.endswith("passes/trace/program.py")]
    if not own:
        return None
    path, line = own[-1]
    return f"{path.replace(chr(92), '/').rpartition('/')[2]}:{line}"


def parameter_specs(
    traced: Traced, draft: Draft
) -> tuple[dict[str, ParameterSpec], dict[str, ParameterSpec]]:
    """All parameters, and all buffers and constants, of the model; those that no operator reads as well."""
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
    for name, value in draft.values.items():
        if isinstance(value, torch.Tensor) and name not in parameters and name not in buffers:
            buffers[name] = ParameterSpec(name, _state_spec(value), False, False)
    return parameters, buffers


def _persistent_names(model: nn.Module) -> list[str]:
    return [
        f"{path}.{name}" if path else name
        for path, module in model.named_modules(remove_duplicate=False)
        for name in module._buffers
        if name not in module._non_persistent_buffers_set
    ]


def _state_spec(value: torch.Tensor) -> TensorSpec:
    shape = tuple(value.shape)
    return TensorSpec(shape, value.dtype, value.requires_grad, shape)
