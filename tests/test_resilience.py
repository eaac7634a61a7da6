"""Ranks that stop."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from tests.torchrun import PROGRAMS


@pytest.mark.parametrize("stopped", [0, 1])
def test_a_rank_that_is_stopped_ends_the_other_with_its_name(stopped: int) -> None:
    world = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    command = [sys.executable, str(PROGRAMS / "stops.py"), str(stopped)]
    processes = [
        subprocess.Popen(command, env=environment(RANK=str(r), **world), stderr=subprocess.PIPE, text=True)
        for r in range(2)
    ]
    try:
        deadline = time.monotonic() + 120
        while not is_stopped(processes[stopped].pid):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        began = time.monotonic()
        _, error = processes[1 - stopped].communicate(timeout=60)
    finally:
        processes[stopped].send_signal(signal.SIGKILL)
        processes[stopped].communicate()

    assert processes[1 - stopped].returncode == 1
    assert time.monotonic() - began < 20  # 4 s of silence, on a machine that may be busy
    who = "rank 1 (stage 1)" if stopped == 1 else "the process that holds the store"
    assert f"WorkerError: {who}" in error
    assert "no sign of life" in error
    assert f"seen by rank {1 - stopped} (stage {1 - stopped}), in update" in error


def environment(**more: str) -> dict[str, str]:
    path = os.pathsep.join([str(PROGRAMS.parents[1]), os.environ.get("PYTHONPATH", "")])
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path} | more


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
    return port


def is_stopped(pid: int) -> bool:
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] == "T"
