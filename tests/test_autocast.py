"""Stages under autocast compute as the model does there, though it was traced without."""

from __future__ import annotations

import functools
import logging
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pd2bw_fx import Pipeline, load, split
from pd2bw_fx.errors import InputError, VerificationError


class Model(nn.Module):
    """Classifies what `inside` computes from two projections."""

    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Linear(16, 16)
        self.key = nn.Linear(16, 16)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.inside(self.query(x), self.key(x))).mean(1), y)

    def inside(self, query: Tensor, key: Tensor) -> Tensor:
        raise NotImplementedError


class NormInFloat32(Model):
    def inside(self, query: Tensor, key: Tensor) -> Tensor:
        x = query.to(torch.float32)
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)
        return x + key.float().exp().log()


class AddedByIndex(Model):
    def inside(self, query: Tensor, key: Tensor) -> Tensor:
        total = torch.zeros(query.shape, dtype=self.head.weight.dtype) + query
        picked = torch.arange(query.shape[0]).flip(0)
        return total.index_add(0, picked, key.to(self.head.weight.dtype))


class PutByIndex(Model):
    """Into what has the type of an activation, which as traced is a number of the program's."""

    def inside(self, query: Tensor, key: Tensor) -> Tensor:
        picked = torch.arange(query.shape[0]).flip(0)
        put, added, scattered = (torch.zeros(query.shape, dtype=query.dtype) for _ in range(3))
        put[picked] = query
        added.index_add_(0, picked, key)
        scattered.scatter_(0, picked[:, None, None].expand(key.shape), key)
        return torch.maximum(put, added).minimum(scattered.masked_scatter(key > 0, query))


class Masked(Model):
    def inside(self, query: Tensor, key: Tensor) -> Tensor:
        scores = query @ key.mT
        later = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1)
        low = torch.finfo(scores.dtype).min
        return torch.softmax(self.hidden(scores, later, low), dim=-1) @ key

    def hidden(self, scores: Tensor, later: Tensor, low: float) -> Tensor:
        return scores.masked_fill(later, low)


class MaskedByIndex(Masked):
    def hidden(self, scores: Tensor, later: Tensor, low: float) -> Tensor:
        scores[:, later] = low
        return scores


class MaskedByWhere(Masked):
    def hidden(self, scores: Tensor, later: Tensor, low: float) -> Tensor:
        return torch.where(later, low, scores)


class MaskedOfAnExpression(Masked):
    def hidden(self, scores: Tensor, later: Tensor, low: float) -> Tensor:
        return (scores * 2).masked_fill(later, low) + scores.clamp(min=low)


def drawn_batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randn(8, 6, 16), torch.randint(0, 4, (8,))


@pytest.fixture
def batch() -> tuple[Tensor, Tensor]:
    return drawn_batch()


def _split(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Pipeline:
    return split(model, batch, cluster=2, costs="analytic", check="full")


@functools.cache
def with_stages(kind: type[Model]) -> tuple[Model, Pipeline]:
    batch = drawn_batch()
    model = kind()
    return model, _split(model, batch)


@pytest.mark.parametrize("precision", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "model",
    [NormInFloat32, AddedByIndex, PutByIndex, Masked, MaskedByIndex, MaskedByWhere, MaskedOfAnExpression],
)
def test_stages_are_the_model_under_autocast(model, precision, batch):
    live, pipe = with_stages(model)
    with torch.autocast("cpu", precision):
        expected = live(*batch)
        found = pipe.run(batch)["loss"]
    assert found.item() == pytest.approx(expected.item(), rel=2 * torch.finfo(precision).eps ** 2)


def test_only_casts_with_something_to_do_are_written(batch: tuple[Tensor, Tensor]) -> None:
    source = "".join(stage.source for stage in _split(NormInFloat32(), batch).stages)
    assert source.count(".to(torch.float32)") == 1
    assert source.count(".float()") == 1


def test_a_model_without_low_precision_has_no_such_cast(batch: tuple[Tensor, Tensor]) -> None:
    class Plain(nn.Module):
        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return F.cross_entropy((x.float() * 2).mean(1).to(x.dtype).float()[:, :4], y)

    class Summed(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.ones(16))

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return super().forward(x * self.scale, y)

    assert all(".to(" not in stage.source for stage in _split(Summed(), batch).stages)


def test_limits_are_those_of_the_type(batch: tuple[Tensor, Tensor]) -> None:
    source = "".join(stage.source for stage in _split(MaskedOfAnExpression(), batch).stages)
    assert "scores.clamp(min=torch.finfo(scores.dtype).min)" in source
    assert "product.masked_fill(later, torch.finfo(product.dtype).min)" in source


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(16, 16), nn.GELU())

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return x.float() + self.inner(x.float())


class Chain(nn.Sequential):
    """A subclass that has torch's forward."""


class Of(nn.Module):
    """Members that no forward of the author's calls one by one."""

    def __init__(self, *members: nn.Module) -> None:
        super().__init__()
        self.before = nn.Linear(16, 16)
        self.members = nn.ModuleList(members)
        self.head = nn.Linear(16, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.before(x)
        with torch.autocast("cpu", torch.bfloat16):
            for member in self.members:
                hidden = member(hidden)
        return F.cross_entropy(self.head(hidden.float()).mean(1), y)


class WithoutGradients(Of):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            hidden = self.members[1](self.members[0](x))
        return F.cross_entropy(self.head(self.before(hidden)).mean(1), y)


class Decorated(Of):
    @torch.autocast("cpu", torch.bfloat16)
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.members[1](self.members[0](x))).mean(1), y)


def linear() -> nn.Module:
    return nn.Linear(16, 16)


IN_A_ROW = {
    "torch's own": lambda: Of(nn.Sequential(linear(), nn.ReLU()), nn.Sequential(linear(), nn.ReLU())),
    "one in another": lambda: Of(nn.Sequential(nn.Sequential(linear(), nn.ReLU()), linear()), linear()),
    "of another class": lambda: Of(Chain(linear(), nn.ReLU()), Chain(linear(), nn.ReLU())),
    "with a block": lambda: Of(nn.Sequential(Block(), linear()), nn.Sequential(linear(), Block())),
    "of blocks": lambda: Of(nn.Sequential(Block(), Block()), linear()),
    "without gradients": lambda: WithoutGradients(nn.Sequential(linear(), nn.ReLU()), Chain(linear())),
    "decorated": lambda: Decorated(nn.Sequential(linear(), nn.ReLU()), nn.Sequential(linear())),
}


@functools.cache
def uncut(name: str) -> Pipeline:
    return split(IN_A_ROW[name](), drawn_batch(), cluster=1, costs="analytic", check=False)


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize("name", IN_A_ROW)
def test_a_region_around_members_that_torch_calls_one_by_one(name: str, stages: int) -> None:
    pipe = split(uncut(name), cluster=stages, num_stages=stages, costs="analytic", check="full")

    assert pipe.verify().exact


def test_a_model_that_is_split_under_autocast_is_compared_under_it(batch: tuple[Tensor, Tensor]) -> None:
    with torch.autocast("cpu", torch.bfloat16):
        pipe = _split(NormInFloat32(), batch)
        assert pipe.verify().exact
    assert pipe.verify().exact


class Mixed(Model):
    """Calls an operator with two types under autocast, which it does not take."""

    def inside(self, query: Tensor, key: Tensor) -> Tensor:
        return torch.lerp(self.head.weight.new_zeros(16).expand_as(query), query, 0.3).float() + key


def test_what_autocast_would_refuse_is_found_without_a_word(
    batch: tuple[Tensor, Tensor], caplog: pytest.LogCaptureFixture
) -> None:
    _split(Mixed(), batch)
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def test_another_type_than_the_models_is_told(batch: tuple[Tensor, Tensor], tmp_path: Path) -> None:
    pipe = split(IN_A_ROW["torch's own"](), batch, cluster=2, num_stages=2, costs="analytic", check=False)
    pipe.save(tmp_path / "saved")
    written = tmp_path / "saved" / "stage_0.py"
    written.write_text(written.read_text().replace("dtype=torch.bfloat16", "enabled=False"))

    edited = load(tmp_path / "saved", edited=True)
    with pytest.raises(VerificationError, match="as float32, the model has it as bfloat16"):
        edited.verify(pipe.graph.root)


@pytest.mark.usefixtures("one_rank")
def test_training_is_asked_for_its_own_precision_under_a_callers_autocast() -> None:
    x = torch.randn(4, 16)
    pipe = split(nn.Sequential(nn.Linear(16, 4)), (x,), loss_fn=torch.mean, cluster=1, costs="analytic")
    options = {"optimizer": lambda p: torch.optim.SGD(p, lr=0.1), "microbatches_per_update": 2}

    with pipe.engine(**options) as plain, pipe.engine(**options, precision="bf16") as low:
        with torch.autocast("cpu", torch.bfloat16):
            for call in (plain.step, plain.eval, plain.outputs):
                with pytest.raises(InputError, match=r'autocast is on .*; precision="bf16"'):
                    call(x)
            with pytest.raises(InputError, match="autocast is on"):
                pipe.train_local([x], **options)
            found = low.eval(x).item()
        assert found == low.eval(x).item() != plain.eval(x).item()
