"""Planner inputs in the published JSON format of "Efficient Algorithms for Device Placement of DNN Graph
Operators" (arXiv 2006.16423): operators with their times on an accelerator and on a CPU, and edges."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import networkx as nx

from pd2bw_fx.errors import InputError

# What json makes of a file, as it is called there.
_KINDS = {
    dict: "an object", list: "a list", str: "a text", int: "a number", float: "a number",
    bool: "a truth value", type(None): "null",
}  # fmt: skip
_MOST_SHOWN = 8  # nodes of a cycle, in an error
_ROUNDING = 1e-6  # of costs, relative: files have few digits, and times in a unit of their own


@dataclass(frozen=True, slots=True)
class WorkloadNode:
    """An operator, with times in the file's own unit. Nodes of one `color` share a device (None: free)."""

    id: int
    accelerator_time: float
    cpu_time: float
    num_bytes: float
    on_accelerator: bool = True
    is_backward: bool = False
    color: int | str | None = None


@dataclass(frozen=True, slots=True)
class WorkloadEdge:
    """`cost` is the time to move the source's output between an accelerator and host memory."""

    source: int
    target: int
    cost: float


@dataclass(frozen=True, slots=True)
class Workload:
    """Nodes to place on accelerators of `accelerator_bytes` each, and CPUs without a memory limit."""

    name: str
    num_accelerators: int
    num_cpus: int
    accelerator_bytes: float
    nodes: tuple[WorkloadNode, ...]
    edges: tuple[WorkloadEdge, ...]


def read_workload(path: str | Path) -> Workload:
    """Reads and checks a workload file. Raises InputError naming the file and the entry that is wrong."""
    path = Path(path)
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InputError(f"workload {path} cannot be read: {error.strerror}") from error
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InputError(f"workload {path} is no valid JSON: {error}") from error
    try:
        return workload_from_json(data, name=path.stem)
    except InputError as error:
        raise InputError(f"workload {path}: {error}") from None


def workload_from_json(data: Any, *, name: str) -> Workload:
    """Returns a workload from the parsed file; all numbers and all ends of edges are checked."""
    table = _table("the file", data)
    nodes = tuple(_node(at, entry) for at, entry in enumerate(_list(table, "nodes")))
    if not nodes:
        raise InputError("nodes is empty; there is nothing to place")
    known = {node.id for node in nodes}
    if len(known) < len(nodes):
        ids = [node.id for node in nodes]
        raise InputError(f"two nodes have id {next(i for i in ids if ids.count(i) > 1)}; ids must differ")
    edges = tuple(_edge(at, entry, known) for at, entry in enumerate(_list(table, "edges")))
    _check_one_cost(edges)
    _check_no_cycle(edges)
    workload = Workload(
        name=name,
        num_accelerators=_count("maxFPGAs", table),
        num_cpus=_count("maxCPUs", table),
        accelerator_bytes=_amount("the file", "maxSizePerFPGA", table),
        nodes=nodes,
        edges=edges,
    )
    if workload.num_accelerators + workload.num_cpus == 0:
        raise InputError("maxFPGAs and maxCPUs are both 0; at least one device is needed")
    return workload


def _check_one_cost(edges: Sequence[WorkloadEdge]) -> None:
    """Raises InputError where a source's edges differ in cost: what is moved is its one output."""
    cost_of: dict[int, float] = {}
    for edge in edges:
        cost = cost_of.setdefault(edge.source, edge.cost)
        if not math.isclose(cost, edge.cost, rel_tol=_ROUNDING):
            raise InputError(
                f"moving the output of node {edge.source} costs {cost:g} on one edge and {edge.cost:g} on "
                "another; give all edges of one source the same cost"
            )


def _check_no_cycle(edges: Sequence[WorkloadEdge]) -> None:
    """Raises InputError where a node would read what comes of its own output. Colours may make cycles."""
    graph = nx.DiGraph((edge.source, edge.target) for edge in edges)
    if nx.is_directed_acyclic_graph(graph):
        return
    nodes = [source for source, _ in nx.find_cycle(graph)]
    path = " -> ".join(str(node) for node in [*nodes[:_MOST_SHOWN], *["..."][: len(nodes) - _MOST_SHOWN]])
    raise InputError(
        f"the edges {path} -> {nodes[0]} are a cycle, and none of these nodes could run first; leave one out"
    )


def _node(at: int, entry: Any) -> WorkloadNode:
    table = _table(f"nodes[{at}]", entry)
    where = f"nodes[{at}] (id {table.get('id')!r})"
    if not _is_whole(table.get("id")):
        raise InputError(f"nodes[{at}] has id {table.get('id')!r}; a whole number was expected")
    on_accelerator = _flag(where, "supportedOnFpga", table, missing=True)
    return WorkloadNode(
        id=table["id"],
        accelerator_time=_amount(where, "fpgaLatency", table) if on_accelerator else 0.0,
        cpu_time=_amount(where, "cpuLatency", table),
        num_bytes=_amount(where, "size", table),
        on_accelerator=on_accelerator,
        is_backward=_flag(where, "isBackwardNode", table, missing=False),
        color=_color(where, table),
    )


def _edge(at: int, entry: Any, known: set[int]) -> WorkloadEdge:
    table = _table(f"edges[{at}]", entry)
    for key in ("sourceId", "destId"):
        if not _is_whole(table.get(key)) or table[key] not in known:
            raise InputError(f"edges[{at}]: {key} is {table.get(key)!r}, and no node has that id")
    return WorkloadEdge(table["sourceId"], table["destId"], _amount(f"edges[{at}]", "cost", table))


def _table(where: str, value: Any) -> Mapping[str, Any]:
    if not isinstance(value, dict):
        raise InputError(f"{where} is {_KINDS[type(value)]}; an object was expected")
    return value


def _list(table: Mapping[str, Any], key: str) -> Sequence[Any]:
    value = table.get(key)
    if not isinstance(value, list):
        raise InputError(f"{key} is {'missing' if value is None else 'no list'}; a list was expected")
    return value


def _count(key: str, table: Mapping[str, Any]) -> int:
    value = table.get(key)
    if not _is_whole(value) or value < 0:
        found = "missing" if value is None else repr(value)
        raise InputError(f"{key} is {found}; a whole number of zero or more was expected")
    return value


def _flag(where: str, key: str, table: Mapping[str, Any], *, missing: bool) -> bool:
    value = table.get(key)
    if value is None:
        return missing
    if value not in (0, 1):
        raise InputError(f"{where}: {key} is {value!r}; 0, 1, true or false was expected")
    return bool(value)


def _color(where: str, table: Mapping[str, Any]) -> int | str | None:
    """Returns a node's color, a name for a class of nodes that go together; it is not an amount."""
    value = table.get("colorClass")
    if value is None or isinstance(value, str) or _is_whole(value):
        return value
    raise InputError(f"{where}: colorClass is {value!r}; a whole number or a name was expected")


def _is_whole(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _amount(where: str, key: str, table: Mapping[str, Any]) -> float:
    value = table.get(key)
    good = isinstance(value, int | float) and not isinstance(value, bool)
    if not good or not 0 <= value <= sys.float_info.max:  # type: ignore[operator]
        found = "missing" if value is None else repr(value)
        raise InputError(f"{where}: {key} is {found}; a finite number of zero or more was expected")
    return float(value)  # type: ignore[arg-type]
