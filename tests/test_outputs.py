"""What a model returns beside its loss: numbers in training, everything in evaluation."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import pd2bw_fx
from pd2bw_fx.actions import RunRequest
from pd2bw_fx.runtime.job import Job, jobs, work_for
from pd2bw_fx.runtime.results import evaluation_pieces, joined
from tests.programs.returns_more import Autoencoder, sgd
from tests.torchrun import torchrun_of_forks


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_every_rank_has_what_the_model_returns(num_ranks: int, tmp_path: Path) -> None:
    finished = torchrun_of_forks(num_ranks, "returns_more.py", tmp_path / "found.json")

    assert finished.returncode == 0, finished.stderr
    found = [json.loads((tmp_path / f"found.json.{rank}").read_text()) for rank in range(num_ranks)]
    assert found[1:] == found[:-1]
    result = found[0]
    assert result["reported"][:4] == result["numbers"]
    for losses, numbers in zip(result["losses"], result["numbers"], strict=False):
        assert losses == pytest.approx(numbers["error"] + 0.1 * numbers["size"])
    first = result["numbers"][0]
    assert (first["near"], first["is_large"]) == tuple(result["counted"])
    assert result["evaluated"] == pytest.approx(result["counted_then"])
    assert result["some"] == ["error", "found"]
    assert result["everything"] == ["loss", "size", "error", "near", "is_large", "found", "code", "spread"]
    assert result["same"]
    assert result["same_of_seven"]
    assert result["same_spread"]
    assert "no 'fuond'; its outputs are 'loss', 'size'" in result["unknown"]


@pytest.fixture
def batches() -> list[Tensor]:
    torch.manual_seed(0)
    return list(torch.randn(3, 16, 8))


def test_a_local_run_has_the_numbers_of_every_update(batches: list[Tensor]) -> None:
    model = Autoencoder()
    pipe = pd2bw_fx.split(model, (batches[0],), cluster=2, num_stages=2, costs="analytic")
    expected = model(batches[0])
    result = pipe.train_local(batches, optimizer=sgd, microbatches_per_update=2)

    assert result.numbers.keys() == {"size", "error", "near", "is_large"}
    assert len(result.numbers["error"]) == len(result.losses) == 3
    for name in ("size", "error"):
        assert result.numbers[name][0] == pytest.approx(expected[name].item())
    assert (
        result.numbers["near"][0] == expected["near"].item() / 2
    )  # a sum: the mean of the microbatches' ones


class RunningMean(nn.Linear):
    """Returns part of a buffer, which the next forward writes again."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.register_buffer("mean", torch.zeros(2))

    def forward(self, x: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        loss = super().forward(x).square().mean()
        self.mean.mul_(0.5).add_(loss.detach(), alpha=0.5)  # type: ignore[operator]
        return {"loss": loss, "mean": self.mean[0]}  # type: ignore[index]


def test_a_number_that_is_part_of_a_buffer_is_what_it_was_in_its_microbatch(batches: list[Tensor]) -> None:
    model = RunningMean()
    pipe = pd2bw_fx.split(model, (batches[0][:4],), cluster=1, costs="analytic")
    model.mean.zero_()  # type: ignore[operator]
    pipe.load_state_dict(model.state_dict())
    result = pipe.train_local(
        batches[:1], optimizer=lambda p: torch.optim.SGD(p, lr=0.0), microbatches_per_update=4, method="1f1b"
    )

    means = [model(part)["mean"].item() for part in batches[0].chunk(4)]
    assert result.numbers["mean"][0] == pytest.approx(sum(means) / 4)


@pytest.mark.usefixtures("one_rank")
def test_an_output_that_is_part_of_a_buffer_is_what_it_was_in_its_microbatch(batches: list[Tensor]) -> None:
    class Remembering(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)
            self.register_buffer("last", torch.zeros(8))

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            h = self.layer(x)
            with torch.no_grad():
                self.last.copy_(h.mean(0))  # type: ignore[operator]
            return {"loss": h.square().mean(), "last": self.last[0]}  # type: ignore[index]

    model = Remembering()
    pipe = pd2bw_fx.split(model, (batches[0][:4],), cluster=1, costs="analytic", method="1f1b")
    with pipe.engine(optimizer=sgd, microbatches_per_update=2) as engine:
        found = engine.outputs(batches[0], "last")["last"]
        kept = engine.state_dict()["last"]

    means = [model(part)["last"].clone() for part in batches[0].chunk(2)]
    torch.testing.assert_close(found, torch.stack(means).mean(0))
    torch.testing.assert_close(kept, model.last)  # it is written in evaluation, too


def test_a_model_that_returns_a_loss_alone_has_no_numbers(batches: list[Tensor]) -> None:
    pipe = pd2bw_fx.split(
        nn.Linear(8, 8), (batches[0],), loss_fn=nn.functional.mse_loss, example_targets=batches[0], cluster=1
    )
    result = pipe.train_local([(batch, batch) for batch in batches], optimizer=sgd, method="1f1b")
    assert result.numbers == {}


class CallsItOtherwise(nn.Linear):
    def forward(self, x: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        rows = super().forward(x)
        return {"rows": rows, "total": rows.square().mean()}


def test_a_model_without_a_loss_is_refused_with_what_may_be_meant(batches: list[Tensor]) -> None:
    for model, told in (
        (nn.Linear(8, 1), "but 'output'; training needs one: .* as {'loss': ..}, or split"),
        (CallsItOtherwise(8, 1), r"but 'rows', 'total'; .*is it 'total'\? call that 'loss'"),
    ):
        pipe = pd2bw_fx.split(model, (batches[0],), cluster=1, costs="analytic", check=False)
        with pytest.raises(pd2bw_fx.InputError, match=f"returns no loss, {told}"):
            pipe.train_local(batches, optimizer=sgd)


class OfOneSize(nn.Module):
    """Traced for one size of batch alone, which it asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = self.first(x)
        found = self.last(torch.cat([hidden[:2] * 2, hidden[2:]]) if len(x.tolist()) == 4 else hidden)
        return {"loss": found.square().mean(), "found": found, "spread": found.std(0)}


def _job(model: nn.Module, batch: Tensor) -> Job:
    pipe = pd2bw_fx.split(model, (batch,), cluster=2, num_stages=2, costs="analytic", check=False)
    return jobs(pipe, work_for(pipe, RunRequest(microbatches_per_update=4)))[0]


def test_outputs_of_a_model_of_one_size(batches: list[Tensor]) -> None:
    job = _job(OfOneSize(), batches[0][:4])
    flat = job.layout.flatten((batches[0],))
    pieces = evaluation_pieces(job, flat, ("found", "loss"))
    assert [piece["x"].shape[0] for piece in pieces] == [4] * 4
    with pytest.raises(pd2bw_fx.InputError, match="not dimension 0, and no other, of the output 'spread'"):
        evaluation_pieces(job, flat, tuple(job.outputs))


class Similar(nn.Linear):
    """Returns how alike the samples of a batch are, and a weight for each of four classes."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        self.classes = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
        found = super().forward(x)
        weights = self.classes.softmax(0)
        loss = found.square().mean() * weights.square().sum()
        return {"loss": loss, "found": found, "similarity": found @ x.t(), "weights": weights}


def test_an_output_with_two_dimensions_of_the_batch_is_computed_of_the_whole_one(
    batches: list[Tensor],
) -> None:
    job = _job(Similar(), batches[0])
    flat = job.layout.flatten((batches[0],))
    assert len(evaluation_pieces(job, flat, ("found",))) == 4
    assert len(evaluation_pieces(job, flat, ("found", "similarity"))) == 1
    with pytest.raises(pd2bw_fx.InputError, match="of the output 'similarity'"):
        evaluation_pieces(job, pd2bw_fx.Microbatches(batches), ("similarity",))


def test_an_output_of_weights_alone_is_not_repeated_for_each_microbatch(batches: list[Tensor]) -> None:
    class OfFour(Similar):
        def forward(self, x: Tensor) -> dict[str, Tensor]:  # type: ignore[override]
            return super().forward(x * len(x.tolist()))

    job = _job(OfFour(), batches[0][:4])
    flat = job.layout.flatten((batches[0],))
    assert job.outputs["weights"].shape == (4,)
    assert len(evaluation_pieces(job, flat, ("found",))) == 4
    with pytest.raises(pd2bw_fx.InputError, match="of the output 'weights'"):
        evaluation_pieces(job, flat, ("weights",))


def test_outputs_are_put_together(batches: list[Tensor]) -> None:
    job = _job(Autoencoder(), batches[0])
    flat = job.layout.flatten((batches[0],))
    assert len(evaluation_pieces(job, flat, ("found", "error"))) == 4
    assert len(evaluation_pieces(job, flat, ("found", "spread"))) == 1
    parts = {f"{number} found": batches[0][4 * number : 4 * number + 4] for number in range(4)}
    parts |= {f"{number} error": torch.tensor(float(number)) for number in range(4)}
    found = joined(job, parts, range(4), ("error", "found"))
    assert torch.equal(found["found"], batches[0])
    assert found["error"] == 1.5
