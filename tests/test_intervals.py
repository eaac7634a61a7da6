"""Tables of intervals that several orders of the devices share."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest

from pd2bw_fx.passes.partition.instance import Instance, Net, SharedBytes
from pd2bw_fx.passes.partition.search import search_state
from pd2bw_fx.passes.partition.search.intervals import IntervalTables, best_cut, rough_cut
from pd2bw_fx.passes.partition.search.orders import topological_orders
from pd2bw_fx.workload import workload_from_json
from tests.drawn_workloads import choices_of


def drawn(seed: int) -> Instance:
    """Draws an instance with something of everything that its stages may differ in."""
    draw, numbers = random.Random(seed), np.random.default_rng(seed)
    k, n = draw.randint(2, 4), draw.randint(6, 14)
    edges = [(u, v) for v in range(n) for u in range(v) if draw.random() < 2 / n]
    readers = {u: tuple(v for w, v in edges if w == u) for u, _ in edges}
    nets = tuple(Net(u, of, draw.randint(0, 3)) for u, of in sorted(readers.items()))
    shared = SharedBytes(numbers.uniform(0, 5, k), draw.uniform(0, 2), tuple(draw.sample(range(n), 2)))
    return Instance(
        num_stages=k,
        edges=tuple(edges),
        work_s=numbers.uniform(1, 4, (k, n)),
        again_s=numbers.uniform(0, 1, (k, n)),
        nets=nets,
        cost_s=numbers.uniform(0, 3, (len(nets), k, k)),
        per_destination=draw.random() < 0.5,
        overlap=draw.random() < 0.5,
        recompute=draw.choice((False, True, "auto")),
        may_be_empty=draw.random() < 0.5,
        limit_bytes=numbers.uniform(10, 60, k),
        in_flight=numbers.integers(1, k + 1, k),
        static_bytes=numbers.uniform(0, 4, (k, n)),
        gradient_bytes=numbers.uniform(0, 2, n),
        gradients_wait=numbers.random(k) < 0.5,
        updates_each=numbers.random(k) < 0.5,
        flushes=numbers.random(k) < 0.5,
        saved_bytes=numbers.uniform(0, 2, n),
        workspace_bytes=numbers.uniform(0, 4, n),
        stepped_bytes=numbers.uniform(0, 8, n),
        shared=(shared,) if draw.random() < 0.5 else (),
        fixed_s=numbers.uniform(0, 2, k) if draw.random() < 0.5 else None,
        forbidden=numbers.random((k, n)) < 0.1 if draw.random() < 0.5 else None,
    )


def changed(instance: Instance, seed: int) -> Iterator[Instance]:
    """Yields instances that differ in one thing: the devices' order, or what an order leaves as it is."""
    other, turned = drawn(seed), list(range(instance.num_stages))[::-1]
    by_stage = ("work_s", "again_s", "limit_bytes", "in_flight", "static_bytes", "fixed_s", "forbidden")
    flags = ("gradients_wait", "updates_each", "flushes")
    for name in (*by_stage, *flags):
        of = getattr(instance, name)
        yield instance if of is None else replace(instance, **{name: of[turned]})
    yield replace(instance, cost_s=instance.cost_s[:, turned][:, :, turned])
    yield replace(
        instance, shared=tuple(replace(of, num_bytes=of.num_bytes[turned]) for of in instance.shared)
    )
    for name in ("gradient_bytes", "saved_bytes", "workspace_bytes", "stepped_bytes"):
        yield replace(instance, **{name: getattr(instance, name)[::-1].copy()})
    yield replace(instance, nets=tuple(replace(net, held_bytes=net.held_bytes + 2) for net in instance.nets))
    yield replace(instance, shared=tuple(replace(of, gradient_bytes=9.0) for of in instance.shared))
    yield replace(instance, shared=tuple(replace(of, nodes=(0, 1)) for of in instance.shared))
    yield replace(instance, recompute=other.recompute)
    yield replace(instance, overlap=not instance.overlap)
    yield replace(instance, may_be_empty=not instance.may_be_empty)


@pytest.mark.parametrize("max_bytes", [10**8, 5000, 0], ids=["all kept", "some kept", "none kept"])
@pytest.mark.parametrize("seed", range(30))
def test_tables_that_are_shared_cut_as_those_of_one_instance(seed: int, max_bytes: int) -> None:
    first = drawn(seed)
    tables = IntervalTables(max_bytes)

    for instance in (first, *changed(first, seed + 1), first):
        for order in topological_orders(instance):
            own, shared = best_cut(instance, order), best_cut(instance, order, tables)
            assert (own is None) == (shared is None)
            assert own is None or np.array_equal(own, shared)
            assert tables.kept.left_bytes >= 0 or max_bytes == 0


def row(length: int) -> object:
    nodes = [{"id": at, "fpgaLatency": 1 + at % 3, "cpuLatency": 9.0, "size": 1.0} for at in range(length)]
    edges = [{"sourceId": at, "destId": at + 1, "cost": 0.5} for at in range(length - 1)]
    return {"nodes": nodes, "edges": edges, "maxFPGAs": 3, "maxCPUs": 1, "maxSizePerFPGA": length}


@pytest.mark.parametrize("cut", [best_cut, rough_cut])
def test_another_order_of_devices_that_are_known_makes_no_table(cut: search_state.Cut) -> None:
    choices, orders = choices_of(workload_from_json(row(150), name="row"))
    assert [order.index(True) for order in orders] == [3, 2, 1, 0]
    tables, order, made = IntervalTables(), range(150), []

    for choice in range(4):
        before = tables.kept.num_made
        cut(choices[choice], order, tables)
        made.append(tables.kept.num_made - before)

    # Where intervals may not be, the links, two kinds of devices, and each stage's best ends; then those
    # ends alone that do not begin as an order before.
    assert made == [1 + 2 + 2 + 4, 2, 3, 4]
