"""Nodes of a workload that share a device: because they must, or because nothing is lost by it.

They must where they have one colour, or lie on a cycle through colours. Nothing is lost where a node has one
neighbour only, and takes no longer than the tensors between the two:

    device a    s               both devices pay for the tensor, and a for the node: with s beside w, none of
    device b      `-> w         them has more to do

Tensors that others have a part of as well are no obstacle, if the neighbour has one too: its device pays for
them in any case. Such a node goes with its neighbour, and then perhaps the next one of a chain: so does what
is made of weights alone before a layer reads it, which might stand wherever there is room for it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import networkx as nx

from pd2bw_fx.workload import Workload


@dataclass(frozen=True, slots=True)
class Groups:
    """In a topological order of the forward graph, with its edges between them."""

    members: tuple[tuple[int, ...], ...]
    of: Mapping[int, int]
    edges: tuple[tuple[int, int], ...]


def groups_of(workload: Workload) -> Groups:
    """Colours, and whatever lies on a cycle through them, as one group each."""
    keys = {
        node.id: ("id", node.id) if node.color is None else ("color", node.color) for node in workload.nodes
    }
    graph = nx.DiGraph()
    graph.add_nodes_from(dict.fromkeys(keys.values()))
    graph.add_edges_from((keys[u], keys[v]) for u, v in _order_edges(workload) if keys[u] != keys[v])
    condensed = nx.condensation(graph)
    index_of = condensed.graph["mapping"]
    place = {node.id: at for at, node in enumerate(workload.nodes)}
    ids: dict[int, list[int]] = {}
    for node in workload.nodes:
        ids.setdefault(index_of[keys[node.id]], []).append(node.id)
    order = list(nx.lexicographical_topological_sort(condensed, key=lambda c: min(place[i] for i in ids[c])))
    at = {component: number for number, component in enumerate(order)}
    return Groups(
        members=tuple(tuple(ids[component]) for component in order),
        of={node: at[component] for component, nodes in ids.items() for node in nodes},
        edges=tuple(sorted((at[u], at[v]) for u, v in condensed.edges)),
    )


def _order_edges(workload: Workload) -> Iterator[tuple[int, int]]:
    """Which node may not be behind which: forward edges, and, reversed, those of backward nodes that have no
    forward partner to follow."""
    backward = {node.id for node in workload.nodes if node.is_backward}
    led = {node.color for node in workload.nodes if not node.is_backward and node.color is not None}
    alone = {node.id for node in workload.nodes if node.is_backward and node.color not in led}
    for edge in workload.edges:
        if edge.source not in backward and edge.target not in backward:
            yield edge.source, edge.target
        elif edge.source in backward and edge.target in backward and {edge.source, edge.target} & alone:
            yield edge.target, edge.source


def tensors_between(workload: Workload, groups: Groups) -> dict[tuple[int, ...], float]:
    """What a device pays that has a part of these groups; tensors with the same ends are one, since the
    direction costs nothing here."""
    readers: dict[int, set[int]] = {}
    cost_of: dict[int, float] = {}
    for edge in workload.edges:
        readers.setdefault(edge.source, {groups.of[edge.source]}).add(groups.of[edge.target])
        cost_of[edge.source] = max(edge.cost, cost_of.get(edge.source, 0.0))
    together: dict[tuple[int, ...], float] = {}
    for source, ends in readers.items():
        if len(ends) > 1:
            key = tuple(sorted(ends))
            together[key] = together.get(key, 0.0) + cost_of[source]
    return together


def with_followers(workload: Workload, groups: Groups, *, with_cpus: bool) -> Groups:
    """Groups at the rim joined to their only neighbour, where no device has more to do then.

    A CPU pays for no tensor: beside one, only what takes none of its time is joined. Where memory may bind,
    only what takes none of that.
    """
    count = len(groups.members)
    total_bytes = sum(node.num_bytes for node in workload.nodes)
    work, cpu_work, num_bytes = [0.0] * count, [0.0] * count, [0.0] * count
    is_barred = [False] * count
    for node in workload.nodes:
        at = groups.of[node.id]
        work[at] += node.accelerator_time
        cpu_work[at] += node.cpu_time
        num_bytes[at] += node.num_bytes
        is_barred[at] |= not node.on_accelerator
    tensors: list[dict[tuple[int, ...], float]] = [{} for _ in range(count)]
    for ends, cost in tensors_between(workload, groups).items():
        for end in ends:
            tensors[end][ends] = cost
    before: list[set[int]] = [set() for _ in range(count)]
    after: list[set[int]] = [set() for _ in range(count)]
    for u, v in groups.edges:
        before[v].add(u)
        after[u].add(v)
    leader = list(range(count))
    waiting = list(range(count))
    while waiting:
        at = waiting.pop()
        neighbours = before[at] | after[at]
        if leader[at] != at or len(neighbours) != 1 or is_barred[at]:
            continue
        (other,) = neighbours
        saved = tensors[at].get((min(at, other), max(at, other)), 0.0)
        fits = num_bytes[at] == 0 or total_bytes <= workload.accelerator_bytes
        is_free = work[at] <= saved and (not with_cpus or cpu_work[at] == 0)
        if not fits or not is_free or any(other not in ends for ends in tensors[at]):
            continue
        leader[at] = other
        work[other] += work[at]
        cpu_work[other] += cpu_work[at]
        num_bytes[other] += num_bytes[at]
        before[other].discard(at)
        after[other].discard(at)
        _leave(tensors, at)
        waiting += {other, *(end for ends in tensors[at] for end in ends)} - {at}
    return _joined(groups, leader)


def _leave(tensors: Sequence[dict[tuple[int, ...], float]], at: int) -> None:
    """Nobody pays any more for what `at` alone had a part of beside one other group."""
    for ends, cost in tensors[at].items():
        rest = tuple(end for end in ends if end != at)
        for end in rest:
            del tensors[end][ends]
            if len(rest) > 1:
                tensors[end][rest] = cost + tensors[end].get(rest, 0.0)


def _joined(groups: Groups, leader: Sequence[int]) -> Groups:
    def root(at: int) -> int:
        while leader[at] != at:
            at = leader[at]
        return at

    roots = [root(at) for at in range(len(leader))]
    number = {at: place for place, at in enumerate(sorted(set(roots)))}
    members: list[list[int]] = [[] for _ in number]
    for at, nodes in enumerate(groups.members):
        members[number[roots[at]]] += nodes
    edges = {(number[roots[u]], number[roots[v]]) for u, v in groups.edges}
    return Groups(
        members=tuple(tuple(nodes) for nodes in members),
        of={node: place for place, nodes in enumerate(members) for node in nodes},
        edges=tuple(sorted((u, v) for u, v in edges if u != v)),
    )
