"""Nodes of a workload that must share a device: they have one colour, or lie on a cycle through colours."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import networkx as nx
import numpy as np

from pd2bw_fx.workload import Workload

from .instance import Flags, Floats


@dataclass(frozen=True, slots=True)
class Groups:
    """Groups of nodes, by number in a topological order of the forward graph.

    `members` has the ids of each group's nodes, `of` the group of each id; `edges` run between groups.
    """

    members: tuple[tuple[int, ...], ...]
    of: Mapping[int, int]
    edges: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, eq=False)
class Totals:
    """Sums over the nodes of each group. `is_barred` says that one of them runs on no accelerator."""

    accelerator_time: Floats
    cpu_time: Floats
    num_bytes: Floats
    is_barred: Flags


@dataclass(frozen=True, slots=True)
class RelaxedGroups:
    """Joined groups, and `asked`, the least that each of them costs its device in any assignment.

    `trees` are sets of the original groups that may be on an earlier device than the rest of their joined
    one.
    """

    groups: Groups
    asked: Totals
    trees: tuple[tuple[int, ...], ...] = ()


def groups_of(workload: Workload) -> Groups:
    """Makes one group of each colour, with the nodes that lie on a cycle through it."""
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
    """Yields pairs (u, v) such that u may not be on a later device than v: forward edges, and reversed edges
    of backward nodes without a forward partner to follow."""
    backward = {node.id for node in workload.nodes if node.is_backward}
    led = {node.color for node in workload.nodes if not node.is_backward and node.color is not None}
    alone = {node.id for node in workload.nodes if node.is_backward and node.color not in led}
    for edge in workload.edges:
        if edge.source not in backward and edge.target not in backward:
            yield edge.source, edge.target
        elif edge.source in backward and edge.target in backward and {edge.source, edge.target} & alone:
            yield edge.target, edge.source


def tensors_between(workload: Workload, groups: Groups) -> dict[tuple[int, ...], float]:
    """Returns what a device pays for each tensor that it has a part of, by the tensor's ends.

    Tensors with the same ends are added up, because the direction does not matter here.
    """
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


def totals(workload: Workload, groups: Groups) -> Totals:
    nodes, at = workload.nodes, [groups.of[node.id] for node in workload.nodes]

    def summed(amounts: Iterable[float]) -> Floats:
        return np.bincount(at, list(amounts), len(groups.members)).astype(np.float64)

    return Totals(
        accelerator_time=summed(node.accelerator_time for node in nodes),
        cpu_time=summed(node.cpu_time for node in nodes),
        num_bytes=summed(node.num_bytes for node in nodes),
        is_barred=summed(not node.on_accelerator for node in nodes) > 0,
    )


def joined(groups: Groups, leaders: Sequence[int]) -> Groups:
    """Each group with its leader. Leaders lead themselves, and come where they were."""
    number = {at: place for place, at in enumerate(sorted(set(leaders)))}
    members: list[list[int]] = [[] for _ in number]
    for at, nodes in enumerate(groups.members):
        members[number[leaders[at]]] += nodes
    edges = {(number[leaders[u]], number[leaders[v]]) for u, v in groups.edges}
    return Groups(
        members=tuple(tuple(nodes) for nodes in members),
        of={node: place for place, nodes in enumerate(members) for node in nodes},
        edges=tuple(sorted((u, v) for u, v in edges if u != v)),
    )
