"""Models that use torch.utils.checkpoint: the stages compute the same, and hold what the plan says."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import pd2bw_fx


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.norm = nn.BatchNorm1d(8)

    def forward(self, x: Tensor) -> Tensor:
        return F.dropout(self.norm(self.linear(x)).relu(), 0.1, self.training)


class Nested(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = Block()

    def forward(self, x: Tensor) -> Tensor:
        inner: Tensor = checkpoint(self.block, x, use_reentrant=False)
        return inner * 2


class Model(nn.Module):
    def __init__(self, inner: nn.Module, *, use_reentrant: bool = False, opens: bool = True) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8) if opens else nn.Identity()
        self.inner = inner
        self.last = nn.Linear(8, 4)
        self.use_reentrant = use_reentrant

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = checkpoint(self.inner, self.first(x), use_reentrant=self.use_reentrant)
        return F.cross_entropy(self.last(x), y)


class InSegments(Model):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = checkpoint_sequential(self.inner, 2, self.first(x), use_reentrant=self.use_reentrant)
        return F.cross_entropy(self.last(x), y)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad=True")
@pytest.mark.parametrize(
    "model",
    [
        pytest.param(lambda: Model(Block()), id="as torch recommends"),
        pytest.param(lambda: Model(Block(), use_reentrant=True), id="reentrant"),
        pytest.param(
            lambda: Model(Block(), use_reentrant=True, opens=False), id="reentrant, of what has no gradient"
        ),
        pytest.param(lambda: Model(Nested()), id="nested"),
        pytest.param(lambda: InSegments(nn.Sequential(Block(), Block(), Block())), id="in segments"),
    ],
)
def test_gradients_are_those_of_the_model_itself(model: Any) -> None:
    torch.manual_seed(0)
    live = model()
    batch = torch.randn(4, 8), torch.tensor([0, 1, 2, 3])
    pipe = pd2bw_fx.split(live, batch, cluster=2, costs="analytic", check="full")

    torch.manual_seed(1)
    loss = live(*batch)
    loss.backward()
    torch.manual_seed(1)
    staged = pipe.run(batch)["loss"]
    staged.backward()

    assert torch.equal(staged, loss)
    gradients = {name: p.grad for stage in pipe.stages for name, p in stage.module.named_parameters()}
    for name, parameter in live.named_parameters():
        if parameter.grad is None:
            assert gradients[name] is None, name
        else:
            torch.testing.assert_close(gradients[name], parameter.grad, msg=name)
    assert any("torch.utils.checkpoint" in note for note in pipe.trace_report.notes)


def test_that_running_statistics_move_once_is_told_where_there_are_some() -> None:
    batch = torch.randn(4, 8), torch.tensor([0, 1, 2, 3])
    for inner, is_told in ((Block(), True), (nn.Linear(8, 8), False)):
        report = pd2bw_fx.split(Model(inner), batch, cluster=2, costs="analytic").trace_report
        assert report is not None
        assert any("running statistics move once" in note for note in report.notes) == is_told


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_hugging_face_model_with_gradient_checkpointing(use_reentrant: bool) -> None:
    config = transformers.GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=32, n_positions=16)
    model = transformers.GPT2LMHeadModel(config).train()
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    tokens = torch.randint(0, 32, (3, 12))

    pipe = pd2bw_fx.split(
        model, example_kwargs={"input_ids": tokens, "labels": tokens}, cluster=2, costs="analytic"
    )

    assert any("torch.utils.checkpoint" in note for note in pipe.trace_report.notes)
    assert "checkpoint" not in pipe.stages[0].source


class CopiedCheckpointFunction(torch.autograd.Function):
    """A library's own copy: of the operands the first `length` are inputs, the others get gradients too."""

    @staticmethod
    def forward(ctx: Any, function: Any, length: int, *operands: Tensor) -> Any:  # type: ignore[override]
        ctx.function, ctx.inputs, ctx.weights = function, operands[:length], operands[length:]
        with torch.no_grad():
            return function(*ctx.inputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        inputs = [tensor.detach().requires_grad_() for tensor in ctx.inputs]
        with torch.enable_grad():
            outputs = ctx.function(*inputs)
        return None, None, *torch.autograd.grad(outputs, [*inputs, *ctx.weights], gradients)


class Copied(Model):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = CopiedCheckpointFunction.apply(self.inner, 1, self.first(x), *self.inner.parameters())
        return F.cross_entropy(self.last(x), y)


def test_a_librarys_own_checkpointing_is_left_out_too() -> None:
    torch.manual_seed(0)
    model = Copied(nn.Sequential(nn.Linear(8, 8), nn.Tanh()))
    batch = torch.randn(4, 8), torch.tensor([0, 1, 2, 3])

    pipe = pd2bw_fx.split(model, batch, cluster=2, costs="analytic", check="full")

    assert pipe.verify().exact
    assert pipe.graph.batch_symbol == "batch"
