"""Nodes of a workload that must share a device: they have one colour, or lie on a cycle through colours."""

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


def joined(groups: Groups, leader: Sequence[int]) -> Groups:
    """Each group with its leader, or that one's; leaders lead themselves, and come where they were."""

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
