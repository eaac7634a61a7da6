"""A front end's program copied into one flat graph that reads the model's tensors by name.

Lifted parameters become `get_attr` nodes at their first use, regions without gradient or with autocast are
inlined with a mark on each node, and modules' paths lose the tracing wrapper's prefix.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import getitem
from typing import Any

import torch
from torch import fx, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind
from torch.utils import _pytree as pytree

from pd2bw_fx.graph import GIVEN_AS, NOTED_OF_CALLS
from pd2bw_fx.traced import Traced

from .paths import own_calls, own_name

# The traced forward is that of our `Program`, around the model's.
_WRAPPER_FRAME = re.compile(r'\s*File "[^"]*[/\\]trace[/\\]program\.py", line \d+, in forward\n[^\n]*\n?')

_LIFTED = "lifted_"  # torch.export's prefix for tensors that no module has
_REGIONS = {"wrap_with_set_grad_enabled", "wrap_with_autocast"}


@dataclass(slots=True)
class Draft:
    """The graph while the passes below change it, and what its get_attr and call_module nodes refer to."""

    graph: fx.Graph
    values: dict[str, Any] = field(default_factory=dict)

    def module_of(self, node: fx.Node) -> nn.Module | None:
        """Returns the layer that a `call_module` node calls, which was not traced into; None for others."""
        module = self.values.get(str(node.target)) if node.op == "call_module" else None
        return module if isinstance(module, nn.Module) else None


def canonical_names(model: nn.Module) -> dict[str, str]:
    """Maps every name of a parameter or buffer to the first name of the same tensor in state_dict order."""
    first: dict[int, str] = {}
    named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {name: first.setdefault(id(tensor), name) for name, tensor in named}


def lift(traced: Traced) -> Draft:
    program = traced.program
    module = program.graph_module if isinstance(program, ExportedProgram) else program
    draft = Draft(fx.Graph())
    inputs = iter(traced.inputs)
    state = _state_of(traced) if isinstance(program, ExportedProgram) else {}
    environment: dict[fx.Node, Any] = {}
    for node in module.graph.find_nodes(op="placeholder"):
        if node.name in state:
            environment[node] = state[node.name]
        else:
            name = next(inputs)
            copied = draft.graph.placeholder(name)
            copied.name = name  # the author's name, even one that fx would avoid ("input")
            copied.meta = {key: node.meta[key] for key in ("val", GIVEN_AS) if key in node.meta}
            environment[node] = copied
    copier = _Copier(draft, traced, {})
    results = pytree.tree_leaves(copier.copy(module, environment, {}))
    if traced.output_places is not None:
        results = [results[place] for place in traced.output_places]
    draft.graph.output(tuple(results))
    return draft


@dataclass(frozen=True, slots=True)
class _Constant:
    """A lifted input that is a plain value, not a tensor of the model's state."""

    value: Any


@dataclass(frozen=True, slots=True)
class _State:
    """A lifted input that is a parameter, buffer or constant; read where it is first needed."""

    name: str
    value: torch.Tensor
    meta: Mapping[str, Any]


def _state_of(traced: Traced) -> dict[str, Any]:
    program = traced.program
    assert isinstance(program, ExportedProgram)
    canonical = canonical_names(traced.model)
    nodes = {node.name: node for node in program.graph_module.graph.find_nodes(op="placeholder")}
    state: dict[str, Any] = {}
    num_constants = 0
    for entry in program.graph_signature.input_specs:
        if isinstance(entry.arg, ConstantArgument):
            state[entry.arg.name] = _Constant(entry.arg.value)
            continue
        if entry.kind is InputKind.USER_INPUT:
            continue
        target = entry.target
        assert target is not None
        name = own_name(target, traced)
        if target.startswith(traced.prefix) and name in canonical:
            name = canonical[name]
            value = attribute(traced.model, name)
        elif target in program.state_dict:
            value = program.state_dict[target]
        else:
            value = program.constants[target]
            if not _may_be_called(name, value, traced.model):
                name, num_constants = f"constant_{num_constants}", num_constants + 1
        state[entry.arg.name] = _State(name, value, nodes[entry.arg.name].meta)
    return state


def _may_be_called(name: str, value: Any, model: nn.Module) -> bool:
    """Whether the value is the attribute `name`, or was during the trace: a first call may set it."""
    if attribute(model, name) is value:
        return True
    own = name.rpartition(".")[2]
    return attribute(model, name) is None and own.isidentifier() and not own.startswith(_LIFTED)


def attribute(model: nn.Module, name: str) -> Any:
    """Returns what the model has under a dotted name, or None."""
    value: Any = model
    for step in name.split("."):
        value = getattr(value, step, None)
    return value


@dataclass(slots=True)
class _Copier:
    draft: Draft
    traced: Traced
    read: dict[str, fx.Node]

    def copy(self, module: nn.Module, environment: dict[fx.Node, Any], marks: Mapping[str, Any]) -> list[Any]:
        """Copies the graph of `module` without its placeholders; returns its results in the new graph."""
        graph = module.graph
        assert isinstance(graph, fx.Graph)
        for node in graph.nodes:
            if node.op == "placeholder":
                continue
            if node.op == "output":
                results = self._mapped(node.args[0], environment)
                return list(results) if isinstance(results, (tuple, list)) else [results]
            if node.op == "get_attr":
                environment[node] = self._attribute(module, node)
            elif getattr(node.target, "__name__", None) in _REGIONS:
                environment[node] = self._inlined(node, environment, marks)
            elif node.target is getitem and isinstance(environment.get(node.args[0]), list):
                environment[node] = environment[node.args[0]][node.args[1]]
            else:
                environment[node] = self._copied(module, node, environment, marks)
        raise AssertionError("a graph without an output")

    def _copied(
        self, module: nn.Module, node: fx.Node, environment: dict[fx.Node, Any], marks: Mapping[str, Any]
    ) -> fx.Node:
        args, kwargs = self._mapped(node.args, environment), self._mapped(node.kwargs, environment)
        target, name = node.target, node.name
        if node.op == "call_module":
            target = self._own_name(str(node.target))
            name = target.replace(".", "_")
            self.draft.values[target] = module.get_submodule(str(node.target))
        copied = self.draft.graph.create_node(node.op, target, args, kwargs, name=name)
        copied.meta = {**self._meta(node), **marks}
        return copied

    def _own_name(self, target: str) -> str:
        return own_name(target, self.traced)

    def _mapped(self, value: Any, environment: Mapping[fx.Node, Any]) -> Any:
        return fx.node.map_arg(value, lambda node: self._value(environment[node]))

    def _value(self, found: Any) -> Any:
        if isinstance(found, _Constant):
            return found.value
        return self._read(found) if isinstance(found, _State) else found

    def _read(self, state: _State) -> fx.Node:
        """A state tensor is read where it is first needed; once, for a later read may see a changed value."""
        if state.name not in self.read:
            node = self.draft.graph.get_attr(state.name)
            node.meta = {"val": state.meta["val"]} if "val" in state.meta else {}
            self.read[state.name] = node
            self.draft.values[state.name] = state.value
        return self.read[state.name]

    def _attribute(self, module: nn.Module, node: fx.Node) -> Any:
        value = attribute(module, str(node.target))
        if not isinstance(value, torch.Tensor):
            return _Constant(value)
        name = self._own_name(str(node.target))
        name = canonical_names(self.traced.model).get(name, name)
        if attribute(self.traced.model, name) is not value:
            taken = [given for given in self.draft.values if given.startswith("constant_")]
            name = f"constant_{len(taken)}"
        return _State(name, value, node.meta)

    def _inlined(self, node: fx.Node, environment: dict[fx.Node, Any], marks: Mapping[str, Any]) -> list[Any]:
        args = [environment[arg] if isinstance(arg, fx.Node) else arg for arg in node.args]
        if getattr(node.target, "__name__", "") == "wrap_with_set_grad_enabled":
            enabled, body, *operands = args
            marks = {**marks, "no_grad": not enabled}
        else:
            device_type, dtype, enabled, _cache_enabled, body, *operands = args
            # Two equal regions stay apart: casts of weights are cached within one of them.
            marks = {**marks, "autocast": (device_type, dtype, enabled), "autocast_region": node.name}
        assert isinstance(body, _Constant)
        inner = dict(zip(body.value.graph.find_nodes(op="placeholder"), operands, strict=True))
        return self.copy(body.value, inner, marks)

    def _meta(self, node: fx.Node) -> dict[str, Any]:
        marks = ("no_grad", "autocast", "autocast_region", "of_map")
        kept = ("val", "stack_trace", *marks, *NOTED_OF_CALLS)
        meta: dict[str, Any] = {key: node.meta[key] for key in kept if key in node.meta}
        if "stack_trace" in meta:
            meta["stack_trace"] = _WRAPPER_FRAME.sub("", meta["stack_trace"] or "", count=1)
        meta["nn_module_stack"] = own_calls(node.meta.get("nn_module_stack", {}), self.traced)
        if "stack_trace" in meta and meta.get("of_map"):
            meta["stack_trace"] = _outermost_frames(meta["stack_trace"], len(meta["nn_module_stack"]))
        return meta


def _outermost_frames(stack_trace: str, number: int) -> str:
    """Returns the stack trace without layers within a map, which the mapping module does not call."""
    before, *frames = re.split(r'(?=  File ")', stack_trace)
    forwards = [place for place, frame in enumerate(frames) if ", in forward\n" in frame]
    end = forwards[number] if number < len(forwards) else len(frames)
    return "".join([before, *frames[:end]])
