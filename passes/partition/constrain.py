"""Applies a user's constraints to the problem: joins blocks, pins blocks, caps memory.

Constraints that contradict one another, or the order of the graph, are refused here. Those that only memory
limits forbid are left to the search.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import networkx as nx

from pd2bw_fx.cluster import Cluster
from pd2bw_fx.constraints import Constraints
from pd2bw_fx.errors import InputError
from pd2bw_fx.problem import Block, Problem, Value
from pd2bw_fx.units import are, counted, parse_bytes


@dataclass(frozen=True, slots=True)
class Pin:
    """A block that may only be on `stage`, or on the stage of one of `devices`.

    For messages: `name` is what the user called the block, `on` says which devices these are, and `together`
    what the user keeps together with it.
    """

    block: str
    name: str
    stage: int | None = None
    devices: tuple[int, ...] | None = None
    together: tuple[str, ...] = ()
    on: str = ""

    def allows(self, stage: int, device: int) -> bool:
        is_here = self.devices is None or device in self.devices
        return is_here and (self.stage is None or self.stage == stage)

    @property
    def where(self) -> str:
        if self.devices is None:
            return f"stage {self.stage}"
        return self.on


@dataclass(frozen=True, slots=True)
class Constrained:
    """The problem and the cluster with the constraints applied, and the pins that are left for the search."""

    problem: Problem
    cluster: Cluster
    pins: tuple[Pin, ...]


def constrain(
    problem: Problem, cluster: Cluster, constraints: Constraints, *, num_stages: int
) -> Constrained:
    """Applies constraints. Raises InputError for an unknown name, and for constraints that contradict."""
    limited = capped(cluster, constraints.memory_bytes)
    if not (constraints.stage_of or constraints.device_of or constraints.together or constraints.whole):
        return Constrained(problem, limited, ())
    names = _Names(problem)
    groups = [names.blocks(entry) for entry in constraints.together]
    wishes = [" and ".join(map(repr, entry)) for entry in constraints.together]
    for pattern in constraints.whole:
        modules = list(names.modules(pattern))
        groups += modules
        wishes += [f"all of {pattern!r}"] * len(modules)
    joined, joined_name = _joined(problem, groups)
    together: dict[str, list[str]] = {}
    for group, called in zip(groups, wishes, strict=True):
        if group:
            together.setdefault(joined_name[group[0]], []).append(called)

    def pinned(name: str, stage: int | None, devices: tuple[int, ...] | None) -> list[Pin]:
        blocks = _renamed(names.blocks((name,)), joined_name)
        on = _shown(cluster, devices or ())
        return [Pin(block, name, stage, devices, tuple(together.get(block, ())), on) for block in blocks]

    pins = []
    for name, stage in constraints.stage_of.items():
        if isinstance(stage, bool) or not isinstance(stage, int) or not 0 <= stage < num_stages:
            raise InputError(f"{name!r} is pinned to stage {stage!r}; the stages are 0 to {num_stages - 1}")
        pins += pinned(name, stage, None)
    for name, given in constraints.device_of.items():
        pins += pinned(name, None, devices_meant(cluster, given))
    _check_pins(joined, limited, pins)
    left = len(joined.blocks)
    if left < num_stages:
        raise InputError(
            f"with what is to stay together {counted(left, 'block')} {are(left)} left for "
            f"{counted(num_stages, 'stage')}; "
            f"keep less together, or use num_stages={left}"
        )
    return Constrained(joined, limited, tuple(pins))


class _Names:
    """Looks up what a name means: an operator, or the path of a module."""

    def __init__(self, problem: Problem) -> None:
        self.block_of = {name: block.name for block in problem.blocks for name in block.operators}
        self.module_of = problem.module_of
        self.paths: dict[str, list[str]] = {}
        for operator, path in problem.module_of.items():
            parts = path.split(".") if path else []
            for end in range(1, len(parts) + 1):
                self.paths.setdefault(".".join(parts[:end]), []).append(operator)

    def blocks(self, names: Sequence[str]) -> list[str]:
        """Returns the blocks of all operators that the names mean."""
        if isinstance(names, str):
            raise InputError(f"together has {names!r}, one name; give tuples of names, or use whole")
        found = []
        for name in names:
            operators = [name] if name in self.block_of else self._of_modules(name)
            found += [self.block_of[operator] for operator in operators if operator in self.block_of]
        return list(dict.fromkeys(found))

    def modules(self, pattern: str) -> Iterable[list[str]]:
        """Yields the blocks of each module that the pattern matches."""
        for path in self._matching(pattern):
            yield list(dict.fromkeys(self.block_of[o] for o in self.paths[path] if o in self.block_of))

    def _of_modules(self, pattern: str) -> list[str]:
        return [operator for path in self._matching(pattern) for operator in self.paths[path]]

    def _matching(self, pattern: str) -> list[str]:
        expression = re.compile(r"[^.]*".join(re.escape(part) for part in pattern.split("*")))
        matching = [path for path in self.paths if expression.fullmatch(path)]
        if matching:
            return matching
        close = difflib.get_close_matches(pattern, self._like(pattern), n=3)
        hint = f"did you mean {' or '.join(map(repr, close))}?" if close else "see OperatorGraph.operators"
        if re.search(r"[*?\[]", pattern):
            hint = f"`*` stands for one part of a path, and there is no other wildcard; {hint}"
        raise InputError(f"no operator and no module with operators is called {pattern!r}; {hint}")

    def _like(self, pattern: str) -> list[str]:
        """Returns the names there are, with the pattern's `*` in the same places of a path."""
        wanted = pattern.split(".")
        found = list(self.block_of)
        for path in self.paths:
            parts = path.split(".")
            if len(parts) == len(wanted):
                parts = ["*" if own == "*" else part for own, part in zip(wanted, parts, strict=True)]
            found.append(".".join(parts))
        return list(dict.fromkeys(found))


def _renamed(blocks: Iterable[str], joined_name: Mapping[str, str]) -> list[str]:
    return list(dict.fromkeys(joined_name[block] for block in blocks))


def devices_meant(cluster: Cluster, given: str | int | Sequence[str | int]) -> tuple[int, ...]:
    """Returns the indices of one or several devices, given by name or index. Raises InputError for others."""
    several = given if isinstance(given, tuple | list) else (given,)
    return tuple(_device(cluster, one) for one in several)


def _shown(cluster: Cluster, devices: Sequence[int]) -> str:
    if len(devices) == 1:
        return f"device {devices[0]}"
    return f"one of {', '.join(cluster.devices[device].name for device in devices)}"


def _device(cluster: Cluster, given: Any) -> int:
    names = [device.name for device in cluster.devices]
    if isinstance(given, int) and not isinstance(given, bool) and 0 <= given < len(names):
        return given
    if given in names:
        return names.index(str(given))
    if isinstance(given, str) and given.isdecimal() and int(given) < len(names):
        return int(given)  # a key of a TOML file is a text
    raise InputError(f"the cluster has no device {given!r}; it has {', '.join(names)}")


def capped(cluster: Cluster, memory_bytes: Mapping[str | int, int | str]) -> Cluster:
    """Returns the cluster with at most so much memory on these devices."""
    devices = list(cluster.devices)
    for given, cap in memory_bytes.items():
        at = _device(cluster, given)
        try:
            num_bytes = parse_bytes(cap)
        except ValueError as error:
            raise InputError(f"memory_bytes of {given!r}: {error}") from None
        if num_bytes <= 0:
            raise InputError(f"memory_bytes of {given!r} is {cap!r}; a positive amount was expected")
        devices[at] = replace(devices[at], memory_bytes=min(devices[at].memory_bytes, num_bytes))
    return replace(cluster, devices=tuple(devices))


def _joined(problem: Problem, groups: Iterable[Sequence[str]]) -> tuple[Problem, dict[str, str]]:
    """Joins each group, and all that lies between two of its blocks, into one block. Returns the problem, and
    the new name of each block."""
    graph: nx.DiGraph[str] = nx.DiGraph()
    graph.add_nodes_from(block.name for block in problem.blocks)
    graph.add_edges_from((v.producer, reader) for v in problem.values for reader in v.consumers)
    for group in groups:
        graph.add_edges_from((group[0], other) for other in group[1:])
        graph.add_edges_from((other, group[0]) for other in group[1:])
    members: dict[str, list[Block]] = {}
    name_of: dict[str, str] = {}
    component = nx.condensation(graph).graph["mapping"]
    first: dict[int, str] = {}
    for block in problem.blocks:
        name_of[block.name] = first.setdefault(component[block.name], block.name)
        members.setdefault(name_of[block.name], []).append(block)
    blocks = tuple(_one_block(together) for together in members.values())
    values = (_between(value, name_of) for value in problem.values)
    kept = tuple(value for value in values if value is not None)
    return replace(problem, blocks=blocks, values=kept), name_of


def _one_block(blocks: Sequence[Block]) -> Block:
    if len(blocks) == 1:
        return blocks[0]
    return Block(
        name=blocks[0].name,
        operators=tuple(operator for block in blocks for operator in block.operators),
        forward_s=tuple(map(sum, zip(*(block.forward_s for block in blocks), strict=True))),
        backward_s=tuple(map(sum, zip(*(block.backward_s for block in blocks), strict=True))),
        parameters=tuple(dict.fromkeys(name for block in blocks for name in block.parameters)),
        saved_bytes=sum(block.saved_bytes for block in blocks),
        workspace_bytes=max(block.workspace_bytes for block in blocks),
    )


def _between(value: Value, name_of: Mapping[str, str]) -> Value | None:
    producer = name_of[value.producer]
    consumers = tuple(dict.fromkeys(name_of[name] for name in value.consumers))
    left = tuple(name for name in consumers if name != producer)
    return replace(value, producer=producer, consumers=left) if left else None


def _check_pins(problem: Problem, cluster: Cluster, pins: Sequence[Pin]) -> None:
    """Refuses pins of a block to two stages or devices, and of a reader before what it reads."""
    of_block: dict[str, list[Pin]] = {}
    for pin in pins:
        for other in of_block.setdefault(pin.block, []):
            _check_pair(cluster, pin, other)
        of_block[pin.block].append(pin)
    graph: nx.DiGraph[str] = nx.DiGraph()
    graph.add_edges_from((v.producer, reader) for v in problem.values for reader in v.consumers)
    staged = {pin.block: pin for pin in pins if pin.stage is not None}
    for block, pin in staged.items():
        for later in nx.descendants(graph, block) & staged.keys() if block in graph else ():
            other = staged[later]
            if (other.stage or 0) < (pin.stage or 0):
                raise InputError(
                    f"{other.name!r} is pinned to stage {other.stage} but its {later!r} reads what "
                    f"{pin.name!r}, pinned to stage {pin.stage}, computes in {block!r}; "
                    "nothing runs to an earlier stage"
                )


def _check_pair(cluster: Cluster, pin: Pin, other: Pin) -> None:
    if None not in (pin.stage, other.stage) and pin.stage != other.stage:
        what = f"stage {other.stage} as {other.name!r} and to stage {pin.stage} as {pin.name!r}"
    elif pin.devices is not None and other.devices is not None and not {*pin.devices} & {*other.devices}:
        names = [" or ".join(cluster.devices[d].name for d in each) for each in (other.devices, pin.devices)]
        what = f"{names[0]} as {other.name!r} and to {names[1]} as {pin.name!r}"
    else:
        return
    kept = f"; {', '.join(dict.fromkeys(pin.together))} are kept together" if pin.together else ""
    raise InputError(f"{pin.block!r} is pinned to {what}{kept}")
