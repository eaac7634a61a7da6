"""Measures devices and links."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from pd2bw_fx.cluster import Cluster
from pd2bw_fx.commands.common import check_writable
from pd2bw_fx.errors import UsageError
from pd2bw_fx.probe import probe
from pd2bw_fx.rank_processes import start_processes
from pd2bw_fx.runtime.world import World
from pd2bw_fx.units import format_bytes, format_seconds

_TIMEOUT_S = 300.0


def probe_rank(options: argparse.Namespace) -> int:
    """Measures as one of the processes that torchrun has started."""
    is_first = int(os.environ["RANK"]) == 0
    if is_first:
        check_writable(options.output)
    world = World(timeout_s=_TIMEOUT_S)
    try:
        kind = options.device or ("cuda" if torch.cuda.is_available() else "cpu")
        cluster = probe(kind, tolerance=options.tolerance)
    finally:
        world.leave()
    if is_first:
        _write(cluster, options.output)
        _print(cluster, Console())
        print(f"{options.output} written")
    return 0


def probe_here(options: argparse.Namespace) -> int:
    """Runs the same command under torchrun."""
    count = len(Cluster.local()) if options.processes is None else options.processes
    if options.device == "cuda" and count > torch.cuda.device_count():
        raise UsageError(
            f"{count} processes on --device cuda, and there are {torch.cuda.device_count()} GPUs"
        )
    given = sys.argv[1:] if options.arguments is None else list(options.arguments)
    kept = [entry for entry in given if not entry.startswith("--processes=")]
    if "--processes" in kept:
        at = kept.index("--processes")
        del kept[at : at + 2]
    start_processes(count, kept)
    return 0


def _write(cluster: Cluster, path: Path) -> None:
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    fresh.write_text(cluster.to_toml(), encoding="utf-8")
    fresh.replace(path)


def _print(cluster: Cluster, console: Console) -> None:
    table = Table("device", "memory", "speed", "operations/s", "bytes/s of memory")
    for device in cluster.devices:
        rates = (f"{device.flops_per_s:.3g}", f"{device.memory_bytes_per_s:.3g}")
        table.add_row(device.name, format_bytes(device.memory_bytes), f"{device.speed:.3g}", *rates)
    console.print(table)
    if len(cluster) == 1:
        return
    links = Table("from \\ to", *(device.name for device in cluster.devices), title="latency, bytes/s")
    for a, device in enumerate(cluster.devices):
        cells = [
            "" if a == b else f"{format_seconds(cluster.latency_s[a][b])}, {cluster.bytes_per_s[a][b]:.3g}"
            for b in range(len(cluster))
        ]
        links.add_row(device.name, *cells)
    console.print(links)
