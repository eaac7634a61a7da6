"""Runs a program of tests/programs under torchrun."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

PROGRAMS = Path(__file__).parent / "programs"


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
    return subprocess.run(command, env=environment, cwd=folder, capture_output=True, text=True, timeout=240)
