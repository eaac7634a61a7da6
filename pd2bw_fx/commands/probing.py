"""The command that measures devices and links."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from pd2bw_fx.cluster import Cluster
from pd2bw_fx.commands.common import check_writable, command
from pd2bw_fx.errors import UsageError
from pd2bw_fx.probe import probe
from pd2bw_fx.runtime.world import World
from pd2bw_fx.train import is_under_torchrun, start_processes
from pd2bw_fx.units import format_bytes, format_seconds

_TIMEOUT_S = 300.0


def add(commands: Any) -> None:
    """probe"""
    probing = command(
        commands,
        "probe",
        "measure devices and links, with one process a device, and write the cluster file",
        "torchrun --nproc-per-node 4 -m pd2bw_fx probe -o cluster.toml, "
        "or pd2bw-fx probe --processes 2 -o cluster.toml on this machine alone",
    )
    probing.add_argument("-o", "--output", type=Path, required=True, help="cluster file to write, by rank 0")
    probing.add_argument(
        "--processes",
        type=int,
        help="how many to start here, without torchrun (default: the devices of this machine)",
    )
    probing.add_argument(
        "--device", choices=("cpu", "cuda"), help="what to measure (default: cuda where there is one)"
    )
    probing.add_argument(
        "--tolerance",
        type=float,
        default=0.1,
        help="figures that differ by a smaller share are written as equal (default 0.1)",
    )
    probing.set_defaults(run=_probe)


def _probe(options: argparse.Namespace) -> int:
    if not 0 <= options.tolerance < 1:
        raise UsageError(f"--tolerance is {options.tolerance}; a share from 0 to below 1 was expected")
    if not is_under_torchrun():
        return _probe_here(options)
    if options.processes is not None:
        raise UsageError("torchrun has started the processes already; leave out --processes")
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


def _probe_here(options: argparse.Namespace) -> int:
    """Runs the same command under torchrun."""
    count = len(Cluster.local()) if options.processes is None else options.processes
    if count < 1:
        raise UsageError(f"--processes is {count}; at least one was expected")
    if options.device == "cuda" and count > torch.cuda.device_count():
        raise UsageError(
            f"{count} processes on --device cuda, and there are {torch.cuda.device_count()} GPUs"
        )
    check_writable(options.output)
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
