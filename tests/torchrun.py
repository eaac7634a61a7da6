"""Runs programs of tests/programs under torchrun."""

from __future__ import annotations

import os
import secrets
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

from torch.distributed.elastic.multiprocessing import api
from torch.distributed.elastic.multiprocessing.api import MultiprocessContext
from torch.distributed.run import get_args_parser

from tests.forks import Fork

PROGRAMS = Path(__file__).parent / "programs"
ROOT = PROGRAMS.parents[1]
TIMEOUT_S = 240.0  # of a process that should have ended
PORTS = range(20_000, 32_000)  # below those that connections take, so that none is lost before it is used


def torchrun(
    num_processes: int,
    program: str | Path,
    *arguments: str | Path,
    options: Sequence[str] = (),
    folder: Path | None = None,
) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(num_processes)]
    command += [*options, str(PROGRAMS / program), *map(str, arguments)]
    return subprocess.run(
        command, env=environment(), cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_S
    )


def torchrun_of_forks(
    num_processes: int,
    program: str | Path,
    *arguments: str | Path,
    options: Sequence[str] = (),
    folder: Path | None = None,
    **more: str,
) -> subprocess.CompletedProcess[str]:
    """Runs torchrun with ranks that are forked with torch imported, for tests of what ranks compute."""
    process = start_forks(num_processes, program, *arguments, options=options, folder=folder, **more)
    return process.ended(TIMEOUT_S)


def start_forks(
    num_processes: int,
    program: str | Path,
    *arguments: str | Path,
    options: Sequence[str] = (),
    folder: Path | None = None,
    **more: str,
) -> Fork:
    """Starts what `torchrun_of_forks` waits for."""
    options = ["--nproc-per-node", str(num_processes), *options]
    return _start(options, [str(PROGRAMS / program), *map(str, arguments)], folder, **more)


def start_command(words: Sequence[str], folder: Path, **more: str) -> Fork:
    """Starts `torchrun ..` in a folder, as a page shows it, with ranks that are forked."""
    given = get_args_parser().parse_args(words[1:])
    options, program = words[1 : words.index(given.training_script)], given.training_script
    if given.module:
        options, program = options[:-1], str(ROOT / program / "__main__.py")
    path = os.pathsep.join([str(ROOT), str(folder)])
    return _start(options, [program, *given.training_script_args], folder, PYTHONPATH=path, **more)


def _start(options: Sequence[str], program: Sequence[str], folder: Path | None, **more: str) -> Fork:
    words = ["torchrun", "--start-method", "fork", *options, "--run-path", *program]
    return Fork(words, _torchrun, environment(**more), folder)


def all_succeed(machines: Sequence[Fork]) -> None:
    """Waits for torchruns that work together; if one fails or is late, all are ended."""
    try:
        for machine in machines:
            ended = machine.ended(TIMEOUT_S)
            assert ended.returncode == 0, ended.stderr
    finally:
        for machine in machines:
            machine.terminate()


def at_once(
    commands: Sequence[Sequence[str]], folder: Path | None = None, **more: str
) -> list[subprocess.CompletedProcess[str]]:
    """Runs commands side by side, each as on a machine of its own; stdout of a result has stderr too.

    If a torchrun does not end in time, all are terminated, and the assertion shows the output of each.
    """
    with ExitStack() as stack:
        outputs = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in commands]
        processes = [
            subprocess.Popen(
                command,
                cwd=folder,
                env=environment(GLOO_SOCKET_IFNAME="lo", SLURM_NODEID=str(number), **more),
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            for number, (command, output) in enumerate(zip(commands, outputs, strict=True))
        ]
        late = _late(processes)
        ended = []
        for process, output in zip(processes, outputs, strict=True):
            output.seek(0)
            ended.append(subprocess.CompletedProcess(process.args, process.returncode, output.read()))
    assert not late, "\n".join(f"{process.args}\n{process.stdout}" for process in ended)
    return ended


def _late(processes: Sequence[subprocess.Popen[bytes]]) -> bool:
    end = time.monotonic() + TIMEOUT_S
    try:
        for process in processes:
            process.wait(end - time.monotonic())
    except subprocess.TimeoutExpired:
        for process in processes:
            process.terminate()  # torchrun ends its ranks
            process.wait()
        return True
    return False


def free_port() -> int:
    while True:
        with socket.socket() as server:
            port = secrets.choice(PORTS)
            try:
                server.bind(("", port))
            except OSError:
                continue
            return port


def environment(**more: str) -> dict[str, str]:
    """Returns the environment of a program that can import this package and its tests."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": path} | more


def _torchrun(words: Sequence[str]) -> None:
    from torch.distributed.run import main

    with mock.patch.object(MultiprocessContext, "_start", _start_together):
        main(list(words[1:]))


_START = MultiprocessContext._start


def _start_together(context: MultiprocessContext) -> None:
    """Lets no rank begin before the last is forked.

    A thread of torchrun looks up the address of each rank that connects to its store. A rank that is forked
    meanwhile would find the C library's lock of that taken for ever.
    """
    reading, writing = os.pipe()
    run = api._wrap

    def run_later(*arguments: Any) -> None:
        os.close(writing)
        os.read(reading, 1)  # ends when nobody can write any more
        os.close(reading)
        run(*arguments)

    with mock.patch.object(api, "_wrap", run_later):
        _START(context)
    os.close(writing)
    os.close(reading)
