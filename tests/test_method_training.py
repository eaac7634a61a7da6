"""Every method of the field, trained on real processes, equals a reference of its own rule."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pd2bw_fx import split
from pd2bw_fx.actions import Shape
from pd2bw_fx.errors import WorkerError
from tests.programs.equals_methods import save_pipelines
from tests.torchrun import torchrun_of_forks


@dataclass(frozen=True)
class At:
    """A stage of a pipeline, as the papers' formulas see it."""

    shape: Shape
    stage: int

    @property
    def replicas(self) -> tuple[int, ...]:
        return self.shape.replicas or (1,) * self.shape.num_stages

    @property
    def per_update(self) -> int:
        """Microbatches of one update on one replica of this stage."""
        return self.shape.microbatches_per_update // self.replicas[self.stage]

    @property
    def after(self) -> int:
        """Stages after this one."""
        return self.shape.num_stages - 1 - self.stage

    @property
    def warm_up(self) -> int:
        """Forwards before the first backward, where a stage may be `slack` times its depth ahead."""
        return math.ceil(self.after * (1 + self.shape.slack))


def pipedream(at: At) -> tuple[int, int]:
    """arXiv 1806.03377: NOAM of the stage and those after it, and a version for each update in flight."""
    own = at.replicas[at.stage]
    warm_up = (sum(at.replicas[at.stage :]) - 1) // own
    deepest = at.shape.num_stages - 1 if at.shape.vertical_sync else warm_up
    return math.ceil(deepest / at.per_update) + 1, warm_up + 1


def unstashed(at: At) -> tuple[int, int]:
    """arXiv 2003.11666 and 1910.05124: PipeDream's order on the newest weights alone."""
    return 1, at.after + 1


def gpipe(at: At) -> tuple[int, int]:
    """arXiv 1811.06965: all forwards of an update come before its backwards."""
    return 1, at.per_update


def one_forward_one_backward(at: At) -> tuple[int, int]:
    return 1, min(at.per_update, at.warm_up + 1)


def searched(at: At) -> tuple[int, int]:
    """The most microbatches between forward and weight gradient in the order that was found."""
    assert at.shape.orders is not None
    changes = [(word[0] == "F") - (word[0] == "W") for word in at.shape.orders[at.stage].split()]
    return 1, max(itertools.accumulate(changes))


# The weight versions of a stage on a rank, and the microbatches in flight.
EXPECTED_ALIVE: Mapping[str, Callable[[At], tuple[int, int]]] = {
    "2bw": lambda at: (2, at.warm_up + 1),  # arXiv 2006.09503: two versions, whatever the depth
    "pipedream": pipedream,
    "pb": unstashed,
    "pipemare": unstashed,
    "gpipe": gpipe,
    "1f1b": one_forward_one_backward,
    "bapipe": lambda at: gpipe(at) if at.shape.base == "gpipe" else one_forward_one_backward(at),
    # arXiv 2401.10241: weight gradients are `stage` microbatches behind, so that all stages hold as many as
    # the first one of 1F1B, or in ZB-H2 about twice that.
    "zb-h1": lambda at: (1, min(at.shape.microbatches_per_update, at.shape.num_stages)),
    "zb-h2": lambda at: (1, min(at.shape.microbatches_per_update, 2 * at.shape.num_stages - 1)),
    "zb-auto": searched,
    "ddp": lambda at: (1, 1),
}


def expected_on_rank(method: str, shape: Shape, rank: int) -> int:
    """Returns the most microbatches in flight on a rank, those of all its stages together."""
    d, m = shape.num_stages, shape.microbatches_per_update
    if method == "chimera":  # arXiv 2107.06925: from D/2 + 1 at the ends to D in the middle
        return d // 2 + 1 + min(rank, d - 1 - rank)
    ranks = d // shape.chunks  # Megatron's warm-up: (v - 1) d + 2 (d - 1 - r) forwards
    return min(m * shape.chunks, (shape.chunks - 1) * ranks + 2 * (ranks - 1 - rank) + 1)


def check_alive(run: str, result: dict[str, Any]) -> None:
    method, shape = result["work"][0], Shape.from_json(result["work"][1])
    for rank, stages in enumerate(result["alive"]):
        if method in ("chimera", "interleaved"):
            assert {(held, needed) for held, needed, *_ in stages.values()} == {(1, 1)}, run
            of_rank = max(seen[-1] for seen in stages.values())
            if method == "chimera" and shape.microbatches_per_update > shape.num_stages:
                assert of_rank <= shape.num_stages, (run, rank)  # units of d microbatches, one after another
            else:
                assert of_rank == expected_on_rank(method, shape, rank), (run, rank)
            continue
        for name, (held, needed, in_flight, _) in stages.items():
            versions, microbatches = EXPECTED_ALIVE[method](At(shape, int(name)))
            assert held == versions, (run, rank)
            # Under vertical sync a later stage keeps versions that only microbatches to come will need.
            assert needed == versions or (shape.vertical_sync and int(name) > 0), (run, rank)
            assert in_flight == microbatches, (run, rank)


@pytest.mark.parametrize(
    ("num_ranks", "num_runs", "links"),
    [(2, 29, []), (2, 15, ["with_backend.py", "in-order"]), (3, 17, []), (4, 27, [])],
)
def test_every_method_equals_a_reference_of_its_rule_and_holds_what_its_formula_says(
    num_ranks: int, num_runs: int, links: list[str], tmp_path: Path
) -> None:
    which = ["once"] if links else []  # that optimizers compute the same, the links before have shown
    save_pipelines(num_ranks, tmp_path, once=bool(links))

    finished = torchrun_of_forks(
        num_ranks, *links, "equals_methods.py", tmp_path / "result.json", *which, tmp_path
    )

    assert finished.returncode == 0, finished.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    assert len(result) == num_runs
    for run, difference in result.items():
        assert difference["loss"] <= 1e-12, run
        assert difference["weights"] <= 1e-12, run
        check_alive(run, difference)
        assert difference["is_freed"], run


def test_precision_is_that_of_torchs_autocast_and_loss_scale(tmp_path: Path) -> None:
    finished = torchrun_of_forks(2, "precision.py", tmp_path / "result.json")

    assert finished.returncode == 0, finished.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    assert len(result) == 3
    for run, (found, expected) in ((run, r["losses"]) for run, r in result.items()):
        assert found == pytest.approx(expected, rel=1e-6), run
    for run, r in result.items():
        assert r["scales"][0] == r["scales"][1], run
        assert r["weights"] <= 1e-6, run
    assert result["fp16 64.0"]["scales"][0] < result["fp16 1.0"]["scales"][0]


class Squares(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.outer(torch.tanh(self.inner(x)) * x.amax(1, keepdim=True)).float().square().mean()


def test_fp16_leaves_out_an_update_whose_loss_is_not_finite_where_it_may_go_on() -> None:
    """As torch.amp.GradScaler does: the run is that of the other batches."""
    torch.manual_seed(0)
    model, batches = Squares(), [torch.randn(4, 4) for _ in range(5)]
    too_large = [*batches[:2], batches[0] * 1e30, *batches[2:]]

    def trained(given: list[Tensor], **options: Any) -> tuple[list[float], dict[str, Tensor]]:
        pipe = split(model, given[0][:2], cluster=2, costs="analytic", method="1f1b", check=False)
        result = pipe.train_local(
            given, optimizer=sgd, microbatches_per_update=2, precision="fp16", **options
        )
        return list(result.losses), pipe.state_dict()

    def sgd(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.01)

    with pytest.raises(
        WorkerError, match=r"loss of update 2 .* is nan; try .* go on .* with stop_at_nan=False"
    ):
        trained(too_large)
    losses, state = trained(too_large, stop_at_nan=False)
    assert not math.isfinite(losses.pop(2))
    expected, expected_state = trained(batches)
    assert losses == pytest.approx(expected, rel=1e-3)
    for name, tensor in state.items():
        torch.testing.assert_close(tensor, expected_state[name], rtol=1e-3, atol=1e-5)


class Steep(nn.Module):
    """Where `x` is large, gradients overflow fp16 until the loss scale has been halved, and the loss does
    not."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(x)
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden))
        return (hidden.float().square() * x.abs().amax()).mean()


def test_fp16_scales_by_the_version_of_a_microbatch_however_many_there_are() -> None:
    """With vertical sync on three stages, W(t+1) = W(t) - lr * grad f(W(t-2))."""
    torch.manual_seed(0)
    model, batches = Steep(), [torch.randn(4, 4) for _ in range(8)]
    batches[3] = batches[3] * 100
    versions, scales = [{n: p.detach().clone() for n, p in model.named_parameters()}], [2.0**16]
    for update, batch in enumerate(batches):
        ran_on, newest = max(update - 2, 0), dict(versions[-1])
        weights = {name: weight.requires_grad_() for name, weight in versions[ran_on].items()}
        with torch.autocast("cpu", torch.float16):
            loss = torch.func.functional_call(model, weights, batch)
        gradients = torch.autograd.grad(loss, list(weights.values()), torch.tensor(scales[ran_on]))
        is_finite = all(bool(gradient.isfinite().all()) for gradient in gradients)
        if is_finite:
            for name, gradient in zip(weights, gradients, strict=True):
                newest[name] = newest[name].detach() - 0.1 * gradient / scales[ran_on]
        versions.append(newest)
        scales.append(scales[-1] if is_finite else scales[-1] / 2)
    assert scales[-1] < scales[0]

    pipe = split(model, batches[0], cluster=3, costs="analytic", method="pipedream", check=False)
    pipe.train_local(
        batches,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        microbatches_per_update=1,
        vertical_sync=True,
        precision="fp16",
    )
    for name, tensor in pipe.state_dict().items():
        torch.testing.assert_close(tensor, versions[-1][name])
