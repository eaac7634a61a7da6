"""Losses that are run instead of traced: one operator of the stages, trained by the single-process rule."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import pd2bw_fx
from pd2bw_fx import untraced_call
from pd2bw_fx.errors import ExportError, InputError, TraceError
from pd2bw_fx.runtime.reference import train_reference
from tests.forks import Fork
from tests.torchrun import TIMEOUT_S
from tests.trained import assert_trained_by_the_rule


class Detector(nn.Module):
    """Three candidates for each row (batch, 6): scores of 4 kinds and boxes."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 12), nn.Tanh())
        self.kinds, self.boxes = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        candidates = self.body(x).unflatten(1, (3, 4))
        return {"kinds": self.kinds(candidates), "boxes": self.boxes(candidates).sigmoid()}


class Matching:
    """Gives each target the nearest candidate that is left, which Python finds by the values."""

    def __init__(self, weight: float) -> None:
        self.weight = weight

    def __call__(self, found: dict[str, Tensor], targets: dict[str, Tensor], scale: float = 1.0) -> Tensor:
        losses = []
        for kinds, boxes, wanted, places in zip(*found.values(), *targets.values(), strict=True):
            free = set(range(len(boxes)))
            for kind, place in zip(wanted, places, strict=True):
                nearest = min(free, key=lambda at: float((boxes[at] - place).abs().sum()))
                free.remove(nearest)
                apart = functional.l1_loss(boxes[nearest], place)
                losses.append(functional.cross_entropy(kinds[nearest], kind) + self.weight * apart)
        return scale * torch.stack(losses).mean()


def nearest_row(rows: Tensor, targets: Tensor) -> Tensor:
    return min((rows - target).square().sum() for target in targets)


def targets(size: int = 4) -> dict[str, Tensor]:
    places = torch.rand(size, 2, 4, dtype=torch.float64)
    return {"kinds": torch.randint(4, (size, 2)), "boxes": places}


def rows(size: int = 4) -> Tensor:
    return torch.randn(size, 6, dtype=torch.float64)


def split(model: nn.Module, *args: Any, **options: Any) -> pd2bw_fx.Pipeline:
    return pd2bw_fx.split(model.double(), args, cluster=2, num_stages=2, costs="analytic", **options)


def test_a_loss_that_matches_in_python_is_trained() -> None:
    torch.manual_seed(0)
    model, criterion = Detector(), Matching(2.0)
    with pytest.raises(TraceError, match=r"pd2bw_fx\.untraced"):
        split(model, rows(), loss_fn=criterion, example_targets=targets())
    loss_fn = pd2bw_fx.untraced(criterion)
    pipe = split(model, rows(), loss_fn=loss_fn, example_targets=targets(), check="full")
    assert "loss = torch.ops.untraced.Matching.default(" in pipe.stages[1].source
    assert pipe.trace_report is not None
    assert pipe.trace_report.tracer == "export"  # any batch size

    batches = [(rows(6), targets(6)) for _ in range(3)]
    assert_trained_by_the_rule(model, pipe, batches, loss_fn=criterion)


def kinds_and_boxes(kinds: Tensor, boxes: Tensor, wanted: Tensor) -> Tensor:
    """Boxes count for rows that have a target alone: in some microbatches none does."""
    loss = functional.cross_entropy(kinds, wanted)
    there = wanted > 0
    return loss + boxes[there].square().mean() if bool(there.any()) else loss


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.kinds, self.boxes = nn.Linear(6, 12), nn.Linear(12, 3), nn.Linear(12, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = self.body(x).tanh()
        return self.kinds(hidden), self.boxes(hidden)


@pytest.mark.parametrize(("method", "first"), [("2bw", 0), ("2bw", 1), ("zb-h1", 0)])
def test_a_value_that_some_microbatches_need_has_a_gradient_of_zeros_in_the_others(
    method: str, first: int
) -> None:
    model, loss_fn = TwoHeads(), pd2bw_fx.untraced(kinds_and_boxes, name="partly")
    wanted = torch.tensor([[0, 0, 1, 2], [1, 0, 0, 0], [2, 1, 0, 1]]).roll(2 * first, 1)
    batches = [(rows(4), each) for each in wanted]
    pipe = split(
        model,
        rows(2),
        loss_fn=lambda found, wanted: loss_fn(*found, wanted),
        example_targets=wanted[0, :2],
        constraints=pd2bw_fx.Constraints(stage_of={"kinds": 0, "boxes": 0}),
    )
    assert len(pipe.programs[0].outputs) == 2

    settings: dict[str, Any] = {
        "optimizer": functools.partial(torch.optim.SGD, lr=0.1),
        "microbatches_per_update": 2,
    }
    result = pipe.train_local(batches, method=method, **settings)

    by_rule = train_reference(
        model,
        batches,
        loss_fn=lambda found, wanted: kinds_and_boxes(*found, wanted),
        method="2bw" if method == "2bw" else "synchronous",
        **settings,
    )
    assert result.losses == pytest.approx(by_rule.losses, rel=1e-12)
    for name, tensor in by_rule.state_dict.items():
        torch.testing.assert_close(pipe.state_dict()[name], tensor, rtol=1e-12, atol=1e-15, msg=name)


@pytest.mark.parametrize("tracer", ["auto", "fx"])
def test_in_a_forward_and_with_numbers(tracer: str) -> None:
    class Judged(Detector):
        def forward(self, x: Tensor, kinds: Tensor, boxes: Tensor) -> Tensor:  # type: ignore[override]
            found = super().forward(x)
            return criterion(found, {"kinds": kinds, "boxes": boxes}, scale=0.5)

    criterion = pd2bw_fx.untraced(Matching(1.0), name="judged")
    pipe = split(Judged(), rows(), *targets().values(), tracer=tracer)
    assert "torch.ops.untraced.judged" in pipe.stages[1].source
    assert "{'kinds': ..., 'boxes': ...}), {'scale': 0.5}" in pipe.stages[1].source
    pipe.verify()


def test_each_untraced_loss_has_a_name_of_its_own() -> None:
    class Scored(nn.Sequential):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            hidden = super().forward(x)
            return one(hidden, y) + two(hidden, y) + three(hidden, y) + nearest(hidden, y)

    one, two = (pd2bw_fx.untraced(functools.partial(_scaled, by=by), name="scaled") for by in (1.0, 2.0))
    three = pd2bw_fx.untraced(lambda x, y: (x - y).abs().mean())
    nearest = pd2bw_fx.untraced(pd2bw_fx.untraced(nearest_row))
    pipe = split(Scored(nn.Linear(6, 6), nn.Linear(6, 6)), rows(), rows())
    for name in ("scaled", "scaled_2", "loss", "nearest_row"):
        assert f"torch.ops.untraced.{name}.default([" in pipe.stages[1].source
    pipe.verify()


def made(by: float) -> Any:
    def of_a_factory(x: Tensor, y: Tensor) -> Tensor:
        return _scaled(x, y, by)

    return of_a_factory


def test_a_pipeline_keeps_the_function_that_it_was_split_with() -> None:
    def pipe(by: float) -> pd2bw_fx.Pipeline:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
        return split(model, batch[0], loss_fn=pd2bw_fx.untraced(made(by)), example_targets=batch[1])

    batch = rows(), rows()
    one = pipe(1.0)
    loss = one.run(batch)["loss"].item()

    assert pipe(10.0).run(batch)["loss"].item() == pytest.approx(10 * loss)
    assert one.run(batch)["loss"].item() == loss
    result = one.train_local(
        [batch], optimizer=lambda p: torch.optim.SGD(p, lr=0.0), method="gpipe", microbatches_per_update=1
    )
    assert result.losses == pytest.approx([loss])
    assert pipe(1.0).stages[1].source == one.stages[1].source


@pytest.mark.parametrize(
    ("again", "name"),
    [
        ("def cell(x, y): return x.sum()", "cell"),
        ("\n\ndef cell(x, y):\n    return x.sum()", "cell"),
        ("def cell(x, y): return x.mean()", "cell_2"),
        ("def cell(x, y, by=1.0): return x.sum()", "cell_2"),
        ("cell = functools.partial(lambda x, y, by: by * x.sum(), by=2.0)", "partial"),
    ],
)
def test_a_cell_that_is_run_again_changes_no_name_and_one_that_was_edited_does(
    again: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(untraced_call, "_known", {})
    monkeypatch.setattr(untraced_call.UntracedFunction, "register", _noted)
    cells: dict[str, Any] = {"functools": functools}
    for text in ("def cell(x, y): return x.sum()", again, again):
        exec(text, cells)
        pd2bw_fx.untraced(cells["cell"])

    assert list(untraced_call._known)[-1] == name


def _noted(known: untraced_call.UntracedFunction) -> None:
    """Without an operator of torch, which would stay."""
    untraced_call._known[known.name] = known


def _scaled(x: Tensor, y: Tensor, by: float) -> Tensor:
    return by * (x - y).square().mean()


def test_autocast_does_not_choose_the_precision() -> None:
    class Under(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                return nearest(self.second(self.first(x)), y)

    nearest = pd2bw_fx.untraced(nearest_row)
    x, y = rows().float(), rows().float()
    assert nearest(x.bfloat16(), y.bfloat16()).dtype is torch.float32
    pipe = pd2bw_fx.split(Under(), (x, y), cluster=2, num_stages=2, costs="analytic")
    pipe.verify()


def test_losses_that_cannot_be_untraced_are_refused() -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    scale = nn.Parameter(torch.tensor(2.0, dtype=torch.float64))
    hidden = pd2bw_fx.untraced(lambda x, y: scale * (x - y).square().mean(), name="hidden")
    several = pd2bw_fx.untraced(lambda x, y: (x - y).square().mean(0), name="several")
    constant = pd2bw_fx.untraced(lambda x, y: (x.detach() - y).square().mean(), name="constant")
    given = pd2bw_fx.untraced(lambda x, y, kind: (x - y).square().mean(), name="given")

    with pytest.raises(InputError, match=r"^hidden reads a parameter that it was not given"):
        split(model, rows(), loss_fn=hidden, example_targets=rows())
    with pytest.raises(
        InputError, match=r"^several returns torch\.float64 of shape \(6,\); a loss, .*expected$"
    ):
        split(model, rows(), loss_fn=several, example_targets=rows())
    with pytest.warns(UserWarning, match=r"^no gradient flows from the loss that constant returned"):
        split(model, rows(), loss_fn=constant, example_targets=rows())
    with pytest.raises(InputError, match=r"untraced function was called with a dtype; expected tensors, "):
        split(model, rows(), loss_fn=lambda x, y: given(x, y, torch.float64), example_targets=rows())
    with pytest.raises(InputError, match=r"^'a b' is no name for a function; a word was expected"):
        pd2bw_fx.untraced(nearest_row, name="a b")
    with pytest.raises(InputError, match=r"^Bilinear has parameters to train, and is no loss; .* returns="):
        pd2bw_fx.untraced(nn.Bilinear(6, 6, 1))
    with pytest.raises(InputError, match=r"^function is the class Matching; give one of it: Matching\(\)$"):
        pd2bw_fx.untraced(Matching)
    for wrong in (None, 3):
        with pytest.raises(InputError, match=rf"^function is {wrong}; a loss function, or a part"):
            pd2bw_fx.untraced(wrong)  # type: ignore[arg-type]


def test_a_process_and_a_file_that_do_not_know_it(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    loss_fn = pd2bw_fx.untraced(nearest_row)
    pipe = split(model, rows(), loss_fn=loss_fn, example_targets=rows())
    with pytest.raises(ExportError, match=r"nearest_row is not traced: split the model without it"):
        pipe.export_onnx(tmp_path / "onnx")

    pipe.save(tmp_path / "saved")
    script = tmp_path / "script.py"
    script.write_text(
        "import torch, pd2bw_fx\n"
        f"pipe = pd2bw_fx.load({str(tmp_path / 'saved')!r})\n"
        "try:\n"
        "    pipe.stages\n"
        "except pd2bw_fx.PlanMismatchError as error:\n"
        "    print(error)\n"
        "def nearest_row(rows, targets):\n"
        "    return min((rows - target).square().sum() for target in targets)\n"
        "pd2bw_fx.untraced(nearest_row)\n"
        "batch = torch.ones(4, 6).double(), torch.zeros(4, 6).double()\n"
        "result = pipe.train_local([batch], optimizer=lambda p: torch.optim.SGD(p, lr=.1))\n"
        "print(len(result.losses))\n"
    )
    finished = Fork([str(script)]).ended(TIMEOUT_S)
    assert finished.returncode == 0, finished.stderr
    told, num_losses = finished.stdout.splitlines()
    assert "calls 'nearest_row', which is not traced" in told
    assert num_losses == "1"
