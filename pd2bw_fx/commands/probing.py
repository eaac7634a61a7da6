"""The command that measures devices and links."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from pd2bw_fx.commands.common import check_writable, command
from pd2bw_fx.errors import UsageError
from pd2bw_fx.runtime.launcher import is_under_torchrun


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
    count = options.processes
    if is_under_torchrun():
        if count is not None:
            raise UsageError("torchrun has started the processes already; leave out --processes")
    elif count is not None and count < 1:
        raise UsageError(f"--processes is {count}; at least one was expected")
    else:
        check_writable(options.output)
    from pd2bw_fx.commands.work import probing, seeded

    return seeded(probing.probe_rank if is_under_torchrun() else probing.probe_here, options)
