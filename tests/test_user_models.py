"""Models as people have them: compiled, wrapped, with normed weights, with torch's own conditions."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pd2bw_fx
from pd2bw_fx import ctc
from pd2bw_fx.errors import InputError, TraceError
from pd2bw_fx.passes.verify.compare import coarsest_tolerance, tolerance_of
from tests.plain_models import Normed, Plain, rows


class Scripted(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(_swish(x))


@torch.jit.script
def _swish(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.7 * x)


class Translating(nn.Module):
    """torch's layers look whether the mask is causal, in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Transformer(8, 2, 1, 1, 16, dropout=0.0, batch_first=True)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        result: Tensor = self.inner(source, target, tgt_mask=mask)
        return result.square().mean()


class Picking(Plain):
    """The number of rows is known only in a run."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        result: Tensor = self.second(hidden[hidden.sum(dim=1) > 0]).square().sum()
        return result


class Losing(Plain):
    """A loss for each of torch's words that reduces nothing unless told to, and one that looks at values."""

    def forward(self, x: Tensor) -> Tensor:
        hidden, sign = self.second(self.first(x)), x.new_ones(x.shape[0])
        total = F.triplet_margin_loss(hidden, x, x.flip(0), margin=2.0)
        total = total + F.cosine_embedding_loss(hidden, x, sign, reduction="sum")
        total = total + F.kl_div(hidden.log_softmax(1), x.softmax(1))
        total = total + F.huber_loss(hidden, x, reduction="none").sum()
        total = total + F.margin_ranking_loss(hidden[:, 0], hidden[:, 1], sign)
        return total + F.gaussian_nll_loss(hidden, x, hidden.exp())


class Aligning(Plain):
    """torch's loss has a second result, whose size no trace can know; targets stand one after another."""

    def forward(self, x: Tensor, targets: Tensor) -> Tensor:
        steps = self.second(self.first(x)).log_softmax(dim=-1).transpose(0, 1)
        lengths = (targets > 0).sum(dim=1)
        sizes = torch.full_like(lengths, x.shape[1])
        total = F.ctc_loss(steps, targets[targets > 0], sizes, lengths, zero_infinity=True)
        return total + nn.CTCLoss(reduction="none")(steps, targets, sizes, lengths).sum()


class Drawing(Plain):
    """Noise that needs nothing of the stage before it, so that stages draw in another order."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = F.rrelu(self.first(x), training=self.training)
        result: Tensor = self.second(hidden + 0.1 * torch.randn_like(x)).square().mean()
        return result


class Skipping(Plain):
    """Stochastic depth at a rate that bernoulli_ has by default."""

    def forward(self, x: Tensor) -> Tensor:
        kept = x.new_empty((x.shape[0], 1)).bernoulli_(0.5)
        result: Tensor = self.second(x + kept * self.first(x)).square().mean()
        return result


class Coarse(Plain):
    """Rounds to a type that neither its weights nor its inputs have."""

    def __init__(self) -> None:
        super().__init__()
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x.double()).float().sin().double()
        result: Tensor = (self.second(hidden) + hidden).square().mean()
        return result


class Writing(Plain):
    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).add_(1).relu_()).pow_(2).mean()


class Looking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 8, sparse=True)
        self.plain = Plain()

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.plain(self.table((x[:, 0] > 0).long()))
        return result


class Caching(Plain):
    """Keeps what follows from its weights, in evaluation, and from the sizes, in a buffer that grows."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(3, 8))
        self.kept: dict[str, Tensor] = {}
        self.register_buffer("places", torch.zeros(1), persistent=False)
        self.places: Tensor

    def forward(self, x: Tensor) -> Tensor:
        if self.places.shape[0] != x.shape[1]:
            self.places = torch.arange(x.shape[1]).float()
        bias = self.kept.get("bias")
        if self.training or bias is None:
            bias = self.scale.sin().mean(0)
        if not self.training:
            self.kept["bias"] = bias
        return super().forward(x + bias + self.places)


class Clipping(Plain):
    """A layer with arguments that have a former name each."""

    def __init__(self) -> None:
        super().__init__()
        self.bounded = nn.Hardtanh(-2.0, 3.0)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.bounded(x))


@pytest.mark.filterwarnings("ignore:reduction. 'mean'")  # what torch thinks of kl_div's own default
@pytest.mark.parametrize(
    "kind",
    [Scripted, Normed, Translating, Picking, Losing, Aligning, Drawing, Skipping, Writing, Looking, Clipping],
)
def test_a_users_model_is_split_and_its_stages_compute_the_same(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model = kind()
    inputs: tuple[Tensor, ...] = rows()
    if kind is Translating:
        inputs = (torch.randn(4, 5, 8), torch.randn(4, 6, 8))
    if kind is Aligning:
        inputs = (torch.randn(4, 6, 8), torch.tensor([[1, 2, 0], [3, 0, 0], [4, 5, 6], [7, 7, 0]]))

    pipe = pd2bw_fx.split(model, inputs, cluster=2, num_stages=2, costs="analytic")

    assert pipe.trace_report.tracer.startswith("export")
    assert pipe.verify(model).worst.relative < 1e-6


@pytest.mark.parametrize("training", [True, False])
def test_what_a_model_keeps_from_one_call_for_the_next_is_not_left_behind(training: bool) -> None:
    model = Caching().train(training)

    pipe = pd2bw_fx.split(model, rows(), cluster=2, num_stages=2, profile_cache=False, check="full")

    assert pipe.costs.origin == "measured"
    assert model.kept == {}
    assert model.places.shape == (1,)
    assert pipe.trace_report is not None
    assert any("buffer places gets another shape" in note for note in pipe.trace_report.notes)
    for _ in range(2):
        assert pipe.verify().exact


def test_what_is_rounded_on_the_way_may_differ_by_its_rounding() -> None:
    pipe = pd2bw_fx.split(Coarse(), rows(), cluster=2, num_stages=2, costs="analytic")

    assert coarsest_tolerance(pipe.graph, pipe.stages) == 2e-5
    assert tolerance_of(torch.zeros(2, dtype=torch.float64), 2e-5) == 2e-5
    assert tolerance_of(torch.zeros(2, dtype=torch.int64), 2e-5) == 0


def test_the_loss_of_an_alignment_has_torchs_gradient_whatever_asks_for_it() -> None:
    steps = torch.randn(6, 4, 8, dtype=torch.float64).log_softmax(dim=-1)
    others = (torch.randint(1, 8, (4, 3)), torch.full((4,), 6), torch.tensor([3, 1, 2, 3]))
    for reduction in (0, 1, 2):
        ours, theirs = (steps.clone().requires_grad_() for _ in range(2))
        found = ctc.operator()(ours, *others, 0, reduction, False)
        known = torch.ctc_loss(theirs, *others, 0, reduction, False)
        found.sum().backward()
        known.sum().backward()
        assert torch.equal(found, known)
        assert torch.equal(ours.grad, theirs.grad)


def test_a_model_has_one_fingerprint() -> None:
    def fingerprint() -> str:
        model = nn.Sequential(*(nn.BatchNorm1d(8) for _ in range(12)))
        return pd2bw_fx.split(model, rows(), cluster=1, costs="analytic", check=False).graph.fingerprint()

    assert len({fingerprint() for _ in range(8)}) == 1


@pytest.mark.parametrize("moved", [nn.Module.float, nn.Module.cpu, lambda layer: layer.to(torch.float32)])
def test_a_layer_that_is_moved_to_where_it_is_stays(moved: Callable[[nn.Module], Any]) -> None:
    class Moving(Plain):
        def forward(self, x: Tensor) -> Tensor:
            moved(self.second.to(x.device))
            return super().forward(x)

    pipe = pd2bw_fx.split(Moving(), rows(), cluster=2, num_stages=2, costs="analytic")
    assert pipe.trace_report is not None
    assert pipe.trace_report.tracer == "export"
    with pytest.raises(TraceError, match=r"stopped at .*to_double"):
        pd2bw_fx.split(Doubling(), rows(), cluster=2, num_stages=2, costs="analytic")


class Doubling(Plain):
    def forward(self, x: Tensor) -> Tensor:
        to_double = self.second.double()
        return to_double(self.first(x).double()).square().mean()


def test_a_model_that_leaves_a_part_to_the_compiler_is_traced_as_it_runs_without() -> None:
    class Masking(Plain):
        def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
            if mask is None and not torch.compiler.is_compiling():
                mask = torch.linspace(0, 1, x.shape[1])
            return super().forward(x * mask[None, :])

    model = Masking()
    pipe = pd2bw_fx.split(model, rows(), cluster=2, num_stages=2, costs="analytic")

    assert pipe.trace_report.tracer == "export"
    assert any("torch.compiler.is_compiling() is false" in note for note in pipe.trace_report.notes)
    assert pipe.verify(model).exact
    assert not torch.compiler.is_compiling()

    given = pd2bw_fx.split(model, (*rows(), torch.ones(8)), cluster=2, num_stages=2, costs="analytic")
    assert not any("is_compiling" in note for note in given.trace_report.notes)


@pytest.mark.parametrize("wrap", [functools.partial(torch.compile, backend="eager"), nn.DataParallel])
def test_a_wrapped_model_keeps_its_names_and_is_told_of_better_ones(
    wrap: Callable[[nn.Module], nn.Module],
) -> None:
    model = wrap(Plain())

    pipe = pd2bw_fx.split(model, rows(), cluster=2, num_stages=2, costs="analytic")

    assert any("for stages that read as the model does" in note for note in pipe.trace_report.notes)
    model.load_state_dict(pipe.state_dict())
    assert pipe.verify(model).exact
    by_name = pipe.run({"x": rows()[0]})
    assert all(torch.equal(value, by_name[name]) for name, value in pipe.run(rows()).items())


def test_the_model_itself_is_compared_on_the_inputs_that_are_given() -> None:
    model = Plain()
    pipe = pd2bw_fx.split(model, rows(), cluster=2, num_stages=2, costs="analytic")

    assert pipe.verify(model, example={"x": torch.randn(7, 8)}).exact
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        pipe.verify(model, example={"x": torch.randn(4, 9)})


def test_a_model_that_cannot_be_split_is_refused_with_advice() -> None:
    class Lazy(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.LazyLinear(8)

    class Compiled(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.first = torch.jit.script(self.first)

    with pytest.raises(InputError, match=r"'first\.weight' of a lazy module has no size yet; run the model"):
        pd2bw_fx.split(Lazy(), rows(), cluster=2)
    with pytest.raises(InputError, match=r"module 'first' was compiled by torch\.jit"):
        pd2bw_fx.split(Compiled(), rows(), cluster=2)
    quantized = torch.ao.quantization.quantize_dynamic(Plain().eval(), {nn.Linear}, dtype=torch.qint8)
    with pytest.raises(InputError, match=r"'first' is a quantized Linear, .* split the model that it"):
        pd2bw_fx.split(quantized, rows(), cluster=2)
