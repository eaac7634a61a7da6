"""Joins operators to blocks, by the rules of what may be cut.

1. An element stays with its tuple, and a view with its base, so that what is sent has memory of its own. A
   view that a module takes of what it is given is the module's: the base is what is sent to it.
2. Operators of one memory group (running statistics, in-place clusters) stay together.
3. Operators that depend on inputs and sizes alone, and take less time than sending their result (masks,
   positions, casts of inputs), are in no block: each stage that reads the result computes it. Their time is
   counted for the first block that reads it. What the backward saves of it, and of inputs, is shared out over
   the blocks that save it.
4. An operator that no output depends on (a draw kept for the draws after it, a count of batches) stays with
   the last operator that it reads, or with the next one: a stage of such operators alone gives nothing.
5. Blocks that depend on one another in a cycle are one block.
6. A parameter or buffer that no operator reads stays with the first operator that reads one with most modules
   around both. It takes memory once, since it is not trained.

Nothing else is joined: the planner has every cut that these rules allow.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from numbers import Real
from typing import Any

import networkx as nx

from pd2bw_fx.cluster import Cluster
from pd2bw_fx.costs import Costs, OperatorCost, Work
from pd2bw_fx.device import Device
from pd2bw_fx.errors import InputError, shown
from pd2bw_fx.graph import Operator, OperatorGraph
from pd2bw_fx.problem import Block, ParameterSize, Problem, Value


def coarsen(graph: OperatorGraph, costs: Costs, cluster: Cluster) -> Problem:
    """Returns the planner's input: blocks in a topological order, their operators in program order.

    Raises InputError if costs are missing for an operator of the graph, or are no numbers.
    """
    placed = [operator for operator in graph.operators.values() if not operator.is_replicable]
    needed = _needed(graph)
    if not graph.outputs:
        raise InputError(
            f"{graph.model_name} returns no tensor; its forward is to return the loss, or what loss_fn "
            "takes, and not what .item() makes of it"
        )
    if not any(operator.name in needed for operator in placed):
        raise InputError(
            f"{graph.model_name} has no operator to place: its outputs depend on its inputs alone and on no "
            "parameter"
        )
    missing = [operator.name for operator in placed if operator.name not in costs.operators]
    if missing:
        raise InputError(f"the costs know nothing of operator {missing[0]!r}; profile this graph again")
    for operator in graph.operators.values():
        if operator.name in costs.operators:
            _require_numbers(operator.name, costs.operators[operator.name])
    members = _ordered(_acyclic(_joined(placed, needed), graph), graph)
    block_of = {name: operators[0] for operators in members for name in operators}
    copied = _copied(block_of, graph, members)
    saved_bytes = _saved_bytes(block_of, graph, costs, num_stages=len(cluster.devices))
    kept = defaultdict(list)  # rule 6
    for name, operator_name in graph.unread().items():
        kept[block_of[operator_name]].append(name)
    blocks = tuple(
        _block(names, copied[names[0]], saved_bytes[names[0]], kept[names[0]], graph, costs, cluster)
        for names in members
    )
    return Problem(
        blocks=blocks,
        values=tuple(_values(placed, block_of, graph)),
        parameters=_parameter_sizes(graph),
        fingerprint=graph.fingerprint(),
        module_of={operator.name: operator.module_path for operator in placed},
        costs_origin=costs.origin,
    )


def _require_numbers(name: str, cost: OperatorCost) -> None:
    """Refuses costs of the user that are no numbers; the planner itself checks their range."""
    for key in ("forward_s", "backward_s", "saved_bytes", "workspace_bytes"):
        value: Any = getattr(cost, key)
        if isinstance(value, bool) or not isinstance(value, Real):
            raise InputError(
                f"the costs of operator {name!r}: {key} is {shown(value)}; a number of "
                f"{'seconds' if key.endswith('_s') else 'bytes'} was expected"
            )


def _needed(graph: OperatorGraph) -> set[str]:
    """Returns the operators that some output depends on."""
    needed = {output.value for output in graph.outputs}
    for operator in reversed(list(graph.operators.values())):
        if operator.name in needed:
            needed.update(operator.reads)
    return needed


def _joined(placed: Sequence[Operator], needed: Container[str]) -> list[list[str]]:
    """Applies rules 1, 2 and 4: connected components of operators that stay together."""
    together: nx.Graph[str] = nx.Graph()
    together.add_nodes_from(operator.name for operator in placed)
    by_name = {operator.name: operator for operator in placed}
    groups: dict[str, str] = {}
    for operator in placed:
        base = next((by_name[read] for read in operator.reads[:1] if read in by_name), None)
        if base is not None and (
            operator.target.endswith("getitem") or (operator.is_view and not _enters_module(operator, base))
        ):
            together.add_edge(operator.name, base.name)
        if operator.memory_group is not None:
            together.add_edge(operator.name, groups.setdefault(operator.memory_group, operator.name))
    position = {operator.name: at for at, operator in enumerate(placed)}
    following = next(operator.name for operator in reversed(placed) if operator.name in needed)
    for operator in reversed(placed):
        if operator.name in needed:
            following = operator.name
        else:
            read = [name for name in operator.reads if name in position]
            together.add_edge(operator.name, max(read, key=position.__getitem__, default=following))
    return [list(component) for component in nx.connected_components(together)]


def _enters_module(view: Operator, base: Operator) -> bool:
    """Whether the view's module takes the base from outside."""
    module = view.module_path
    return bool(module) and not f"{base.module_path}.".startswith(f"{module}.")


def _acyclic(components: Iterable[Sequence[str]], graph: OperatorGraph) -> list[list[str]]:
    """Applies rule 5: components in a cycle become one."""
    component_of = {name: index for index, names in enumerate(components) for name in names}
    condensed = nx.condensation(_quotient(component_of, graph))
    inside = defaultdict(list)
    for name, index in component_of.items():
        inside[condensed.graph["mapping"][index]].append(name)
    return list(inside.values())


def _ordered(components: Sequence[Sequence[str]], graph: OperatorGraph) -> list[tuple[str, ...]]:
    """Returns components in a topological order; of those that may come next, the first in the program."""
    position = {name: index for index, name in enumerate(graph.operators)}
    operators = [tuple(sorted(names, key=position.__getitem__)) for names in components]
    component_of = {name: index for index, names in enumerate(operators) for name in names}
    order = nx.lexicographical_topological_sort(
        _quotient(component_of, graph), key=lambda index: position[operators[index][0]]
    )
    return [operators[index] for index in order]


def _quotient(component_of: Mapping[str, int], graph: OperatorGraph) -> nx.DiGraph[int]:
    quotient: nx.DiGraph[int] = nx.DiGraph()
    quotient.add_nodes_from(component_of.values())
    for name, reads in _placed_reads(component_of, graph).items():
        for read in reads:
            if component_of[read] != component_of[name]:
                quotient.add_edge(component_of[read], component_of[name])
    return quotient


def _placed_reads(placed: Container[str], graph: OperatorGraph) -> dict[str, list[str]]:
    """Returns the placed operators that each one reads, also by way of operators that every stage computes.

    Sizes are taken from any tensor that a stage has.
    """
    through: dict[str, list[str]] = {}
    for name, operator in graph.operators.items():
        reads = [
            source
            for read in operator.reads
            if read in graph.operators
            for source in ([read] if read in placed else through[read])
        ]
        through[name] = list(dict.fromkeys(reads)) if operator.outputs or name in placed else []
    return {name: reads for name, reads in through.items() if name in placed}


def _copied(
    block_of: Mapping[str, str], graph: OperatorGraph, members: Sequence[Sequence[str]]
) -> dict[str, list[str]]:
    """Returns the operators in no block, by the first block that needs them.

    Other stages that need them compute them too, which the planner does not count.
    """
    position = {names[0]: index for index, names in enumerate(members)}
    first: dict[str, str] = {}
    copied: dict[str, list[str]] = {name: [] for name in position}
    for operator in reversed(list(graph.operators.values())):
        reader = block_of.get(operator.name) or first.get(operator.name)
        if reader is None:
            continue
        if operator.name not in block_of:
            copied[reader].append(operator.name)
        for read in operator.reads:
            if read in graph.operators and read not in block_of:
                first[read] = min(reader, first.get(read, reader), key=position.__getitem__)
    return copied


def _saved_bytes(
    block_of: Mapping[str, str], graph: OperatorGraph, costs: Costs, *, num_stages: int
) -> dict[str, float]:
    """Returns the bytes that each block saves for the backward.

    A stage has an input, or a value made of inputs alone, once, however many of its blocks save it. Where
    there are more such blocks than stages, each counts a share, so that all together count as many copies as
    there are stages.
    """
    saved_bytes = dict.fromkeys(block_of.values(), 0.0)
    keepers: dict[str, tuple[int, set[str]]] = {}
    for name in graph.operators:
        if name not in block_of:
            continue
        block, cost = block_of[name], costs.operators[name]
        saved_bytes[block] += cost.saved_bytes
        for value, num_bytes in cost.saved_inputs:
            if value not in keepers:
                saved_bytes[block] -= num_bytes
            keepers.setdefault(value, (num_bytes, set()))[1].add(block)
    for num_bytes, blocks in keepers.values():
        for block in blocks:
            saved_bytes[block] += num_bytes * min(1.0, num_stages / len(blocks))
    return saved_bytes


def _block(
    names: Sequence[str],
    copied: Sequence[str],
    saved_bytes: float,
    unread: Sequence[str],
    graph: OperatorGraph,
    costs: Costs,
    cluster: Cluster,
) -> Block:
    operators = [graph.operators[name] for name in names]
    own = [costs.operators[name] for name in names]
    timed = [*own, *(costs.operators[name] for name in copied if name in costs.operators)]
    read = [name for operator in operators for name in (*operator.parameters, *operator.buffers)]
    return Block(
        name=names[0],
        operators=tuple(names),
        forward_s=tuple(
            sum(_on(device, cluster.devices[0], c.forward_s, c.forward_work) for c in timed)
            for device in cluster.devices
        ),
        backward_s=tuple(
            sum(_on(device, cluster.devices[0], c.backward_s, c.backward_work) for c in own)
            for device in cluster.devices
        ),
        parameters=tuple(dict.fromkeys([*read, *unread])),
        saved_bytes=round(saved_bytes),
        workspace_bytes=max(cost.workspace_bytes for cost in own),
    )


def _on(device: Device, first: Device, seconds: float, work: Work | None) -> float:
    """Returns an operator's time on a device: measured over its speed, or estimated from its rates."""
    rates = device.flops_per_s, device.memory_bytes_per_s
    if work is None or rates == (first.flops_per_s, first.memory_bytes_per_s):
        return seconds / device.speed
    return seconds + device.roof_s(*work) - first.roof_s(*work)


def _values(placed: Sequence[Operator], block_of: Mapping[str, str], graph: OperatorGraph) -> Iterable[Value]:
    """Returns the values that one block makes and others read, without inputs, which every stage loads."""
    readers: dict[str, list[str]] = {operator.name: [] for operator in placed}
    for name, reads in _placed_reads(readers, graph).items():
        for read in reads:
            if block_of[read] != block_of[name]:
                readers[read].append(block_of[name])
    for name, consumers in readers.items():
        specs = graph.operators[name].outputs
        if consumers and specs:
            yield Value(
                name=name,
                producer=block_of[name],
                consumers=tuple(dict.fromkeys(consumers)),
                bytes=sum(spec.num_bytes for spec in specs),
                gradient_bytes=sum(spec.num_bytes for spec in specs if spec.requires_grad),
            )


def _parameter_sizes(graph: OperatorGraph) -> dict[str, ParameterSize]:
    trained = graph.trained()
    sizes = {
        name: ParameterSize(trainable_bytes=parameter.spec.num_bytes)
        if name in trained
        else ParameterSize(frozen_bytes=parameter.spec.num_bytes)
        for name, parameter in graph.parameters.items()
    }
    return sizes | {
        name: ParameterSize(frozen_bytes=buffer.spec.num_bytes) for name, buffer in graph.buffers.items()
    }
