"""Functions of torch that take their operands in ways of their own, in models with an open batch size."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributions import MultivariateNormal, kl_divergence

import pd2bw_fx
from pd2bw_fx.errors import TraceError
from tests.trained import assert_trained_by_the_rule

WINDOW = torch.hann_window(16, dtype=torch.float64)


class Model(nn.Module):
    def __init__(self, function: Callable[[Model, Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(32, 8), nn.Linear(8, 1)
        self.bags = nn.EmbeddingBag(10, 8)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self, x).square().mean() + self.last(self.first(x)).square().mean()


def resynthesised(model: Model, x: Tensor) -> Tensor:
    spectrum = torch.stft(x, 16, 4, window=WINDOW, return_complex=True) * model.first.weight.mean()
    return torch.istft(spectrum, 16, 4, window=WINDOW, length=x.shape[1]) - x


def picked(model: Model, x: Tensor) -> Tensor:
    return model.first(x)[x[:, 0] > 0.05]


def two_selections(model: Model, x: Tensor) -> Tensor:
    hidden, mask = model.first(x), x[:, :8] > 0.5
    return F.mse_loss(hidden.masked_select(mask), torch.masked_select(x[:, 8:16], mask))


def by_two_masks(model: Model, x: Tensor) -> Tensor:
    hidden, mask = model.first(x), x[:, :8] > 0.5
    return F.mse_loss(hidden[~mask], x[:, 8:16][~mask])


def by_rows(model: Model, x: Tensor) -> Tensor:
    hidden, mask = model.first(x), x[:, 0] > x[:, 1] - 1
    return F.mse_loss(hidden.masked_select(mask.unsqueeze(-1)), x[:, 8:16].masked_select(mask[:, None]))


def others(model: Model, x: Tensor) -> Tensor:
    """Compares each sample with the others, and not with itself."""
    hidden = model.first(x)
    same = (x[:, :1] > 0.5) == (x[:, 0] > 0.5)
    same.fill_diagonal_(False)
    likeness = (hidden @ hidden.T).masked_fill(same, -1e9)
    return F.cross_entropy(likeness, torch.arange(len(x)))


def divergence(model: Model, x: Tensor) -> Tensor:
    """Calls distributions that check their arguments by assertions."""
    mean, deviation = model.first(x).chunk(2, -1)
    one = MultivariateNormal(mean, scale_tril=torch.diag_embed(deviation.exp()))
    identity = torch.eye(4, dtype=x.dtype).expand(len(x), -1, -1)
    return kl_divergence(one, MultivariateNormal(torch.zeros_like(mean), scale_tril=identity))


def words(x: Tensor) -> Tensor:
    return (x * 10).long().clamp(0, 9)


FUNCTIONS: dict[str, Callable[[Model, Tensor], Tensor]] = {
    "istft": resynthesised,
    "cov": lambda model, x: torch.cov(model.first(x).T),
    "cov of one row": lambda model, x: torch.cov(model.first(x)[:, 0], correction=0),
    "corrcoef": lambda model, x: model.first(x).T.corrcoef(),
    "corrcoef of complex numbers": lambda model, x: torch.corrcoef(
        torch.complex(model.first(x), model.first(x).flip(1) ** 2).T
    ).abs(),
    "the batch's size to the power": lambda model, x: (1 / x.shape[0]) ** torch.sigmoid(model.first(x)),
    "pow of the batch's size": lambda model, x: torch.pow(x.shape[0], torch.sigmoid(model.first(x))),
    "a pad of rows that a mask picks": lambda model, x: F.pad(picked(model, x).cumsum(-1), (1, 0)),
    "two selections by one mask": two_selections,
    "two selections by a mask that is computed twice": by_two_masks,
    "two selections by a mask of rows": by_rows,
    "all but the diagonal": others,
    "the divergence of two normals of several dimensions": divergence,
    "bags of one word": lambda model, x: model.last(model.bags(words(x)[:, 0].unsqueeze(1))),
    "bags of one word, as a view": lambda model, x: model.last(model.bags(words(x[:, :1]).view(-1, 1))),
    "bags of several": lambda model, x: model.last(model.bags(words(x[:, :3]))),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_stages_are_the_model_at_any_batch_size(name: str) -> None:
    torch.manual_seed(0)
    model = Model(FUNCTIONS[name]).double()
    before = copy.deepcopy(model)
    pipe = pd2bw_fx.split(
        model, torch.rand(6, 32).double(), cluster=2, num_stages=2, costs="analytic", check="full"
    )

    assert pipe.verify().worst.relative < 1e-14
    assert_trained_by_the_rule(before, pipe, [torch.rand(10, 32).double() for _ in range(3)])


def test_a_bag_of_one_word_is_called_as_the_layer() -> None:
    model = Model(FUNCTIONS["bags of one word"])
    (stage,) = pd2bw_fx.split(model, torch.rand(6, 32), cluster=1, costs="analytic", check=False).stages

    assert "self.bags(" in stage.source
    assert "nn.EmbeddingBag(10, 8)" in stage.source


def test_lengths_that_differ_for_a_trace_name_what_to_do() -> None:
    def by_two_masks(model: Model, x: Tensor) -> Tensor:
        hidden, mask = model.first(x), x[:, 0] > x[:, 1] - 1
        return F.cosine_similarity(hidden[~mask], x[:, 8:16][~mask])

    with pytest.raises(TraceError, match=r"Try: index by one mask that is computed once.*pd2bw_fx\.untraced"):
        pd2bw_fx.split(Model(by_two_masks), torch.rand(6, 32), cluster=2, costs="analytic")


def test_sparse_bags_with_weights_have_analytic_costs() -> None:
    class Weighed(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            bags, last = self
            return last(bags(words(x), per_sample_weights=x)).square().mean()

    model = Weighed(nn.EmbeddingBag(10, 8, mode="sum", sparse=True), nn.Linear(8, 1))
    assert pd2bw_fx.split(model, torch.rand(6, 5), cluster=2, costs="analytic").plan.num_stages


class Writing(nn.Module):
    """Writes its buffer by `out=`, which what is nicer to read has no place for."""

    def __init__(self, write: Callable[[Tensor, Tensor, Tensor], object]) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 1)
        self.register_buffer("kept", torch.zeros(8))
        self.write = write

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        with torch.no_grad():
            self.write(hidden.detach().mean(0), self.kept, torch.empty(8, dtype=torch.long))
        return self.last(hidden + self.kept).square().mean()


@pytest.mark.parametrize(
    ("write", "said"),
    [
        (lambda v, kept, _: torch.cat([v[4:], v[:4]], out=kept), ", out=self.kept)"),
        (lambda v, kept, _: torch.stack([v.sum(), v.mean()], out=kept[:2]), ", out=self.kept[:2])"),
        (lambda v, kept, _: torch.neg(v, out=kept), ", out=self.kept)"),
        (lambda v, kept, _: torch.softmax(v, 0, out=kept), ", out=self.kept)"),
        (lambda v, kept, order: torch.sort(v, out=(kept, order)), ", out=(self.kept, empty))"),
        (lambda v, kept, order: torch.max(v.expand(2, 8), 0, out=(kept, order)), ", out=(self.kept, empty))"),
    ],
    ids=["cat", "stack", "neg", "softmax", "sort", "max"],
)
def test_what_is_written_by_out_is_written_in_the_stages(write: Callable[..., object], said: str) -> None:
    torch.manual_seed(0)
    model = Writing(write)

    pipe = pd2bw_fx.split(model, torch.rand(6, 8), cluster=2, num_stages=2, costs="analytic", check="full")

    assert pipe.verify(model).exact
    assert said in "".join(stage.source for stage in pipe.stages)
