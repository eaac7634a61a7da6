"""Finds running processes, for the tests of what starts and ends them."""

from __future__ import annotations

import subprocess

from pd2bw_fx.runtime import nursery


def children_of(parent: int) -> list[int]:
    """Returns the ids of the child processes in ascending order, which is that of their start."""
    with subprocess.Popen(["ps", "-eo", "ppid=,pid="], stdout=subprocess.PIPE, text=True) as listing:
        assert listing.stdout is not None
        pairs = [tuple(map(int, line.split())) for line in listing.stdout]
    return sorted(pid for ppid, pid in pairs if ppid == parent and pid != listing.pid)


def kept_process() -> subprocess.Popen[bytes]:
    """Returns the process that this process's workers are forked from; `conftest.py` keeps it."""
    assert nursery._kept is not None
    assert nursery._kept._process is not None
    return nursery._kept._process


def workers() -> list[int]:
    """Returns the workers' process ids by rank, which is the order of their start."""
    return children_of(kept_process().pid)
