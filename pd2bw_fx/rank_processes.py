"""Starts this command once for each rank, by torchrun's launcher, and tells why a rank ended."""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from pd2bw_fx import errors
from pd2bw_fx.errors import Pd2bwError, WorkerError
from pd2bw_fx.machine import cores_each
from pd2bw_fx.runtime.launcher import STARTED_BY, STARTED_HERE, how_ended

# A rank looks for modules where this package is, and not first in the working directory, as `-m` would: a
# file there may have the name of a module of Python's.
_RANK = (
    "import sys; sys.path[:0] = {sys.argv.pop(1)}.difference(sys.path); "
    "from pd2bw_fx.cli import main; sys.exit(main())"
)


def start_processes(num_processes: int, arguments: Sequence[str]) -> None:
    """Runs this command by torchrun's launcher, with one process a rank.

    Raises the error of the rank that failed first, WorkerError if that rank could not tell.
    """
    threads = os.environ.get("OMP_NUM_THREADS", str(cores_each(num_processes)))
    of_ranks = {"OMP_NUM_THREADS": threads, STARTED_BY: str(os.getpid())}
    # The launcher would log a failure, which is printed once by the caller that catches it.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    try:
        # The launcher leaves its logs behind.
        with tempfile.TemporaryDirectory(prefix="pd2bw_fx_") as logs, _environment(of_ranks):
            setting = LaunchConfig(
                min_nodes=1,
                max_nodes=1,
                nproc_per_node=num_processes,
                run_id="train",
                rdzv_backend="c10d",
                rdzv_endpoint="localhost:0",
                max_restarts=0,
                logs_specs=DefaultLogsSpecs(log_dir=logs),
            )
            ours = str(Path(errors.__file__).parents[1])
            elastic_launch(setting, sys.executable)("-P", "-c", _RANK, ours, STARTED_HERE, *arguments)
    except ChildFailedError as error:
        raise _reason(error.failures) from None
    except SignalException as error:  # a signal to the launcher, whose processes have ended
        if error.sigval == signal.SIGINT:
            raise KeyboardInterrupt from None
        raise SystemExit(128 + error.sigval) from None


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Sets variables for the processes that are started meanwhile, and for no others."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _reason(failures: Mapping[int, ProcessFailure]) -> Pd2bwError:
    """Returns the first cause, as the rank raised it if it is an error of ours."""
    rank, failure = min(failures.items(), key=lambda item: _lateness(item[1]))
    told = failure.error_file_data.get("message")
    if not isinstance(told, dict):
        has_word = told not in (None, "", "<NONE>")
        return WorkerError(f"rank {rank} " + (f"failed: {told}" if has_word else how_ended(failure.exitcode)))
    name, _, words = told["message"].partition(": ")
    kind = getattr(errors, name, None)
    if isinstance(kind, type) and issubclass(kind, Pd2bwError):
        return kind(words)
    return WorkerError(f"rank {rank} failed:\n{told['extraInfo']['py_callstack']}")


def _lateness(failure: ProcessFailure) -> tuple[bool, bool, int]:
    """Returns a key that sorts causes before their consequences.

    Consequences are that another rank failed, and that the launcher has ended the rest.
    """
    told = failure.error_file_data.get("message")
    is_consequence = not isinstance(told, dict) or told["message"].startswith("WorkerError")
    return is_consequence, failure.exitcode == -signal.SIGTERM, failure.timestamp
