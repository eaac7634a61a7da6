"""Runs programs in forks of a process that has imported torch, as an import takes some five seconds."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import runpy
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from unittest import mock

# What the programs import before their first engine trains.
IMPORTED = [
    "torch.distributed.run",
    "torch._dynamo",
    "pulp",
    "pd2bw_fx.passes.split",
    "pd2bw_fx.runtime.engine",
    "tests.exported_once",
]
_ROOT = str(Path(__file__).parents[1])
_CONTEXT = multiprocessing.get_context("forkserver")


class Fork:
    """Runs a program with arguments; has as much of `subprocess.Popen` as the tests need."""

    def __init__(
        self,
        words: Sequence[str],
        main: Callable[[Sequence[str]], None] | None = None,
        environment: Mapping[str, str] = os.environ,
        folder: Path | None = None,
    ) -> None:
        """`words` are the program's sys.argv, its path first; `main`, if given, runs instead of that file."""
        self.words = list(words)
        self._folder = tempfile.TemporaryDirectory()
        self._files = [Path(self._folder.name) / name for name in ("stdout", "stderr")]
        _CONTEXT.set_forkserver_preload(IMPORTED)
        self._process = _CONTEXT.Process(
            target=_run, args=(self.words, main or _run_file, dict(environment), folder, self._files)
        )
        # The process that is forked may start now, and looks for its imports there.
        with mock.patch.dict(
            os.environ, PYTHONPATH=os.pathsep.join([_ROOT, os.environ.get("PYTHONPATH", "")])
        ):
            self._process.start()

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> None:
        self._process.join(timeout)
        if self._process.exitcode is None:
            raise subprocess.TimeoutExpired(self.words, timeout or 0.0)

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        self.wait(timeout)
        stdout, stderr = (file.read_text() if file.exists() else "" for file in self._files)
        return stdout, stderr

    def ended(self, timeout: float) -> subprocess.CompletedProcess[str]:
        """Waits for the end. One that is late is terminated (a torchrun ends its ranks); TimeoutExpired."""
        try:
            stdout, stderr = self.communicate(timeout)
        except subprocess.TimeoutExpired:
            self.terminate()
            self.communicate()
            raise
        return subprocess.CompletedProcess(self.words, self.returncode, stdout, stderr)

    def terminate(self) -> None:
        self._process.terminate()

    def kill(self) -> None:
        self._process.kill()


def _run_file(words: Sequence[str]) -> None:
    sys.path.insert(0, str(Path(words[0]).parent))
    runpy.run_path(words[0], run_name="__main__")


def _run(
    words: list[str],
    main: Callable[[Sequence[str]], None],
    environment: Mapping[str, str],
    folder: Path | None,
    files: list[Path],
) -> None:
    """Runs the program and ends as an interpreter does; multiprocessing would skip threads and atexit."""
    for descriptor, file in enumerate(files, start=1):
        os.dup2(os.open(file, os.O_CREAT | os.O_WRONLY), descriptor)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:0] = environment.get("PYTHONPATH", "").split(os.pathsep)
    if folder is not None:
        os.chdir(folder)
    sys.argv = words
    code: object = 0
    try:
        main(words)
    except SystemExit as ended:
        code = ended.code
    except BaseException as error:
        sys.last_value = error
        traceback.print_exc()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))
