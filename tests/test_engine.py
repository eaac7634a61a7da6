"""The engine under torchrun: what it computes, and how it ends."""

from __future__ import annotations

import copy
import io
import json
import pickle
import re
import statistics
import time
from pathlib import Path

import numpy as np
import pytest
import torch

import pd2bw_fx
from pd2bw_fx.runtime.loss import Loss, Means
from pd2bw_fx.runtime.same_batches import UNKNOWN, sampled_digests
from tests.programs.equals_reference import save_pipelines
from tests.stages import split_of_our_own
from tests.torchrun import torchrun_of_forks


@pytest.mark.parametrize(
    ("num_stages", "num_runs", "links"),
    [(2, 21, []), (3, 12, []), (4, 12, []), (4, 12, ["with_backend.py", "in-order"])],
)
def test_losses_and_weights_equal_those_of_the_update_rule_in_one_process(
    num_stages: int, num_runs: int, links: list[str], tmp_path: Path
) -> None:
    save_pipelines(num_stages, tmp_path)

    finished = torchrun_of_forks(
        num_stages, *links, "equals_reference.py", tmp_path / "result.json", tmp_path
    )

    assert finished.returncode == 0, finished.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    assert len(result) == num_runs
    for run, difference in result.items():
        assert difference["loss"] <= 1e-12, run
        assert difference["weights"] <= 1e-12, run


@pytest.mark.parametrize("num_stages", [1, 3])
def test_an_engine_evaluates_on_its_newest_weights_and_goes_on_training(
    num_stages: int, tmp_path: Path
) -> None:
    finished = torchrun_of_forks(num_stages, "engine_life.py", tmp_path / "result.json")

    assert finished.returncode == 0, finished.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    expected = result["expected"]
    assert result["losses"] == pytest.approx(expected["losses"], rel=1e-12)
    assert result["evaluations"] == pytest.approx(expected["evaluations"], rel=1e-12)
    assert max(result["weight differences"]) <= 1e-14
    assert "differ in dimension 0" in result["refusal of unequal tensors"]
    assert result["refusal after close"] == "this engine was closed; make a new one"
    assert result["loss around another engine"] == result["losses"][0]
    assert result["refusal of no microbatches"] == f"0 microbatches were given; an update has {num_stages}"
    destroyed = "destroyed while the engine was open; call engine.close() before"
    assert destroyed in result["refusal without process group"]


def test_a_loss_behaves_as_the_number_that_it_is() -> None:
    def read(value: float) -> Loss:
        return Loss(0, [Means(("loss",), [([0], torch.tensor([[value]]))], lambda: None, is_known_here=True)])

    loss, other = read(0.75), read(0.5)

    assert (loss + 1, 1 - loss, loss * other, sum([loss, other]), -loss) == (1.75, 0.25, 0.375, 1.25, -0.75)
    assert loss > other
    assert min(loss, other) is other
    assert loss == 0.75
    assert f"{loss:.1f} {round(loss, 1)} {abs(loss)}" == "0.8 0.8 0.75"
    assert (int(loss), loss // 0.5, 2 // loss, loss % 0.5, 2 % loss, 4**other) == (
        0,
        1.0,
        2.0,
        0.25,
        0.5,
        2.0,
    )
    assert divmod(loss, 0.5) == (1.0, 0.25)
    assert (statistics.fmean([loss, other]), np.array([loss, other]).tolist()) == (0.625, [0.75, 0.5])
    assert not np.isnan(loss)


def test_a_loss_goes_where_scripts_have_a_tensor() -> None:
    """Its value is read only where it is asked for."""
    waits: list[int] = []
    means = Means(("loss",), [([0], torch.tensor([[0.75]]))], lambda: waits.append(1), is_known_here=False)
    loss = Loss(0, [means])

    kept = [
        loss.detach().float().mean(),
        loss.cpu().clone(),
        loss.to("cpu", non_blocking=True),
        copy.copy(loss),
    ]
    assert all(each is loss for each in [*kept, copy.deepcopy(loss)])
    assert not waits
    file = io.BytesIO()
    torch.save({"best": loss}, file)
    file.seek(0)
    assert torch.load(file)["best"] == pickle.loads(pickle.dumps(loss)) == 0.75
    assert waits == [1]
    assert loss.detach().item() == loss.tolist() == 0.0 + loss.detach().float() == 0.75
    assert torch.equal(torch.stack([loss.detach(), loss]), torch.tensor([0.75, 0.75]))
    assert loss.data.item() == 0.75
    with pytest.raises(
        pd2bw_fx.InputError, match=r"^engine\.step\(batch\) has done the forward, .* leave loss\.backward"
    ):
        loss.backward()
    assert torch.isfinite(loss)
    assert torch.zeros(1).add_(loss) == torch.zeros(()) + loss == loss + torch.zeros(()) == 0.75


MISTAKES = {
    "size": "InputError: the pipeline has 3 stages and there are 2 processes",
    "microbatches": "InputError: 2bw with 1 microbatch an update on 2 stages",
    "batches": "InputError: rank 1 was given another batch than rank 0",
    "clipping": "InputError: rank 1 was given max_gradient_norm=1.0, and rank 0 max_gradient_norm=None",
    "method": "InputError: rank 1 was given method='1f1b', and rank 0 method='2bw'",
    "disk": "no checkpoint can be written to",
    "count": "InputError: microbatches_per_update is '2'; a whole number",
}


def test_a_mistake_is_the_same_error_on_every_rank(mlp_folder: Path, tmp_path: Path) -> None:
    finished = torchrun_of_forks(2, "engine_errors.py", mlp_folder, tmp_path, *MISTAKES)

    assert finished.returncode != 0
    for mistake, expected in MISTAKES.items():
        for rank in range(2):
            assert expected in (tmp_path / f"{mistake}.{rank}").read_text()
    assert (tmp_path / "disk.0").read_text().startswith("InputError: rank 1: no checkpoint")
    assert [path.name for path in (tmp_path / "checkpoints").glob("*update*")] == ["update_000007"]
    _, cause = finished.stderr.split("Root Cause (first observed failure):")
    assert MISTAKES["count"] in cause  # the last one


def test_a_rank_that_raises_ends_the_others_with_its_reason(mlp_folder: Path, tmp_path: Path) -> None:
    began = time.monotonic()

    finished = torchrun_of_forks(2, "engine_errors.py", mlp_folder, tmp_path, "step")

    assert finished.returncode != 0
    assert time.monotonic() - began < 60
    assert (tmp_path / "step.1").read_text() == "ArithmeticError: the third step went wrong"
    other = (tmp_path / "step.0").read_text()
    assert other.startswith("WorkerError: rank 1 (stage 1) failed in update")
    assert "ArithmeticError: the third step went wrong" in other


@pytest.mark.parametrize(
    ("mistake", "where"),
    [
        ("shuffling", "in update 3 (input 'labels' differs)"),
        ("evaluation", "an evaluation after 6 updates ("),
    ],
)
def test_ranks_that_are_given_different_batches_later_are_told(
    mistake: str, where: str, mlp_folder: Path, tmp_path: Path
) -> None:
    finished = torchrun_of_forks(2, "engine_errors.py", mlp_folder, tmp_path, mistake)

    told = (tmp_path / f"{mistake}.0").read_text()
    assert told.startswith("InputError: rank 0 (stage 0) and rank 1 (stage 1) were given different batches")
    assert where in told
    assert "seed the data loader alike on all ranks, and use no DistributedSampler" in told
    assert where in finished.stderr.partition("Root Cause (first observed failure):")[2]


def test_few_entries_of_a_batch_tell_it_from_another_one() -> None:
    """However it lies in memory; of an input on a GPU nothing is known."""
    images = torch.randn(8, 3, 40, 40)
    tokens = torch.arange(9000 * 16).view(9000, 16)
    tokens[:, 0] = 1
    batch = {"images": images, "tokens": tokens, "flags": torch.tensor([True]), "none": torch.zeros(0, 2)}
    found = sampled_digests([batch])

    assert found == sampled_digests([batch | {"images": images.to(memory_format=torch.channels_last)}])
    others = sampled_digests([{name: t.roll(1, 0) + (name == "flags") * 1 for name, t in batch.items()}])
    assert [name for name in found if found[name] == others[name]] == ["none"]
    assert all(0 < digest < 2**53 for digest in found.values())
    assert found != sampled_digests([batch, batch])
    assert sampled_digests([{"images": images.to("meta")}]) == {"images": UNKNOWN}


def test_without_torchrun_an_engine_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    pipe = split_of_our_own("mlp", cluster=2)

    with pytest.raises(pd2bw_fx.InputError, match=r"torchrun.*train_local"):
        pipe.engine(optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1))


def test_ranks_that_add_to_each_others_updates_may_meet_between_steps(tmp_path: Path) -> None:
    """Tied weights, clipped and not, where the first stage has its backwards a whole update later."""
    finished = torchrun_of_forks(2, "meets.py", tmp_path)

    assert finished.returncode == 0, finished.stderr
    for losses, expected in json.loads((tmp_path / "losses.json").read_text()).values():
        assert losses == pytest.approx(expected, rel=1e-12)
    for rank in range(2):
        norms, expected = json.loads((tmp_path / f"norms.{rank}.json").read_text())
        assert norms == pytest.approx(expected, rel=1e-12)
        assert len(norms) == 6


@pytest.mark.parametrize(
    ("linked", "num_ranks", "ahead"), [("clipped", 2, 1), ("clipped", 7, 6), ("tied", 4, 2), ("both", 4, 3)]
)
def test_a_loss_that_waits_for_the_ranks_own_backwards_is_refused_until_they_are_done(
    linked: str, num_ranks: int, ahead: int, tmp_path: Path
) -> None:
    """PipeDream or pb, where `ahead` is the last stage whose versions take the first one's gradients."""
    finished = torchrun_of_forks(num_ranks, "reads_early.py", tmp_path, linked)

    assert finished.returncode == 0, finished.stderr
    found = [json.loads((tmp_path / str(rank)).read_text()) for rank in range(num_ranks)]
    for rank, each in enumerate(found):
        assert each["losses"] == found[0]["losses"]
        assert len(each["losses"]) == 2 * num_ranks + 1
        refused = range(num_ranks - ahead, 2 * num_ranks + 1) if rank < ahead else ()
        assert list(each["refused"]) == [str(update) for update in refused]
        if refused:
            assert re.fullmatch(
                rf"the loss of update {2 * num_ranks} cannot be read on rank {rank} yet: stage {ahead} "
                rf"computes it on W\d+, for .* stage 0 gives .* after {ahead - rank} more, or flush first",
                each["refused"][str(2 * num_ranks)],
            )


def test_the_example_script_trains_under_torchrun(tmp_path: Path) -> None:
    """With two layers, and batches of a quarter of its tokens."""
    script = (Path(__file__).parents[1] / "examples" / "train_gpt.py").read_text()
    smaller = {"width=128": "width=128, num_layers=2", "sequence_length=64": "sequence_length=32"}
    smaller |= {"batch_size=32": "batch_size=16", "batch_size=8": "batch_size=4"}
    for shown, run in smaller.items():
        assert shown in script
        script = script.replace(shown, run)
    (tmp_path / "train_gpt.py").write_text(script)

    finished = torchrun_of_forks(2, tmp_path / "train_gpt.py", "--updates", "21")

    assert finished.returncode == 0, finished.stderr
    losses = [float(line.split()[-1]) for line in finished.stdout.splitlines() if "update" in line]
    evaluated = {line.split()[-1] for line in finished.stdout.splitlines() if "validation" in line}
    assert len(losses) == 2
    assert losses[-1] < losses[0] - 1.0
    assert len(evaluated) == 1


@pytest.mark.parametrize("left", ["closed", "open"])
def test_a_rank_that_goes_on_after_its_failure_is_not_waited_for_in_vain(mlp_folder: Path, left: str) -> None:
    finished = torchrun_of_forks(2, "sweeps.py", mlp_folder, left)

    assert finished.returncode == 1
    assert "left out: the third step went wrong" in finished.stdout
    assert "WorkerError: rank 1 (stage 1) failed in update" in finished.stderr
    assert "ArithmeticError('the third step went wrong')" in finished.stderr
