"""Workers are forks of one process, and as if each had been started by itself."""

from __future__ import annotations

import functools
import os
import signal
import socket
import struct
import subprocess
import sys
import time
from collections.abc import Iterable
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
import torch
from torch import nn

import pd2bw_fx
from pd2bw_fx.models import build
from pd2bw_fx.runtime import nursery, worker
from pd2bw_fx.runtime.wire import encoded
from tests.processes import children_of, kept_process
from tests.torchrun import TIMEOUT_S


@pytest.fixture(scope="module")
def pipe() -> pd2bw_fx.Pipeline:
    torch.manual_seed(0)
    return pd2bw_fx.split(build("mlp"), cluster=2, costs="analytic", check=False)


def trained(pipe: pd2bw_fx.Pipeline, folder: Path) -> tuple[float, ...]:
    """Each worker tells its environment, its folder, its parent and its output."""
    assert pipe.example is not None
    batch = tuple(torch.cat([tensor] * 4) for tensor in pipe.example.values())

    def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        told = f"{os.environ.get('TOLD')} {os.getcwd()} {os.getppid()}"
        (folder / str(os.getpid())).write_text(told)
        print("a worker's own word")
        return torch.optim.SGD(parameters, lr=0.1)

    return pipe.train_local([batch] * 2, optimizer=sgd, microbatches_per_update=2).losses


def told(folder: Path) -> list[list[str]]:
    return [file.read_text().split() for file in sorted(folder.iterdir())]


class ByIntegers(nn.Module):
    """Divides an integer, which gives a tensor of the default type."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor, age: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(x)) * torch.sin(age / 7)[:, None]).square().mean()


def test_workers_compute_with_what_the_script_has_set_for_its_process() -> None:
    torch.set_default_dtype(torch.float64)
    torch.set_float32_matmul_precision("high")
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        torch.manual_seed(0)
        model, batch = ByIntegers(), (torch.randn(4, 4), torch.arange(4))
        pipe = pd2bw_fx.split(model, batch, cluster=2, num_stages=2, costs="analytic", check=False)

        def still(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
            assert torch.get_float32_matmul_precision() == "high"
            assert torch.is_deterministic_algorithms_warn_only_enabled()
            return torch.optim.SGD(parameters, lr=0.0)

        losses = pipe.train_local([batch], optimizer=still, microbatches_per_update=2).losses
        assert losses == pytest.approx([model(*batch).item()], rel=1e-14)
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_float32_matmul_precision("highest")
        torch.use_deterministic_algorithms(False)


def test_what_workers_printed_is_seen_when_one_of_them_fails(
    pipe: pd2bw_fx.Pipeline, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    def failing(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115 (as a file is written: in blocks)
        print("a worker's own word")
        (tmp_path / "there").mkdir()  # which the second finds
        return torch.optim.SGD(parameters, lr=0.1)

    assert pipe.example is not None
    with pytest.raises(pd2bw_fx.WorkerError, match="FileExistsError"):
        pipe.train_local([tuple(pipe.example.values())], optimizer=failing, microbatches_per_update=2)

    assert capfd.readouterr().out.count("a worker's own word") == 2


def test_a_worker_ends_quietly_whose_parent_goes_while_it_sends(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(worker, "note_worker", lambda: None)  # this process is none
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(sys, "path", [*sys.path])
    for sent in (b"", b"\0\0", struct.pack("!i", 100), struct.pack("!i", 100) + b"the beginning"):
        ours, theirs = socket.socketpair()
        Connection(os.dup(ours.fileno())).send_bytes(encoded(sys.path))
        ours.sendall(sent)
        ours.close()
        worker.serve(theirs.detach())

        assert capfd.readouterr() == ("", "")


TRAINS = """
import os, signal, sys, torch, pd2bw_fx
pipe = pd2bw_fx.load(sys.argv[1])

def batches():
    for count in range(100):
        if count == 5:
            os.kill(os.getpid(), signal.SIGTERM)
        yield tuple(torch.cat([tensor] * 4) for tensor in pipe.example.values())

pipe.train_local(batches(), optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1))
"""


def test_workers_whose_parent_was_killed_remove_the_file_by_which_they_met(
    pipe: pd2bw_fx.Pipeline, tmp_path: Path
) -> None:
    pipe.save(tmp_path / "mlp")
    environment = os.environ | {"TMPDIR": str(tmp_path), "PYTHONPATH": str(Path(__file__).parents[1])}

    finished = subprocess.run([sys.executable, "-c", TRAINS, str(tmp_path / "mlp")], env=environment)

    assert finished.returncode == -signal.SIGTERM
    until_s = time.monotonic() + TIMEOUT_S
    while list(tmp_path.glob("pd2bw_fx_*")) and time.monotonic() < until_s:
        time.sleep(0.05)
    assert not list(tmp_path.glob("pd2bw_fx_*"))


def test_workers_have_the_environment_the_folder_and_the_output_of_now(
    pipe: pd2bw_fx.Pipeline,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    for value in ("one", "two"):
        folder = tmp_path / value
        folder.mkdir()
        monkeypatch.setenv("TOLD", value)
        monkeypatch.chdir(folder)

        trained(pipe, folder)

        assert told(folder) == [[value, str(folder), str(kept_process().pid)]] * 2
        assert capfd.readouterr().out.count("a worker's own word") == 2


def test_a_nursery_that_was_killed_is_replaced(pipe: pd2bw_fx.Pipeline, tmp_path: Path) -> None:
    first = trained(pipe, tmp_path)
    old = kept_process()
    old.kill()
    old.wait()
    pipe.load_state_dict(build("mlp").state_dict())

    assert len(trained(pipe, tmp_path)) == len(first)
    assert kept_process().pid != old.pid


def test_a_run_leaves_no_process_unless_it_is_told_to(
    pipe: pd2bw_fx.Pipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nursery, "_kept", None)
    before = children_of(os.getpid())

    trained(pipe, tmp_path)

    assert len(told(tmp_path)) == 2
    assert children_of(os.getpid()) == before


def test_ctrl_c_while_it_imports_is_left_to_its_parent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    imported = "import os, time\nos.write(0, b'.')\ntime.sleep(0.5)\ndef main(): os.write(0, b'done')\n"
    (tmp_path / "imported_slowly.py").write_text(imported)
    monkeypatch.syspath_prepend(tmp_path)
    ours, theirs = socket.socketpair()

    with ours, theirs:
        process = nursery._started("imported_slowly", theirs, os.environ)
        assert ours.recv(1) == b"."
        process.send_signal(signal.SIGINT)
        assert process.wait(TIMEOUT_S) == 0
        assert ours.recv(4) == b"done"


def test_without_a_safe_fork_each_worker_is_started_by_itself(
    pipe: pd2bw_fx.Pipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setattr(sys, "platform", "darwin")

    trained(pipe, tmp_path)

    assert [parent for *_, parent in told(tmp_path)] == [str(os.getpid())] * 2


SCRIPT = """
import sys, time
import torch
import torch.distributed as dist
import pd2bw_fx

def sgd(parameters):
    leave = dist.destroy_process_group
    dist.destroy_process_group = lambda: (time.sleep(1.2), leave())  # longer than from one beat to the next
    return torch.optim.SGD(parameters, lr=0.1)

pipe = pd2bw_fx.load({folder!r})
batch = torch.ones(4, 32), torch.zeros(4, dtype=torch.long)
pipe.train_local([batch], optimizer=sgd, method="gpipe", microbatches_per_update=1)
"""


def test_the_folders_of_a_run_may_have_any_names_and_its_output_may_be_closed(
    mlp_folder: Path, tmp_path: Path
) -> None:
    temporary, folder = tmp_path / "50%20 für #1", tmp_path / "data"
    temporary.mkdir()
    folder.mkdir()
    (folder / "selectors.py").write_text("raise ImportError('not the one of Python')")
    (tmp_path / "script.py").write_text(SCRIPT.format(folder=str(mlp_folder)))

    finished = subprocess.run(
        ["sh", "-c", f"{sys.executable} ../script.py >&-"],
        env=os.environ | {"TMPDIR": str(temporary), "PYTHONPATH": os.getcwd()},
        cwd=folder,
        stderr=subprocess.PIPE,
        text=True,
        timeout=TIMEOUT_S,
    )

    assert (finished.returncode, finished.stderr) == (0, "")
    assert not list(temporary.iterdir())


def test_a_script_that_workers_import_does_not_train_in_them(mlp_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT.format(folder=str(mlp_folder)))

    finished = subprocess.run(
        [sys.executable, "-c", "import script"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join([os.getcwd(), str(tmp_path)])},
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
    )

    assert "failed with InputError:\ntrain_local was called in a worker process" in finished.stderr
    assert '`if __name__ == "__main__":`' in finished.stderr


@pytest.mark.parametrize("ending", ["", "os.kill(os.getpid(), 9)"])
def test_the_nursery_ends_with_the_process_that_started_it(ending: str) -> None:
    script = (
        "import os\n"
        "from pd2bw_fx.runtime.nursery import Nursery\n"
        "begun = Nursery()\n"
        "begun._ready()\n"
        "print(begun._process.pid, flush=True)\n"
        f"{ending}\n"
    )

    said = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, check=False).stdout

    is_gone = functools.partial(_is_gone, int(said))
    deadline = time.monotonic() + TIMEOUT_S
    while not is_gone() and time.monotonic() < deadline:
        time.sleep(0.1)
    assert is_gone()


def _is_gone(pid: int) -> bool:
    try:
        os.kill(pid, signal.SIG_DFL)
    except ProcessLookupError:
        return True
    return False
