"""Ranks that stop."""

from __future__ import annotations

import functools
import json
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed import HashStore  # type: ignore[attr-defined]

import pd2bw_fx
from pd2bw_fx.errors import WorkerError
from pd2bw_fx.runtime.failure import LinkDownError, share_failure
from pd2bw_fx.runtime.launcher import tell_launcher
from pd2bw_fx.runtime.meeting import _Arrival
from pd2bw_fx.runtime.watch import Watch
from tests.forks import Fork
from tests.stages import split_of_our_own
from tests.torchrun import PROGRAMS, TIMEOUT_S, environment, free_port, torchrun_of_forks

LEFT = (
    "has left the pipeline: its program ended, or closed its engine, early; every rank makes each call of "
    "its engine, state_dict and save_checkpoint too"
)


@pytest.mark.parametrize("stopped", [0, 1])
def test_a_rank_that_is_stopped_ends_the_other_with_its_name(stopped: int) -> None:
    with ranks(2, stopped, "SIGSTOP", silence_s=4.0) as processes:
        deadline = time.monotonic() + TIMEOUT_S
        while not is_stopped(processes[stopped].pid):
            assert time.monotonic() < deadline
            time.sleep(0.1)
        _, error = processes[1 - stopped].communicate(timeout=TIMEOUT_S)

    assert processes[1 - stopped].returncode == 1
    who = f"rank {stopped} (stage {stopped})" + ("" if stopped else ", which holds the store of the ranks,")
    assert f"WorkerError: {who} has given no sign of life" in error
    assert f"seen by rank {1 - stopped} (stage {1 - stopped}), in update" in error


def test_a_rank_that_is_killed_is_named_by_those_that_are_not_beside_it_too() -> None:
    with ranks(3, 2, "SIGKILL") as processes:
        errors = [process.communicate(timeout=TIMEOUT_S)[1] for process in processes[:2]]

    for rank, error in enumerate(errors):
        assert "WorkerError: rank 2 (stage 2) no longer answers: it was killed, or hangs" in error
        assert f"(seen by rank {rank}, stage {rank}, " in error


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("error", "the program of rank 2 (stage 2) failed after 3 updates:"),
        ("exit", f"rank 2 (stage 2) {LEFT}"),
        ("return", f"rank 2 (stage 2) {LEFT}"),
    ],
)
def test_a_rank_whose_program_ends_between_steps_is_named_with_its_reason(how: str, reason: str) -> None:
    with ranks(3, 2, how) as processes:
        errors = [process.communicate(timeout=TIMEOUT_S)[1] for process in processes[:2]]

    for rank, error in enumerate(errors):
        assert f"WorkerError: {reason}" in error
        seen = (
            rf"seen by rank {rank}, stage {rank}, in update \d+, .* microbatch \d+ at stage {rank}, on W\d+"
        )
        assert re.search(seen, error)
        assert "the direct cause of" not in error  # how the connection was lost is of no use to anybody
        assert ("ArithmeticError: the fourth batch went wrong" in error) == (how == "error")


def test_torchruns_summary_names_the_cause_and_a_stopped_rank_ends_with_the_others() -> None:
    finished = torchrun_of_forks(2, "stops.py", saved(2), "0", "SIGSTOP", "4")

    # As it does half a minute after a signal that a stopped rank has not taken.
    assert "forcefully exiting via" not in finished.stderr
    _, cause = finished.stderr.split("Root Cause (first observed failure):")
    assert re.search(
        r"rank 0 \(stage 0\) has given no sign of life for \d+ s: it was stopped, or hangs", cause
    )
    assert "(seen by rank 1 (stage 1), in update" in cause


def test_torchruns_summary_has_the_error_of_a_program_that_fails_between_steps() -> None:
    finished = torchrun_of_forks(2, "stops.py", saved(2), "1", "error", "60")

    _, cause = finished.stderr.split("Root Cause (first observed failure):")
    assert "ArithmeticError: the fourth batch went wrong" in cause


def test_a_rank_that_is_done_keeps_its_connections_until_all_are(tmp_path: Path) -> None:
    """Else its last messages would be lost."""
    finished = torchrun_of_forks(2, "closes.py", "1.5", tmp_path / "waited")

    assert finished.returncode == 0, finished.stderr
    assert json.loads((tmp_path / "waited").read_text()) == [True]
    assert (tmp_path / "waited.True").read_text() == ""
    assert (tmp_path / "waited.False").read_text() == (
        "the engine of rank 0 (stage 0) was closed with 2 updates in flight, which will not be made; call "
        "engine.flush() after the last step, or make the engine in a with statement, which flushes at its end"
    )


def test_ranks_with_different_numbers_of_batches_end_with_what_each_is_at() -> None:
    """The first flushes, and waits for gradients that the others give after one more input of its."""
    with ranks(4, 0, "return", silence_s=8.0) as processes:
        errors = [process.communicate(timeout=TIMEOUT_S)[1] for process in processes]

    assert all(process.returncode == 1 for process in processes)
    for error in errors:
        assert re.search(
            r"WorkerError: rank (\d) \(stage \1\) is in update 3 where rank 0 \(stage 0\) is at the end of "
            "the pipeline: all ranks make the same calls in the same order, with as many batches",
            error,
        )


def test_ranks_with_batches_of_unlike_sizes_end_with_both() -> None:
    """Beyond the first updates, in which they are compared, each might wait for the other's for ever."""
    with ranks(2, 0, "half", silence_s=4.0) as processes:
        errors = [process.communicate(timeout=TIMEOUT_S)[1] for process in processes]

    assert all(process.returncode == 1 for process in processes)
    told = r"WorkerError: rank \d .* is in update 3 on microbatches of .*\((1|2), .* where rank \d .* is on "
    told += "microbatches of .*make the same calls on the same batches"
    assert any(re.search(told, error) for error in errors)


def test_an_evaluation_of_one_rank_alone_is_told_where_nobody_waits_for_it(tmp_path: Path) -> None:
    """The other one would take its loss for that of a step."""
    torchrun_of_forks(2, "evaluates_alone.py", tmp_path)

    assert (tmp_path / "1").read_text() == (
        "rank 1 (stage 1) is in update 3 where rank 0 (stage 0) is in an evaluation after 3 updates: all "
        "ranks make the same calls in the same order, with as many batches"
    )


def test_ranks_that_meet_again_have_a_store_without_what_was_left_in_it() -> None:
    store = HashStore()

    names = [met(store, range(3)) for _ in range(2)]

    assert [len(set(found)) for found in names] == [1, 1]
    assert names[0] != names[1]


def test_who_does_not_come_is_named() -> None:
    for here, missing in ([0, 1], "rank 2"), ([0], "ranks 1, 2"), ([1, 2], "rank 0"):
        for told in met(HashStore(), here):
            assert told == f"{missing} of 3 did not come to make an engine within 0 s"


def met(store: HashStore, ranks: Sequence[int]) -> list[str]:
    """Returns what each of the given ranks of three finds: the meeting's name, or an error."""
    found: dict[int, str] = {}

    def arrive(rank: int) -> None:
        try:
            found[rank] = _Arrival(store, rank, 3).name(timeout_s=60.0 if len(ranks) == 3 else 0.4)
        except WorkerError as error:
            found[rank] = str(error)

    threads = [threading.Thread(target=arrive, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[rank] for rank in ranks]


def saved(num_stages: int) -> str:
    """A folder with a pipeline of the model `mlp`, which ranks load in less time than it takes to make it."""
    return f"{_saved(num_stages).name}/mlp"


@functools.cache
def _saved(num_stages: int) -> tempfile.TemporaryDirectory[str]:
    folder = tempfile.TemporaryDirectory()
    pipe = split_of_our_own("mlp", cluster=num_stages)
    pipe.save(f"{folder.name}/mlp")
    return folder


@contextmanager
def ranks(count: int, stopped: int, how: str, *, silence_s: float = 10 * TIMEOUT_S) -> Iterator[list[Fork]]:
    """Without torchrun, which would end the others itself. No test lasts until the silence is noticed, unless
    it says how long that is."""
    world = {"WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    program = [str(PROGRAMS / "stops.py"), saved(count), str(stopped), how, str(silence_s)]
    processes = [Fork(program, environment=environment(RANK=str(r), **world)) for r in range(count)]
    try:
        yield processes
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def is_stopped(pid: int) -> bool:
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()[0] == "T"


def test_a_full_disk_leaves_torchrun_no_half_of_a_reason(tmp_path: Path) -> None:
    """/dev/full is a disk on which there is no room."""
    file = tmp_path / "error.json"
    file.symlink_to("/dev/full")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
        tell_launcher(WorkerError("rank 1 failed"))

    assert not file.is_symlink()


def test_a_rank_ends_though_whoever_reads_its_output_has_stopped() -> None:
    program = (
        "import sys\n"
        "from pd2bw_fx.runtime.launcher import end_now\n"
        "end_now(lambda: sys.stderr.write('rank 1 is silent\\n' * 100_000))\n"
    )
    with subprocess.Popen([sys.executable, "-c", program], stderr=subprocess.PIPE, env=environment()) as rank:
        assert rank.wait(timeout=TIMEOUT_S) == 1  # the pipe is full, and nobody empties it


def test_torchruns_summary_has_the_lost_rank_even_if_torchrun_ends_the_others_at_once(tmp_path: Path) -> None:
    """It ends them a tenth of a second after the rank; why that one ended is asked for some seconds."""
    file, told = tmp_path / "error.json", []
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHELASTIC_ERROR_FILE", str(file))
        sharing = share_failure(
            0,
            "stage 0",
            lambda: "in update 3",
            lambda _: told.append(file.read_text()),
            named="rank {} (stage 1)".format,
        )
        with pytest.raises(LinkDownError), sharing:
            raise LinkDownError(1, "no longer answers")

    assert json.loads(told[0])["message"]["message"] == (
        "WorkerError: rank 1 (stage 1) no longer answers\n(seen by rank 0, stage 0, in update 3)"
    )


def test_the_rank_that_holds_the_store_stays_until_the_others_know_why_they_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rank 2 was killed, and rank 1 finds that out later than rank 0, with which the store goes."""
    store, why, messages, ended_s = HashStore(), "rank 2 no longer answers", {}, {}
    monkeypatch.delenv("TORCHELASTIC_USE_AGENT_STORE", raising=False)
    monkeypatch.setattr("torch.distributed.distributed_c10d._get_default_store", lambda: store)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 3)
    monkeypatch.setattr("pd2bw_fx.runtime.failure._GRACE_S", 0.05)
    watch = Watch(store, 1, 3, silence_s=60.0)

    def end(rank: int, lost: Callable[[Callable[[], str | None]], str | None]) -> None:
        time.sleep(0.5 * rank)
        with pytest.raises(WorkerError) as raised, share_failure(rank, "a stage", lambda: "training", lost):
            raise LinkDownError(2, "no longer answers")
        messages[rank], ended_s[rank] = str(raised.value), time.monotonic()

    began_s = time.monotonic()
    late = threading.Thread(target=end, args=(1, watch.lost))
    late.start()
    end(0, lambda told: why)
    late.join()
    watch.close()

    assert messages == {rank: f"{why}\n(seen by rank {rank}, a stage, training)" for rank in (0, 1)}
    assert ended_s[0] - began_s > 0.4


def test_a_rank_whose_memory_is_full_says_at_what_and_what_to_try() -> None:
    def without_memory(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
        """Runs in the workers, where the second stage's second microbatch then finds the memory full."""
        calls = iter(range(2))

        def forward(self: nn.ReLU, x: torch.Tensor) -> torch.Tensor:
            if next(calls) == 1:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
            return x.relu()

        nn.ReLU.forward = forward  # type: ignore[method-assign]
        return torch.optim.SGD(parameters, lr=0.1)

    model = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))
    where = pd2bw_fx.Constraints(stage_of={"0": 0, "2": 1})
    x, y = torch.randn(4, 4), torch.randn(4, 1)
    pipe = pd2bw_fx.split(
        model,
        (x,),
        loss_fn=nn.functional.mse_loss,
        example_targets=y,
        cluster=2,
        costs="analytic",
        constraints=where,
    )
    with pytest.raises(WorkerError) as raised:
        pipe.train_local([(x, y)] * 3, optimizer=without_memory, microbatches_per_update=2)

    said = str(raised.value)
    assert re.match(r"rank 1 \(stage 1 on .*\) failed with OutOfMemoryError", said)
    assert "\nthe device's memory is full: try smaller microbatches" in said
    assert said.endswith(
        "\non rank 1, stage 1, in update 0, in the forward of microbatch 1 at stage 1, on W0\n"
    )
