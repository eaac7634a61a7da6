"""Branchy graphs with drawn costs, as problems on a cluster and as workloads in the published form, and
published workloads with other costs."""

from __future__ import annotations

import random
from dataclasses import replace

from pd2bw_fx.problem import Block, Problem, Value
from pd2bw_fx.workload import Workload, WorkloadEdge, WorkloadNode


class Drawn:
    """A graph under construction; times in milliseconds and sizes in megabytes are drawn, seed fixed."""

    def __init__(self, seed: int) -> None:
        self.draw = random.Random(seed)
        self.blocks: list[Block] = []
        self.readers: dict[str, list[str]] = {}
        self.bytes: dict[str, int] = {}

    def add(self, *reads: str, ms: float = 1.0, mb: float = 4.0) -> str:
        name = f"op{len(self.blocks)}"
        forward_s = ms * 1e-3 * self.draw.uniform(0.3, 1.7)
        self.blocks.append(Block(name, (name,), (forward_s,) * 16, (2 * forward_s,) * 16))
        self.bytes[name] = int(mb * 1e6 * self.draw.uniform(0.5, 1.5))
        self.readers[name] = []
        for read in dict.fromkeys(reads):
            self.readers[read].append(name)
        return name

    def chain(self, read: str, length: int, *, ms: float = 1.0, mb: float = 4.0) -> str:
        for _ in range(length):
            read = self.add(read, ms=ms, mb=mb)
        return read

    def problem(self, num_devices: int) -> Problem:
        blocks = tuple(
            replace(b, forward_s=b.forward_s[:num_devices], backward_s=b.backward_s[:num_devices])
            for b in self.blocks
        )
        values = tuple(
            Value(name, name, tuple(readers), self.bytes[name], self.bytes[name])
            for name, readers in self.readers.items()
            if readers
        )
        return Problem(blocks, values, {})

    def workload(self, name: str, num_accelerators: int) -> Workload:
        """The same as the published planners have it: both directions in one, ten times as long on a CPU."""
        number = {block.name: at for at, block in enumerate(self.blocks)}
        times_s = [block.forward_s[0] + block.backward_s[0] for block in self.blocks]
        nodes = tuple(WorkloadNode(at, time_s, 10 * time_s, 0.0) for at, time_s in enumerate(times_s))
        edges = tuple(
            WorkloadEdge(number[source], number[reader], 2 * self.bytes[source] / 12e9)
            for source, readers in self.readers.items()
            for reader in readers
        )
        return Workload(name, num_accelerators, 1, 1.0, nodes, edges)


def altered(
    workload: Workload, seed: int, *, transfers: float = 1.0, share_of_memory: float | None = None
) -> Workload:
    """Every time and transfer half to one and a half times what it was, transfers `transfers` times that.

    `share_of_memory`: each accelerator has so much of its even share of all nodes' bytes.
    """
    draw = random.Random(seed)
    nodes = []
    for node in workload.nodes:
        factor = draw.uniform(0.5, 1.5)
        times = node.accelerator_time * factor, node.cpu_time * factor
        nodes.append(replace(node, accelerator_time=times[0], cpu_time=times[1]))
    of_source = {source: draw.uniform(0.5, 1.5) for source in dict.fromkeys(e.source for e in workload.edges)}
    edges = [replace(edge, cost=edge.cost * transfers * of_source[edge.source]) for edge in workload.edges]
    memory = workload.accelerator_bytes
    if share_of_memory is not None:
        memory = share_of_memory * sum(n.num_bytes for n in nodes) / workload.num_accelerators
    return replace(workload, nodes=tuple(nodes), edges=tuple(edges), accelerator_bytes=memory)


def two_towers(seed: int = 0) -> Drawn:
    drawn = Drawn(seed)
    start = drawn.add()
    towers = []
    for length, ms in ((60, 1.0), (80, 0.6)):
        hidden = start
        for _ in range(length):
            inner = drawn.chain(hidden, 3, ms=ms)
            hidden = drawn.add(hidden, inner, ms=0.1)
        towers.append(hidden)
    drawn.chain(drawn.add(*towers), 20)
    return drawn


def cells(seed: int = 1) -> Drawn:
    """Search cells: five nodes with two drawn inputs each; two cells feed the next."""
    drawn = Drawn(seed)
    before, last = drawn.add(), drawn.add()
    for _ in range(24):
        nodes = [before, last]
        for _ in range(5):
            sides = [drawn.chain(read, 1) for read in drawn.draw.sample(nodes, 2)]
            nodes.append(drawn.add(*sides, ms=0.1))
        before, last = last, drawn.add(*nodes[2:], ms=0.3, mb=8)
    return drawn


def u_net(seed: int = 2) -> Drawn:
    drawn = Drawn(seed)
    hidden, skips = drawn.add(), []
    for level in range(5):
        hidden = drawn.chain(hidden, 24, mb=16 / 2**level)
        skips.append(hidden)
    hidden = drawn.chain(hidden, 20, mb=0.5)
    for level in reversed(range(5)):
        hidden = drawn.chain(drawn.add(hidden, skips[level], mb=16 / 2**level), 24, mb=16 / 2**level)
    return drawn


def encoder_decoder(seed: int = 3) -> Drawn:
    drawn = Drawn(seed)
    source, target = drawn.add(), drawn.add()

    def layer(hidden: str, *memory: str) -> str:
        for reads in ((), memory) if memory else ((),):
            parts = [drawn.chain(read, 2, ms=0.7) for read in (hidden, *(reads or (hidden,)))]
            hidden = drawn.add(hidden, drawn.chain(drawn.add(*parts), 3), ms=0.1)
        return drawn.add(hidden, drawn.chain(hidden, 5, ms=1.5, mb=12), ms=0.1)

    for _ in range(24):
        source = layer(source)
    for _ in range(24):
        target = layer(target, source)
    drawn.chain(target, 3)
    return drawn


def inception(seed: int = 4) -> Drawn:
    """Modules of four branches of unlike lengths, each of three operators a convolution."""
    drawn = Drawn(seed)
    hidden = drawn.chain(drawn.add(mb=60), 17, ms=2.0, mb=60)
    for lengths, mb in (
        (((3, 6, 9, 4), 12.0),) * 3 + (((3, 9, 15, 4), 6.0),) * 4 + (((3, 9, 12, 4), 3.0),) * 2
    ):
        branches = [drawn.chain(hidden, length, ms=0.7, mb=mb) for length in lengths]
        hidden = drawn.add(*branches, ms=0.1, mb=4 * mb)
    return drawn


def dense(seed: int = 5) -> Drawn:
    """Every layer of a block reads all layers before it."""
    drawn = Drawn(seed)
    hidden = drawn.add(mb=8)
    for _ in range(4):
        layers = [hidden]
        for _ in range(24):
            layers.append(drawn.chain(drawn.add(*layers, ms=0.3, mb=6), 2, mb=2))
        hidden = drawn.add(*layers, ms=0.5, mb=8)
    return drawn


def mixture(seed: int = 6) -> Drawn:
    """Blocks of attention and eight experts that a gate chooses from."""
    drawn = Drawn(seed)
    hidden = drawn.add()
    for _ in range(24):
        parts = [drawn.add(hidden, ms=0.3) for _ in range(3)]
        hidden = drawn.add(hidden, drawn.chain(drawn.add(*parts), 3, mb=8), ms=0.1)
        gate = drawn.add(hidden, ms=0.1, mb=0.1)
        experts = [drawn.chain(drawn.add(hidden, gate, ms=0.5, mb=2), 2, ms=0.5, mb=2) for _ in range(8)]
        hidden = drawn.add(hidden, drawn.add(*experts, gate, ms=0.2), ms=0.1)
    return drawn


def recurrent(seed: int = 7) -> Drawn:
    """Eight layers of cells, each of which reads the layer below and the step before."""
    drawn = Drawn(seed)
    below = [drawn.add(ms=0.1) for _ in range(40)]
    for _ in range(8):
        layer: list[str] = []
        for read in below:
            layer.append(drawn.add(read, *layer[-1:], mb=1))
        below = layer
    return drawn


def layered(seed: int = 8, *, narrowest: int = 1, widest: int = 4, num_nodes: int = 2000) -> Drawn:
    """Rows of one to four operators, or of other widths. Each reads one or two of the row before, now and
    then one further back; what nothing has read is read by the next row's first."""
    drawn = Drawn(seed)
    rows = [[drawn.add()]]
    while len(drawn.blocks) < num_nodes:
        before = rows[-1]
        row = []
        for _ in range(drawn.draw.randint(narrowest, widest)):
            reads = drawn.draw.sample(before, min(len(before), drawn.draw.randint(1, 2)))
            if drawn.draw.random() < 0.1:
                reads.append(drawn.draw.choice(rows[-min(len(rows), drawn.draw.randint(2, 10))]))
            if not row:
                reads += [name for name in before if not drawn.readers[name]]
            row.append(drawn.add(*reads))
        rows.append(row)
    return drawn


def wide(seed: int = 1) -> Drawn:
    """Rows of four to eight operators: far more down-sets than can be listed."""
    return layered(seed, narrowest=4, widest=8, num_nodes=300)


BRANCHY = {"two towers": two_towers, "cells": cells, "u-net": u_net, "encoder-decoder": encoder_decoder}
MORE = {
    "inception": inception,
    "dense": dense,
    "mixture of experts": mixture,
    "recurrent": recurrent,
    "layered": layered,
    "wide": wide,
}
