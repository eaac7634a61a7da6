"""How a benchmark starts itself again under torchrun, with one thread a process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any


def under_torchrun(program: str, num_processes: int, *more: str) -> None:
    """Run `program` with this process's arguments on so many ranks. Raises where one fails."""
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(num_processes)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    subprocess.run([*command, program, *sys.argv[1:], *more], check=True, env=environment)


def told_under_torchrun(program: str, num_processes: int, output: Path | None) -> Any:
    """The same for a program that writes JSON to its option -o, into `output` if that is named."""
    with tempfile.TemporaryDirectory() as folder:
        file = output or Path(folder) / "told.json"
        under_torchrun(program, num_processes, "-o", str(file))
        return json.loads(file.read_text())
