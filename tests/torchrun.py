"""Runs a program of tests/programs under torchrun."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from multiprocessing.context import ForkServerContext
from pathlib import Path

PROGRAMS = Path(__file__).parent / "programs"
TIMEOUT_S = 240
# What the programs import before their first engine trains: some five seconds for each rank.
IMPORTED = ["torch.distributed.run", "torch._dynamo", "pulp", "pd2bw_fx.pipeline", "pd2bw_fx.runtime.engine"]


def torchrun(
    num_processes: int,
    program: str | Path,
    *arguments: str | Path,
    options: Sequence[str] = (),
    folder: Path | None = None,
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(num_processes)]
    command += [*options, str(PROGRAMS / program), *map(str, arguments)]
    path = os.pathsep.join([str(PROGRAMS.parents[1]), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    return subprocess.run(
        command, env=environment, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_S
    )


def torchrun_of_forks(
    num_processes: int, program: str, *arguments: str | Path
) -> subprocess.CompletedProcess[str]:
    """torchrun, whose ranks are forks of a process that has imported torch: for what ranks compute."""
    words = ["--nproc-per-node", str(num_processes), "--start-method", "fork", "--run-path"]
    words += [str(PROGRAMS / program), *map(str, arguments)]
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / "stdout", Path(folder) / "stderr"]
        process = _forks().Process(target=_run, args=(words, files))
        process.start()
        process.join(TIMEOUT_S)
        if process.exitcode is None:
            process.terminate()  # torchrun ends its ranks
            process.join()
            raise subprocess.TimeoutExpired(words, TIMEOUT_S)
        return subprocess.CompletedProcess(words, process.exitcode, *(file.read_text() for file in files))


def _forks() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    return context


def _run(words: list[str], files: list[Path]) -> None:
    from torch.distributed.run import main

    for descriptor, file in enumerate(files, start=1):
        os.dup2(os.open(file, os.O_CREAT | os.O_WRONLY), descriptor)
    os.environ["OMP_NUM_THREADS"] = "1"
    main(words)
