"""Operators that must stay in one stage: on memory that is written, and on sizes that depend on data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import fx, nn
from torch.fx.experimental.symbolic_shapes import free_unbacked_symbols

from pd2bw_fx.modes import passes_through_in_evaluation

from .facts import Facts
from .lift import Draft


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory groups and written buffers, by operator name."""

    groups: Mapping[str, str]  # the name of the first operator in the group
    buffers_written: Mapping[str, tuple[str, ...]]


def find_memory_groups(draft: Draft, facts: Facts, model: nn.Module) -> Memory:
    """Returns the groups of operators that must stay in one stage. These are:

    - operators on a buffer that is written
    - operators on a written activation's memory, up to the last write; later readers may have a copy
    - operators on values of a size that only a run can tell: no link knows how many bytes to expect
    - operators of a module's call that evaluation leaves out
    - writers of one module's buffers, if one of them also does something else
    - calls of a layer that was not traced into and may write its buffers
    """
    state = {node.name: node for node in draft.graph.nodes if node.op == "get_attr"}
    owners = {storage: str(node.target) for node in state.values() for storage in facts.storages[node.name]}
    touching = _touching(draft, facts)
    groups: dict[str, str] = {}
    buffers: dict[str, list[str]] = {}
    for storage, nodes in touching.items():
        writers = [node for node in nodes if storage in _written_storages(node, facts)]
        if not writers:
            continue
        if storage in owners:
            for node in writers:
                buffers.setdefault(node.name, []).append(owners[storage])
        else:
            nodes = nodes[: nodes.index(writers[-1]) + 1]
        _unite(groups, [node.name for node in nodes])
    for nodes in _on_unknown_sizes(draft).values():
        _unite(groups, [node.name for node in nodes])
    for nodes in _left_out_in_evaluation(draft, model).values():
        _unite(groups, [node.name for node in nodes])
    for nodes in _beside_running_statistics(draft, buffers).values():
        _unite(groups, [node.name for node in nodes])
    for layers in _layers_that_write(draft).values():
        _unite(groups, [node.name for node in layers])
        for node in layers:
            buffers[node.name] = [f"{node.target}.{name}" for name in _buffer_names(draft, node)]
    return Memory(groups, {name: tuple(dict.fromkeys(written)) for name, written in buffers.items()})


def _on_unknown_sizes(draft: Draft) -> dict[Any, list[fx.Node]]:
    """Returns the operators that make or read a value of unknown size, by the symbol of the size."""
    found: dict[Any, list[fx.Node]] = {}
    for node in draft.graph.nodes:
        if node.op in {"placeholder", "get_attr", "output"}:
            continue
        values = [node.meta.get("val"), *(operand.meta.get("val") for operand in node.all_input_nodes)]
        for symbol in free_unbacked_symbols(values):
            found.setdefault(symbol, []).append(node)
    return found


def _left_out_in_evaluation(draft: Draft, model: nn.Module) -> dict[str, list[fx.Node]]:
    """Returns the operators of modules that return their input in evaluation, by call."""
    modules = dict(model.named_modules(remove_duplicate=False))
    found: dict[str, list[fx.Node]] = {}
    for node in draft.graph.nodes:
        calls = node.meta.get("nn_module_stack")
        if calls and node.op not in {"placeholder", "get_attr", "output"}:
            key, (path, _) = next(reversed(calls.items()))
            if path in modules and passes_through_in_evaluation(modules[path]):
                found.setdefault(key, []).append(node)
    return found


def _beside_running_statistics(draft: Draft, written: Mapping[str, list[str]]) -> dict[str, list[fx.Node]]:
    """Returns the operators that write a module's buffers, if one of them does more than that, by module.

    A layer's count of batches shares no memory with its running statistics, and stays with the layer.
    """
    found: dict[str, list[fx.Node]] = {}
    for node in draft.graph.nodes:
        for buffer in written.get(node.name, ()):
            found.setdefault(buffer.rpartition(".")[0], []).append(node)
    return {path: nodes for path, nodes in found.items() if any(node.users for node in nodes)}


def _layers_that_write(draft: Draft) -> dict[str, list[fx.Node]]:
    """Returns the calls of each layer that was not traced into and, in training, may write its buffers."""
    calls: dict[str, list[fx.Node]] = {}
    for node in draft.graph.nodes:
        module = draft.module_of(node)
        if module is not None and module.training and _buffer_names(draft, node):
            calls.setdefault(str(node.target), []).append(node)
    return calls


def _buffer_names(draft: Draft, node: fx.Node) -> list[str]:
    module = draft.module_of(node)
    return [] if module is None else [name for name, _ in module.named_buffers()]


def _touching(draft: Draft, facts: Facts) -> dict[int, list[fx.Node]]:
    """Returns the operators that make, read or alias each piece of memory, in program order."""
    touching: dict[int, list[fx.Node]] = {}
    for node in draft.graph.nodes:
        if node.op in {"placeholder", "get_attr", "output"}:
            continue
        # The order is that of operands: by address it would differ from process to process.
        operands = [*node.all_input_nodes, node]
        for storage in dict.fromkeys(s for each in operands for s in sorted(facts.storages[each.name])):
            touching.setdefault(storage, []).append(node)
    return touching


def _written_storages(node: fx.Node, facts: Facts) -> set[int]:
    return {storage for target in facts.written.get(node.name, ()) for storage in facts.storages[target.name]}


def _unite(groups: dict[str, str], names: list[str]) -> None:
    """Joins the operators, and the groups that they are in, to one group."""
    joined = {groups[name] for name in names if name in groups}
    members = dict.fromkeys((*(name for name in groups if groups[name] in joined), *names))
    first = next(iter(members))
    groups.update(dict.fromkeys(members, first))
