"""From operators to blocks: the rules of what may be cut.

1. A view stays with what it views, an element with the tuple it is taken from: what is sent is memory of
   its own, and nobody writes into it from two sides.
2. Operators of one memory group (running statistics, in-place clusters) stay together.
3. What depends on inputs and sizes alone and is computed sooner than sent (masks, positions, casts of inputs)
   belongs to no block: each stage that reads it computes it. Its time counts for the first block that reads
   it; what the backward keeps of it, and of inputs, is shared out over the blocks that keep it.
4. What no output depends on (a draw kept for the draws after it, a count of batches) stays with the last of
   what it reads, or with what comes next: a stage of such operators alone would have nothing to give.
5. What would make the blocks a cycle is one block.

Nothing else is joined: every cut that these rules allow is still there for the planner.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Iterable, Mapping, Sequence
from numbers import Real
from typing import Any

import networkx as nx

from pd2bw_fx.cluster import Cluster, Device
from pd2bw_fx.costs import Costs, OperatorCost, Work
from pd2bw_fx.errors import InputError, shown
from pd2bw_fx.graph import Operator, OperatorGraph
from pd2bw_fx.problem import Block, ParameterSize, Problem, Value


def coarsen(graph: OperatorGraph, costs: Costs, cluster: Cluster) -> Problem:
    """The planner's input. Blocks are in a topological order, operators inside a block in program order.

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
    blocks = tuple(
        _block(operators, copied[operators[0]], saved_bytes[operators[0]], graph, costs, cluster)
        for operators in members
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
    """Costs may be the user's own. What the planner can do with a number it says itself."""
    for key in ("forward_s", "backward_s", "saved_bytes", "workspace_bytes"):
        value: Any = getattr(cost, key)
        if isinstance(value, bool) or not isinstance(value, Real):
            raise InputError(
                f"the costs of operator {name!r}: {key} is {shown(value)}; a number of "
                f"{'seconds' if key.endswith('_s') else 'bytes'} was expected"
            )


def _needed(graph: OperatorGraph) -> set[str]:
    """The operators that some output depends on."""
    needed = {output.value for output in graph.outputs}
    for operator in reversed(list(graph.operators.values())):
        if operator.name in needed:
            needed.update(operator.reads)
    return needed


def _joined(placed: Sequence[Operator], needed: Container[str]) -> list[list[str]]:
    """Rules 1, 2 and 4, as the connected components of what belongs together."""
    together: nx.Graph[str] = nx.Graph()
    together.add_nodes_from(operator.name for operator in placed)
    groups: dict[str, str] = {}
    for operator in placed:
        if operator.is_view or operator.target.endswith("getitem"):
            together.add_edges_from((operator.name, read) for read in operator.reads[:1] if read in together)
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


def _acyclic(components: Iterable[Sequence[str]], graph: OperatorGraph) -> list[list[str]]:
    """Rule 5: components that depend on one another both ways become one."""
    component_of = {name: index for index, names in enumerate(components) for name in names}
    condensed = nx.condensation(_quotient(component_of, graph))
    inside = defaultdict(list)
    for name, index in component_of.items():
        inside[condensed.graph["mapping"][index]].append(name)
    return list(inside.values())


def _ordered(components: Sequence[Sequence[str]], graph: OperatorGraph) -> list[tuple[str, ...]]:
    """Components in a topological order, the one that begins first in the program first."""
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
    """What each placed operator reads of others that are: also by what its stage makes of them and of inputs.

    Sizes are read off whatever tensor a stage has.
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
    """What belongs to no block, by the first block that it is computed for.

    Other stages that read it compute it too; which those are the planner would have to ask for each.
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
    """What each block keeps for the backward.

    Of an input, or of what is made of inputs alone, each stage has its own, however many of its blocks keep
    it. Where there are more such blocks than stages, each counts for a share: as many copies together as
    there are stages, spread as the blocks are.
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
        parameters=tuple(dict.fromkeys(read)),
        saved_bytes=round(saved_bytes),
        workspace_bytes=max(cost.workspace_bytes for cost in own),
    )


def _on(device: Device, first: Device, seconds: float, work: Work | None) -> float:
    """An operator's time on a device: by its speed, or where times are estimates by the rates it states."""
    rates = device.flops_per_s, device.memory_bytes_per_s
    if work is None or rates == (first.flops_per_s, first.memory_bytes_per_s):
        return seconds / device.speed
    return seconds + device.roof_s(*work) - first.roof_s(*work)


def _values(placed: Sequence[Operator], block_of: Mapping[str, str], graph: OperatorGraph) -> Iterable[Value]:
    """What one block makes and others read; model inputs are none, for every stage loads its own."""
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
    sizes = {
        name: ParameterSize(trainable_bytes=parameter.spec.num_bytes)
        if parameter.trainable
        else ParameterSize(frozen_bytes=parameter.spec.num_bytes)
        for name, parameter in graph.parameters.items()
    }
    return sizes | {
        name: ParameterSize(frozen_bytes=buffer.spec.num_bytes) for name, buffer in graph.buffers.items()
    }
