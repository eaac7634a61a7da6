"""The planner's own view of a problem: plain numbers, for one order of the devices.

`reader.py` makes an `Instance` of a `Problem`, and `placement.py` makes one of a `Workload`. The search works
on instances alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt

Floats: TypeAlias = npt.NDArray[np.float64]
Flags: TypeAlias = npt.NDArray[np.bool_]
Integers: TypeAlias = npt.NDArray[np.int64]
Hops: TypeAlias = tuple[tuple[int, int], ...]  # (stage that sends, stage that is sent it)

_FAR_TARGETS = 1e4  # a time over so many targets is cut off


@dataclass(frozen=True, slots=True)
class Net:
    """A tensor, by the nodes that make and read it. A stage with some of these nodes, but not all, holds
    `held_bytes` of it for every microbatch in flight."""

    producer: int
    consumers: tuple[int, ...]
    held_bytes: int = 0

    @property
    def members(self) -> tuple[int, ...]:
        return (self.producer, *self.consumers)


@dataclass(frozen=True, slots=True, eq=False)
class SharedBytes:
    """Bytes that a stage holds once if it has one or more of `nodes`: `num_bytes[s]` on stage s, of which
    `gradient_bytes` are gradients."""

    num_bytes: Floats  # (k,)
    gradient_bytes: float
    nodes: tuple[int, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Instance:
    """Nodes 0..n-1 in a topological order, to be assigned to stages 0..k-1, each with a device.

    No edge may run to an earlier stage. `work_s[s, v]` is the time of node v on stage s, and `again_s[s, v]`
    that of its forward alone, which a recomputing stage runs twice. `fixed_s[s]` is what stage s does
    whatever nodes it has. `cost_s[e, s, t]` is what net e costs stage s where the other end is stage t: with
    `per_destination` the producer's stage pays once for each stage that reads the net, else once in all. With
    `overlap` the load of a stage is the larger of its work and its transfers, else their sum.

    `recompute` as a tuple, one flag for each stage, is for `evaluate` and not for a search.

    The memory of a stage is the larger of what it needs at two moments. S are its `static_bytes` and `shared`
    bytes, G the gradients among them, n = `in_flight`; K and H are the saved and the held bytes of one
    microbatch; W and P are the largest `workspace_bytes` and `stepped_bytes` of its nodes:

        it works on a microbatch    S + n (K + H) + W - A         recomputing: S + K + n H + W - A
        the optimizer steps         S + (n - gone) (K + H) + P    recomputing: S + (n - gone) H + P

    `gone` counts microbatches that are finished when the optimizer steps: n where the pipeline `flushes`,
    else 1. A counts bytes that are never there at the same time. With `gradients_wait` the gradients and one
    microbatch are not, and A is the smaller of the two, min(G, K + H). On a recomputing stage K is there only
    while its microbatch is worked on, so A = min(G, H), or min(G, K + H) if `updates_each`, where that is
    before there are gradients. Without `gradients_wait` A is 0.
    """

    num_stages: int
    edges: tuple[tuple[int, int], ...]
    work_s: Floats  # (k, n)
    again_s: Floats  # (k, n)
    nets: tuple[Net, ...]
    cost_s: Floats  # (nets, k, k)
    per_destination: bool
    overlap: bool
    recompute: bool | Literal["auto"] | tuple[bool, ...]
    may_be_empty: bool
    limit_bytes: Floats  # (k,)
    in_flight: Integers  # (k,)
    static_bytes: Floats  # (k, n)
    gradient_bytes: Floats  # (n,), of the static ones
    gradients_wait: Flags  # (k,)
    updates_each: Flags  # (k,)
    flushes: Flags  # (k,)
    saved_bytes: Floats  # (n,)
    workspace_bytes: Floats  # (n,)
    stepped_bytes: Floats  # (n,)
    shared: tuple[SharedBytes, ...] = ()
    fixed_s: Floats | None = None  # (k,); None: nothing
    forbidden: Flags | None = None  # (k, n): node v may not be on stage s
    hands_on: bool = False  # stages may send values that they did not make, where links make that cheaper

    @property
    def num_nodes(self) -> int:
        return int(self.work_s.shape[1])

    @property
    def besides_s(self) -> Floats:
        return np.zeros(self.num_stages) if self.fixed_s is None else self.fixed_s

    def load_s(self, compute_s: Floats, links_s: Floats) -> Floats:
        """Returns the loads of stages that compute for `compute_s` and use their links for `links_s`."""
        return np.maximum(compute_s, links_s) if self.overlap else compute_s + links_s


def within_reach(instance: Instance, target_s: float) -> Instance:
    """Returns an instance with the same assignments within the target, and no times far beyond it.

    Times are cut off at twice the target, which is out of reach as well. "Not on this device" is often
    written as 1e18 seconds, and differences of sums with such a term lose all that the sums have beside it.
    """
    times_s = (instance.work_s, instance.again_s, instance.cost_s)
    if target_s <= 0 or not any(of.max(initial=0.0) > _FAR_TARGETS * target_s for of in times_s):
        return instance
    work_s, again_s, cost_s = (np.minimum(of, 2 * target_s) for of in times_s)
    return replace(instance, work_s=work_s, again_s=again_s, cost_s=cost_s)


@dataclass(frozen=True, slots=True, eq=False)
class Loads:
    """What an assignment costs each stage, exactly. `fits` says that no stage is over its memory or has a
    forbidden node; `apart_bytes` is A of `Instance`, which the total does not have."""

    work_s: Floats
    again_s: Floats
    send_s: Floats
    receive_s: Floats
    static_bytes: Floats
    saved_bytes: Floats
    held_bytes: Floats
    workspace_bytes: Floats
    apart_bytes: Floats
    recompute: tuple[bool, ...]
    fits: bool
    load_s: Floats

    @property
    def bottleneck_s(self) -> float:
        return float(self.load_s.max())

    @property
    def memory_bytes(self) -> Floats:
        together = self.static_bytes + self.saved_bytes + self.held_bytes + self.workspace_bytes
        return together - self.apart_bytes


def evaluate(instance: Instance, stage_of: Integers, routes: Mapping[int, Hops] | None = None) -> Loads:
    """Returns times and memory of an assignment (the stage of every node), added up from scratch.

    `routes` has the hops, by net, of those nets that are not sent straight to each stage that reads them.
    """
    k = instance.num_stages
    nodes = np.arange(instance.num_nodes)
    work_s = _by_stage(stage_of, instance.work_s[stage_of, nodes], k) + instance.besides_s
    forward_s = _by_stage(stage_of, instance.again_s[stage_of, nodes], k)
    static = _by_stage(stage_of, instance.static_bytes[stage_of, nodes], k)
    gradients = _by_stage(stage_of, instance.gradient_bytes, k)
    for shared in instance.shared:
        holders = np.unique(stage_of[list(shared.nodes)])
        static[holders] += shared.num_bytes[holders]
        gradients[holders] += shared.gradient_bytes
    send_s, receive_s, one_held = _transfers(instance, stage_of, routes or {})
    workspace, stepped = np.zeros(k), np.zeros(k)
    np.maximum.at(workspace, stage_of, instance.workspace_bytes)
    np.maximum.at(stepped, stage_of, instance.stepped_bytes)
    kept = _by_stage(stage_of, instance.saved_bytes, k)
    held = one_held * instance.in_flight
    before = instance.updates_each * kept
    apart_kept = np.where(instance.gradients_wait, np.minimum(gradients, one_held + kept), 0.0)
    apart_again = np.where(instance.gradients_wait, np.minimum(gradients, one_held + before), 0.0)
    # The total below counts all n microbatches; at the step `num_gone` of them are finished.
    num_gone = np.where(instance.flushes, instance.in_flight, 1)
    work_kept = np.maximum(workspace, stepped - (num_gone * (one_held + kept) - apart_kept))
    work_again = np.maximum(workspace, stepped - (num_gone * one_held + kept - apart_again))
    fits_kept = static + kept * instance.in_flight + held + work_kept - apart_kept <= instance.limit_bytes
    if instance.recompute == "auto":
        # Recomputing only costs time, so a stage does it only where it does not fit without.
        recompute = ~fits_kept & (instance.in_flight > 1)
    else:
        recompute = np.broadcast_to(np.array(instance.recompute), (k,))
    saved = np.where(recompute, kept, kept * instance.in_flight)
    apart = np.where(recompute, apart_again, apart_kept)
    workspace = np.where(recompute, work_again, work_kept)
    again_s = np.where(recompute, forward_s, 0.0)
    allowed = instance.forbidden is None or not instance.forbidden[stage_of, nodes].any()
    return Loads(
        work_s=work_s,
        again_s=again_s,
        send_s=send_s,
        receive_s=receive_s,
        static_bytes=static,
        saved_bytes=saved,
        held_bytes=held,
        workspace_bytes=workspace,
        apart_bytes=apart,
        recompute=tuple(bool(flag) for flag in recompute),
        fits=bool((static + saved + held + workspace - apart <= instance.limit_bytes).all()) and allowed,
        load_s=instance.load_s(work_s + again_s, send_s + receive_s),
    )


def _by_stage(stage_of: Integers, amounts: Floats, num_stages: int) -> Floats:
    return np.bincount(stage_of, amounts, num_stages).astype(np.float64)


def _transfers(
    instance: Instance, stage_of: Integers, routes: Mapping[int, Hops]
) -> tuple[Floats, Floats, Floats]:
    """Returns the seconds that each stage sends and receives, and the bytes that it holds of tensors which
    cross its border, for one microbatch."""
    k = instance.num_stages
    send_s, receive_s, held = np.zeros(k), np.zeros(k), np.zeros(k)
    stages = stage_of.tolist()  # numbers of a list are read in a third of the time
    for index, net in enumerate(instance.nets):
        source, readers = stages[net.producer], net.consumers
        if len(readers) == 1 and stages[readers[0]] == source:  # most nets, for which no set is made
            continue
        targets = sorted({stages[node] for node in readers} - {source})
        if not targets:
            continue
        costs = instance.cost_s[index]
        if index in routes:
            hops = routes[index]
            held[[source, *(target for _, target in hops)]] += net.held_bytes
            for sender, target in hops:
                send_s[sender] += costs[sender, target]
                receive_s[target] += costs[target, sender]
            continue
        held[[source, *targets]] += net.held_bytes
        send_s[source] += (
            sum(costs[source, t] for t in targets) if instance.per_destination else costs[source, targets[0]]
        )
        for target in targets:
            receive_s[target] += costs[target, source]
    return send_s, receive_s, held


def direct_hops(net: Net, stage_of: Integers) -> Hops:
    """Returns the hops from the producer's stage to each other stage that reads the net."""
    source = int(stage_of[net.producer])
    readers = {int(stage_of[node]) for node in net.consumers} - {source}
    return tuple((source, reader) for reader in sorted(readers))


def respects_edges(instance: Instance, stage_of: Any) -> bool:
    """Returns whether no edge runs to an earlier stage, and no stage is empty that may not be."""
    stages = np.asarray(stage_of).tolist()
    forward = all(stages[u] <= stages[v] for u, v in instance.edges)
    used = len(set(stages))
    return forward and (instance.may_be_empty or used == instance.num_stages)
