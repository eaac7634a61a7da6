"""Microbatches that the caller has cut, of unlike sizes in one update."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import torch

import pd2bw_fx
from pd2bw_fx import InputError, Microbatches
from pd2bw_fx.runtime.reference import train_reference
from tests.programs.unequal import batches, sgd, split
from tests.torchrun import torchrun_of_forks


@pytest.mark.parametrize("links", [[], ["with_backend.py", "in-order"]])
@pytest.mark.parametrize(("num_stages", "copies"), [(3, 1), (2, 2)])
def test_an_update_on_unlike_microbatches_is_that_of_the_rule(
    num_stages: int, copies: int, links: list[str], tmp_path: Path
) -> None:
    words = [*links, "unequal.py", tmp_path / "found.json", str(num_stages)]
    finished = torchrun_of_forks(num_stages * copies, *words)

    assert finished.returncode == 0, finished.stderr[-3000:]
    for rank in range(num_stages * copies):
        found = json.loads((tmp_path / f"found.json.{rank}").read_text())
        assert found["losses"] == pytest.approx(found["expected"], rel=1e-12)
        assert found["apart"] < 1e-12
        assert found["same_outputs"]
        assert found["evaluated"] == pytest.approx(found["mean"], rel=1e-12)
        few, empty, apart, none = found["refused"]
        assert few.startswith("3 microbatches were given, and an update has 4")
        assert empty.startswith("'x' has 0 samples")
        assert "the output 'spread', so that those of 3 microbatches" in apart
        assert none.startswith("no microbatch was given")


def test_local_workers_take_them_too() -> None:
    model, pipe = split(3)
    expected = train_reference(model, batches(), optimizer=sgd, microbatches_per_update=4)

    result = pipe.train_local(batches(), optimizer=sgd, microbatches_per_update=4)

    assert result.losses == pytest.approx(expected.losses, rel=1e-12)
    for name, weights in pipe.state_dict().items():
        assert torch.allclose(weights, expected.state_dict[name], rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(("given", "kind"), [(5, "int"), ("abcd", "str"), ({"x": [1]}, "dict")])
def test_microbatches_of_what_is_no_sequence_are_refused_where_they_are_made(
    given: object, kind: str
) -> None:
    with pytest.raises(InputError, match=f"a sequence of batches, found one {kind}; expected Micro"):
        Microbatches(given)  # type: ignore[arg-type]
    assert pickle.loads(pickle.dumps(Microbatches([1, 2]))) == (1, 2)


def test_microbatches_are_refused_instead_of_a_batch_and_if_too_few() -> None:
    model, pipe = split(3)
    few = Microbatches(batches()[0][:3])

    with pytest.raises(InputError, match="Microbatches were given where one batch is expected"):
        pipe.run(few)
    with pytest.raises(InputError, match="3 microbatches were given, and an update has 4; pass as many"):
        pipe.train_local([few], optimizer=sgd, microbatches_per_update=4)
    with pytest.raises(InputError, match="3 microbatches were given, and an update has 4"):
        train_reference(model, [few], optimizer=sgd, microbatches_per_update=4)
    assert isinstance(pd2bw_fx.Microbatches([few[0]])[0], torch.Tensor)


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (torch.zeros(3, 7, dtype=torch.float64), r"batch 0: microbatch 2: the batch's x has shape \(3, 7\)"),
        (torch.zeros(3, 8), "batch 0: microbatch 2: the batch's x is float32"),
    ],
)
def test_the_microbatch_that_does_not_fit_is_named(wrong: torch.Tensor, told: str) -> None:
    _, pipe = split(2)
    first, second, _, fourth = batches()[0]

    with pytest.raises(InputError, match=told):
        pipe.train_local([Microbatches([first, second, wrong, fourth])], optimizer=sgd)
