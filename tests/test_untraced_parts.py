"""Parts of a model that are run instead of traced: one operator of a stage each, with their parameters."""

from __future__ import annotations

import copy
import re
import textwrap
from collections import namedtuple
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import pd2bw_fx
from pd2bw_fx.errors import ExportError, InputError, TraceError
from tests.torchrun import torchrun_of_forks
from tests.trained import assert_trained_by_the_rule


class Reader(nn.Module):
    """Reads texts (batch, 7, 8) of unlike lengths, which are packed."""

    def __init__(self, rate: float = 0.0) -> None:
        super().__init__()
        self.cells = nn.LSTM(8, 6, batch_first=True, bidirectional=True)
        self.dropout = nn.Dropout(rate)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        packed = pack_padded_sequence(x, lengths.cpu(), batch_first=True, enforce_sorted=False)
        read, _ = pad_packed_sequence(self.cells(packed)[0], batch_first=True, total_length=x.shape[1])
        result: Tensor = self.dropout(read)
        return result


class Tagger(nn.Module):
    def __init__(self, reader: nn.Module) -> None:
        super().__init__()
        self.words = nn.Embedding(20, 8)
        self.reader = reader
        self.last = nn.Sequential(nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 5))

    def forward(self, words: Tensor, lengths: Tensor, tags: Tensor) -> Tensor:
        hidden = self.reader(self.words(words), lengths)
        return functional.cross_entropy(self.last(hidden).flatten(0, 1), tags.flatten())


def texts(size: int = 6) -> tuple[Tensor, ...]:
    return torch.randint(20, (size, 7)), torch.randint(1, 8, (size,)), torch.randint(5, (size, 7))


def as_read(x: Tensor, lengths: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], x.shape[1], 12)


def split(model: nn.Module, example: tuple[Tensor, ...], **options: Any) -> pd2bw_fx.Pipeline:
    given: dict[str, Any] = {"cluster": 2, "num_stages": 2, "costs": "analytic", **options}
    return pd2bw_fx.split(model, example, **given)


def tagger(rate: float = 0.0) -> tuple[nn.Module, nn.Module]:
    """One whose reader is run as it is written, and the same one before."""
    torch.manual_seed(0)
    model = Tagger(Reader(rate)).double()
    before = copy.deepcopy(model)
    assert pd2bw_fx.untraced(model.reader, returns=as_read) is model.reader
    return model, before


class ShakeShake(torch.autograd.Function):
    """Mixes two branches by chance, and their gradients by another."""

    @staticmethod
    def forward(ctx: Any, one: Tensor, other: Tensor) -> Tensor:
        share = torch.rand(len(one), 1, dtype=one.dtype)
        return share * one + (1 - share) * other

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        share = torch.rand(len(gradient), 1, dtype=gradient.dtype)
        return share * gradient, (1 - share) * gradient


class Mixed(nn.Module):
    def forward(self, one: Tensor, other: Tensor) -> Tensor:
        mixed: Tensor = ShakeShake.apply(one, other)  # type: ignore[no-untyped-call]
        return mixed


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other, self.mixed = nn.Linear(8, 8), nn.Linear(8, 8), Mixed()

    def forward(self, x: Tensor) -> Tensor:
        mixed: Tensor = self.mixed(self.one(x), self.other(x))
        return x + mixed


def test_a_part_that_draws_in_its_backward_has_the_gradients_of_the_same_draws() -> None:
    model = nn.Sequential(Branches(), nn.Dropout(0.1), Branches(), nn.Linear(8, 1))
    with pytest.raises(TraceError, match=r"draws random numbers .* in its backward.*pd2bw_fx.untraced"):
        split(model, (torch.randn(4, 8),))
    for branches in (model[0], model[2]):
        pd2bw_fx.untraced(branches.mixed, returns=lambda one, other: torch.empty_like(one))

    before = torch.get_rng_state()
    assert split(model, (torch.randn(4, 8, generator=torch.Generator()),)).verify().exact
    assert torch.equal(torch.get_rng_state(), before)


def test_packed_sequences_are_trained_as_by_the_model_itself() -> None:
    model, before = tagger()
    with pytest.raises(TraceError, match="pack"):
        split(before, texts())
    example = texts()
    assert model(*example) == before(*example)
    assert list(model.state_dict()) == list(before.state_dict())
    pipe = split(model, example, check="full", costs="measured", profile_cache=False)

    assert pipe.graph.batch_symbol == "batch"
    source = "".join(stage.source for stage in pipe.stages)
    assert re.search(r"return torch.ops.untraced.Reader\w*.default\(  # test_untraced_parts.py:", source)
    assert "training=self.training" in source
    assert_trained_by_the_rule(before, pipe, [texts() for _ in range(3)])


@pytest.mark.parametrize("method", ["1f1b", "zb-h1", "gpipe"])
def test_under_other_methods_and_recomputed(method: str) -> None:
    model, before = tagger()
    pipe = split(model, texts(), method=method, recompute=True)
    batches = [texts() for _ in range(3)]
    settings: dict[str, Any] = {"optimizer": lambda p: torch.optim.SGD(p, lr=0.05)}
    result = pipe.train_local(batches, microbatches_per_update=2, **settings)
    optimizer = settings["optimizer"](before.parameters())
    for batch, loss in zip(batches, result.losses, strict=True):
        expected = [before(*part) for part in zip(*(tensor.chunk(2) for tensor in batch), strict=True)]
        optimizer.zero_grad()
        (sum(expected) / 2).backward()
        optimizer.step()
        assert loss == pytest.approx(float(sum(expected).detach() / 2), rel=1e-12)


def test_what_it_draws_depends_on_the_microbatch_alone() -> None:
    model, _ = tagger(0.4)
    batches = [texts() for _ in range(3)]
    losses = []
    for num_stages, recompute in ((1, False), (2, False), (2, True)):
        pipe = split(copy.deepcopy(model), batches[0], num_stages=num_stages, recompute=recompute)
        settings: dict[str, Any] = {"optimizer": lambda p: torch.optim.SGD(p, lr=0.0), "seed": 3}
        losses.append(pipe.train_local(batches, microbatches_per_update=2, **settings).losses)
    assert losses[0] == pytest.approx(losses[1], rel=1e-12)
    assert losses[1] == pytest.approx(losses[2], rel=1e-12)


def test_an_untraced_part_is_in_its_stages_mode() -> None:
    model, _ = tagger(0.4)
    example = texts()
    pipe = split(model, example, check="full")
    for stage in pipe.stages:
        stage.module.eval()
    model.eval()
    assert torch.equal(pipe.run(example)["loss"], model(*example))


class Routed(nn.Module):
    """Each row is for the expert that scores highest; experts that no row is for do nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = nn.Linear(6, 4)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6)) for _ in range(4)
        )

    def forward(self, x: Tensor, *, scale: float) -> tuple[Tensor, Tensor]:
        shares, chosen = self.scores(x).softmax(-1).max(-1)
        result = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (chosen == number).nonzero().squeeze(-1)
            if len(rows):
                result = result.index_add(0, rows, expert(x[rows]) * shares[rows, None])
        return scale * result, chosen


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)
        self.blocks = nn.ModuleList([Routed(), Routed()])

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        for block in self.blocks:
            added, chosen = block(hidden, scale=0.5)
            hidden = hidden + added * (1 + chosen[:, None])
        return self.last(hidden).square().mean()


def test_several_results_and_several_parts_of_a_kind() -> None:
    torch.manual_seed(0)
    model = Mixture().double()
    before = copy.deepcopy(model)
    for block in model.blocks:
        pd2bw_fx.untraced(
            block, returns=lambda x, scale: (torch.empty_like(x), x.new_empty(len(x), dtype=torch.int64))
        )
    example = torch.randn(6, 6, dtype=torch.float64)
    pipe = split(model, (example,), check="full")

    source = "".join(stage.source for stage in pipe.stages)
    assert "torch.ops.untraced.Routed.several(" in source
    assert "torch.ops.untraced.Routed_2.several(" in source
    assert "{'scale': 0.5}" in source
    assert_trained_by_the_rule(before, pipe, [torch.randn_like(example) for _ in range(3)])


def test_results_have_the_structure_that_was_said() -> None:
    class Classified(nn.Module):
        """An adaptive softmax: which cluster a row is of depends on its target."""

        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Sequential(nn.Linear(6, 16), nn.Tanh())
            self.softmax = nn.AdaptiveLogSoftmaxWithLoss(16, 20, cutoffs=[4, 10])

        def forward(self, x: Tensor, targets: Tensor) -> Tensor:
            loss: Tensor = self.softmax(self.body(x), targets).loss
            return loss

    torch.manual_seed(0)
    model = Classified().double()
    before = copy.deepcopy(model)

    def said(x: Tensor, targets: Tensor) -> Any:
        return namedtuple("Found", ["output", "loss"])(x.new_empty(x.shape[0]), x.new_empty(()))

    pd2bw_fx.untraced(model.softmax, returns=said)
    batches = [(torch.randn(6, 6, dtype=torch.float64), torch.randint(20, (6,))) for _ in range(3)]
    pipe = split(model, batches[0], check="full")
    assert_trained_by_the_rule(before, pipe, batches)


def test_a_function_can_be_an_untraced_part() -> None:
    def sorted_by_python(x: Tensor) -> Tensor:
        return torch.stack(sorted(x, key=lambda row: float(row.sum())))

    class Sorting(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(ordered(x.tanh())).square().mean()

    ordered = pd2bw_fx.untraced(sorted_by_python, returns=torch.empty_like)
    model = Sorting(nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 6)).double()
    pipe = split(model, (torch.randn(6, 6, dtype=torch.float64),), check="full")
    assert "torch.ops.untraced.sorted_by_python.default([x.tanh()]" in pipe.stages[0].source


def test_hooks_of_an_untraced_part_run_once() -> None:
    model, before = tagger()
    for reader in (model.reader, before.reader):
        reader.register_forward_hook(lambda module, args, result: 2 * result)
    again = pd2bw_fx.untraced(model.reader, returns=as_read)
    example = texts()
    assert torch.equal(model(*example), before(*example))
    assert again is model.reader
    split(model, example, check="full")


class _Counting(Reader):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        self.count += 1
        return super().forward(x, lengths)


@pytest.mark.parametrize(
    ("reader", "returns", "message"),
    [
        (Reader, lambda x, lengths: x, r"^Reader returns .*\(6, 7, 12\), and by its .* be .*\(6, 7, 8\)"),
        (Reader, lambda x, lengths: (x, x), r"^Reader returns .* and by its `returns` it would be .*, torch"),
        (
            Reader,
            lambda x, lengths: 3,
            r"^`returns` of Reader\w* gives no tensor; expected tensors of the res",
        ),
        (
            Reader,
            lambda x, lengths: [x, {1}],
            r"^`returns` of Reader\w* gives a set; expected tensors of the",
        ),
        (
            _Counting,
            as_read,
            r"^_Counting writes in place into its count; expected a part that leaves it as it is",
        ),
    ],
)
def test_what_it_does_otherwise_than_was_said_is_told(reader: Any, returns: Any, message: str) -> None:
    model = Tagger(reader()).double()
    pd2bw_fx.untraced(model.reader, returns=returns)
    with pytest.raises(InputError, match=message.replace("Reader returns", r"Reader\w* returns")):
        split(model, texts())


def test_parts_that_cannot_be_untraced_are_refused(tmp_path: Path) -> None:
    model, _ = tagger()
    with pytest.raises(TraceError, match=r"Reader\w* is run as it is written, which torch\.export alone can"):
        split(model, texts(), tracer="fx")
    with pytest.raises(InputError, match=r"^Reader has parameters to train, and is no loss; .* returns="):
        pd2bw_fx.untraced(Reader())
    with pytest.raises(InputError, match=r"^returns is 3; a function of the same arguments was expected"):
        pd2bw_fx.untraced(Reader(), returns=3)
    with pytest.raises(ExportError, match=r"Reader\w* is not traced: split the model without it"):
        split(model, texts()).export_onnx(tmp_path / "onnx")


def test_a_model_with_an_untraced_part_trains_under_torchrun(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent(
            """
            import torch, torch.distributed as dist
            import pd2bw_fx
            from tests.test_untraced_parts import Reader, Tagger, as_read, texts

            dist.init_process_group("gloo")
            torch.manual_seed(0)
            model = Tagger(Reader()).double()
            pd2bw_fx.untraced(model.reader, returns=as_read)
            pipe = pd2bw_fx.split(model, texts(), cluster=2, num_stages=2, costs="analytic")
            engine = pipe.engine(optimizer=lambda p: torch.optim.SGD(p, lr=0.05), microbatches_per_update=2)
            losses = [float(engine.step(texts())) for _ in range(2)]
            engine.flush()
            assert float(engine.eval(texts())) > 0
            if dist.get_rank() == 0:
                print("losses", len(losses))
            """
        )
    )
    finished = torchrun_of_forks(2, script)
    assert finished.returncode == 0, finished.stderr
    assert "losses 2" in finished.stdout
