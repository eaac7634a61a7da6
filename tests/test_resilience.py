"""Ranks that stop, runs that torchrun begins again, and nodes that meet."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.torchrun import PROGRAMS, torchrun


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


def test_torchrun_begins_again_from_the_last_checkpoint(tmp_path: Path) -> None:
    for name in ("whole", "broken"):
        (tmp_path / name).mkdir()
    whole = torchrun(2, "resumes.py", tmp_path / "whole", tmp_path / "others", "6")
    assert whole.returncode == 0, whole.stderr

    restarted = torchrun(
        2, "resumes.py", tmp_path / "broken", tmp_path / "saved", "6", "4", options=("--max-restarts", "1")
    )

    assert restarted.returncode == 0, restarted.stderr
    expected, found = (json.loads((tmp_path / n / "losses.json").read_text()) for n in ("whole", "broken"))
    assert found["first"] == 2
    assert found["losses"] == expected["losses"][2:]


def test_two_nodes_meet_and_train_as_one_does(tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    one = torchrun(2, "resumes.py", tmp_path / "one", tmp_path / "others", "3")
    assert one.returncode == 0, one.stderr

    address = f"127.0.0.1:{free_port()}"
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", "2", "--nproc-per-node", "1"]
    command += ["--rdzv-backend", "c10d", "--rdzv-endpoint", address]
    program = [str(PROGRAMS / "resumes.py"), str(tmp_path / "two"), str(tmp_path / "saved"), "3"]
    nodes = [
        subprocess.Popen(
            [*command, "--local-addr", f"127.0.0.{node + 1}", *program],
            env=environment(GLOO_SOCKET_IFNAME="lo"),
            stderr=subprocess.PIPE,
            text=True,
        )
        for node in range(2)
    ]

    for node in nodes:
        _, error = node.communicate(timeout=200)
        assert node.returncode == 0, error
    expected, found = (json.loads((tmp_path / n / "losses.json").read_text()) for n in ("one", "two"))
    assert found["losses"] == expected["losses"]
