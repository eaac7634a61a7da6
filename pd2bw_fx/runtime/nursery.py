"""Starts local workers: as forks of one process that has imported what they need.

    this process --(socket pair)-- nursery --fork--> worker 0      a fork takes milliseconds, importing torch
                                           --fork--> worker 1      in each worker two seconds of its core

The nursery imports and does nothing else; it has no other thread and no tensor, which makes it safe to fork.
It ends with the training run that began it; runs in `kept_nursery` share one, and later ones start at once.
Where there is no safe fork (anywhere but Linux) each worker is a process of its own from the start.

A process that is started here has its end of a socket pair as its standard input, and the parent's sys.path.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import random
import selectors
import signal
import socket
import struct
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NoReturn, Protocol

from pd2bw_fx.errors import InputError, WorkerError

_LENGTH = struct.Struct("!Q")
_CODE = struct.Struct("!i")


class Process(Protocol):
    """What is needed of a worker's process; a Popen has it."""

    @property
    def pid(self) -> int: ...

    def wait(self, timeout: float | None = None) -> int: ...

    def kill(self) -> None: ...


# Ctrl-C is the parent's to answer, also while this process imports torch.
_BEGIN = (
    "import json, signal, sys; signal.signal(signal.SIGINT, signal.SIG_IGN); "
    "sys.path[:] = json.loads(sys.argv[1]); from {module} import main; main()"
)


def _started(module: str, end: socket.socket, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
    """Starts a process without the working directory on its path: a file there may hide a Python module."""
    path = [entry for entry in sys.path if entry and isinstance(entry, str)]
    with _outputs() as (output, errors):
        return subprocess.Popen(
            [sys.executable, "-P", "-c", _BEGIN.format(module=module), json.dumps(path)],
            stdin=end.fileno(),
            stdout=output,
            stderr=errors,
            env=environment,
        )


def given_end() -> int:
    """Returns the descriptor that `_started` gave this process, whose standard input is empty from now on."""
    end = os.dup(0)
    with open(os.devnull, "rb") as nothing:
        os.dup2(nothing.fileno(), 0)
    return end


@contextlib.contextmanager
def _outputs() -> Iterator[tuple[int, int]]:
    """Yields standard output and error; /dev/null for a closed one, whose number another file may have."""
    with open(os.devnull, "wb") as nowhere:
        output, errors = (
            nowhere.fileno() if stream is None or stream.closed else number
            for number, stream in ((1, sys.__stdout__), (2, sys.__stderr__))
        )
        yield output, errors


class _Forked:
    """A worker by its process id, and a pipe through which the nursery sends its exit code."""

    def __init__(self, pid: int, ended: int) -> None:
        self.pid = pid
        self._ended: int | None = ended
        self._code: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        """Raises TimeoutExpired. Returns -SIGKILL where the nursery is gone, and the exit code with it."""
        if self._ended is not None:
            with selectors.DefaultSelector() as selector:
                selector.register(self._ended, selectors.EVENT_READ)
                if not selector.select(timeout):
                    raise subprocess.TimeoutExpired("worker", timeout or 0.0)
            told = os.read(self._ended, _CODE.size)
            os.close(self._ended)
            self._ended = None
            self._code = _CODE.unpack(told)[0] if told else -signal.SIGKILL
        assert self._code is not None
        return self._code

    def kill(self) -> None:
        if self._ended is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, signal.SIGKILL)


class Nursery:
    """This process's side of the nursery, which is begun by the first worker that is asked for."""

    def __init__(self) -> None:
        self._owner = os.getpid()
        self._asking = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    @property
    def is_ours(self) -> bool:
        """Whether this process began it, rather than one that this process was forked from."""
        return self._owner == os.getpid()

    def start_worker(self, connection: socket.socket, environment: Mapping[str, str]) -> Process:
        """Returns a new process that runs `worker.serve` on its end of the parent's connection.

        Raises WorkerError where the nursery has ended, or cannot fork.
        """
        if sys.platform != "linux":
            return _started("pd2bw_fx.runtime.worker", connection, environment)
        request = json.dumps({"environment": dict(environment), "folder": os.getcwd()}).encode()
        with self._asking, _outputs() as outputs:
            control = self._ready()
            ended, tells = os.pipe()
            try:
                # Output goes where this process's goes now, which need not be where the nursery's goes.
                descriptors = [connection.fileno(), tells, *outputs]
                socket.send_fds(control, [_LENGTH.pack(len(request))], descriptors)
                control.sendall(request)
                pid = _CODE.unpack(_exactly(control, _CODE.size))[0]
            except BaseException as error:
                # Half a request may have been written; the next one begins another nursery.
                code = self.end()
                os.close(ended)
                if isinstance(error, EOFError | OSError):
                    raise WorkerError(
                        f"the process that starts the workers ended with {code}; its own output may say why"
                    ) from error
                raise
            finally:
                os.close(tells)
        return _Forked(pid, ended)

    def _ready(self) -> socket.socket:
        if self._control is not None and self._process is not None and self._process.poll() is None:
            return self._control
        self.end()
        self._control, theirs = socket.socketpair()
        with theirs:
            # Of one thread: numpy would start others. Workers set their own number.
            environment = os.environ | {"OMP_NUM_THREADS": "1"}
            self._process = _started("pd2bw_fx.runtime.nursery", theirs, environment)
        return self._control

    def end(self) -> int | None:
        """Ends the nursery, if it was begun, and returns its exit code.

        Workers that are left end by themselves.
        """
        if self._control is None or self._process is None:
            return None
        self._control.close()
        has_ended = self._process.poll() is not None
        self._process.kill()
        code = self._process.wait()
        self._control = self._process = None
        return code if has_ended else None


_kept: Nursery | None = None
_is_a_worker = False  # whether this process is one


def note_worker() -> None:
    """Marks this process as a worker, which starts no workers."""
    global _is_a_worker
    _is_a_worker = True


def require_no_worker(what: str) -> None:
    """Raises InputError in a worker: workers that it starts would import the script too, and so on."""
    if _is_a_worker:
        raise InputError(
            f"{what} was called in a worker process, which imports the modules of the functions that it was "
            'sent: call it under `if __name__ == "__main__":`, or in a function that no import calls'
        )


@contextlib.contextmanager
def nursery() -> Iterator[Nursery]:
    """Yields what a training run starts its workers with: a nursery that is kept for several, or its own."""
    if _kept is not None and _kept.is_ours:
        yield _kept
        return
    own = Nursery()
    try:
        yield own
    finally:
        own.end()


@contextlib.contextmanager
def kept_nursery() -> Iterator[None]:
    """Lets the training runs inside share a nursery, which the end of the block ends."""
    global _kept
    if _kept is not None and _kept.is_ours:
        yield
        return
    _kept = Nursery()
    try:
        yield
    finally:
        _kept.end()
        _kept = None


def _exactly(control: socket.socket, size: int) -> bytes:
    read = b""
    while len(read) < size:
        part = control.recv(size - len(read))
        if not part:
            raise EOFError
        read += part
    return read


def main() -> None:
    """Runs the nursery: forks when it is asked to, and says when a worker has ended."""
    import torch._dynamo  # noqa: F401 - which the first step of any torch optimizer imports

    from pd2bw_fx.runtime.worker import serve

    control = socket.socket(fileno=given_end())
    woken, wakes = socket.socketpair()
    wakes.setblocking(False)
    signal.set_wakeup_fd(wakes.fileno())
    signal.signal(signal.SIGCHLD, lambda *_: None)
    tells: dict[int, int] = {}  # by worker, the pipe for its exit code
    gc.freeze()  # so that the memory of what was imported stays shared by all workers
    with selectors.DefaultSelector() as selector, contextlib.ExitStack() as leaving:
        leaving.callback(signal.set_wakeup_fd, -1)  # workers may end when the sockets are closed
        selector.register(control, selectors.EVENT_READ)
        selector.register(woken, selectors.EVENT_READ)
        while True:
            for key, _ in selector.select():
                if key.fileobj is woken:
                    woken.recv(4096)
                    _tell_ends(tells)
                    continue
                try:
                    request, descriptors = _request(control)
                except (EOFError, OSError):
                    return  # the parent is gone
                pid = os.fork()
                if pid == 0:
                    ours = [control.fileno(), woken.fileno(), wakes.fileno(), *tells.values()]
                    _become_worker(serve, request, descriptors, ours)
                connection, tells[pid], *output = descriptors
                for descriptor in (connection, *output):
                    os.close(descriptor)
                try:
                    control.sendall(_CODE.pack(pid))
                except OSError:
                    return  # the parent is gone, and its workers see that themselves


def _request(control: socket.socket) -> tuple[dict[str, Any], list[int]]:
    first, descriptors, _, _ = socket.recv_fds(control, _LENGTH.size, 4)
    first += _exactly(control, _LENGTH.size - len(first))
    return json.loads(_exactly(control, _LENGTH.unpack(first)[0])), descriptors


def _tell_ends(tells: dict[int, int]) -> None:
    for pid in list(tells):
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            with contextlib.suppress(BrokenPipeError):
                os.write(tells[pid], _CODE.pack(os.waitstatus_to_exitcode(status)))
            os.close(tells.pop(pid))


def _become_worker(
    serve: Callable[[int], None], request: dict[str, Any], descriptors: list[int], ours: list[int]
) -> NoReturn:
    """Makes this fork like a process that was started by itself."""
    code = 1
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        connection, tells, output, errors = descriptors
        os.dup2(output, 1)
        os.dup2(errors, 2)
        for descriptor in (tells, output, errors, *ours):
            os.close(descriptor)
        os.environ.clear()
        os.environ.update(request["environment"])
        os.chdir(request["folder"])
        Path("/proc/self/comm").write_text("pd2bw_fx worker", encoding="utf-8")
        random.seed()
        serve(connection)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        for stream in filter(None, (sys.stdout, sys.stderr)):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        os._exit(code)
