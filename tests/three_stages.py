"""A small model of three stages, each with its program as if it had been generated."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from pd2bw_fx.graph import TensorSpec
from pd2bw_fx.stage import Port, StageProgram

VOCABULARY, WIDTH, TIME = 11, 8, 5


class Embed(nn.Module):
    """tokens: (batch, time) -> hidden (batch, time, width), and a mask for the last stage."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)

    def forward(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        return self.embed(tokens), tokens > 2


class Block(nn.Module):
    """hidden (batch, time, width) -> (batch, time, width); dropout and batch norm differ in training."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.BatchNorm1d(TIME)

    def forward(self, embedding: Tensor) -> Tensor:
        hidden = functional.dropout(functional.gelu(self.linear(embedding)), 0.3, self.training)
        return embedding + self.norm(hidden)


class Head(nn.Module):
    """Logits by the tied embedding, and the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.lm_head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, hidden: Tensor, mask: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.lm_head(hidden * mask.unsqueeze(-1))
        return logits, functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


class Whole(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stages = nn.ModuleList([Embed(), Block(), Head()])
        self.stages[2].lm_head.weight = self.stages[0].embed.weight  # type: ignore[union-attr]

    def forward(self, tokens: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        embedding, mask = self.stages[0](tokens)
        logits, loss = self.stages[2](self.stages[1](embedding), mask, labels)
        return logits, loss


def spec(*shape: int | str, dtype: torch.dtype = torch.float32) -> TensorSpec:
    return TensorSpec(tuple(shape), dtype, dtype.is_floating_point, None)


def programs(dtype: torch.dtype = torch.float32, batch: int | str = "batch") -> tuple[StageProgram, ...]:
    """stage 0 -> stage 1 -> stage 2, and a mask from stage 0 straight to stage 2."""
    ids = spec(batch, TIME, dtype=torch.int64)
    hidden, mask = spec(batch, TIME, WIDTH, dtype=dtype), spec(batch, TIME, dtype=torch.bool)
    logits, loss = spec(batch, TIME, VOCABULARY, dtype=dtype), spec(dtype=dtype)
    norm = tuple(f"norm.{name}" for name in ("running_mean", "running_var", "num_batches_tracked"))
    return (
        StageProgram(
            0, "Embed", "", (Port("tokens", "tokens", ids),),
            (Port("embedding", "embedding", hidden, targets=(1,)), Port("gt", "mask", mask, targets=(2,))),
            ("embed.weight",), (), {},
        ),
        StageProgram(
            1, "Block", "", (Port("embedding", "embedding", hidden, source=0),),
            (Port("add", "added", hidden, targets=(2,)),),
            ("linear.weight", "linear.bias", "norm.weight", "norm.bias"), norm, {},
        ),
        StageProgram(
            2, "Head", "",
            (Port("add", "hidden", hidden, source=1), Port("gt", "mask", mask, source=0),
             Port("labels", "labels", ids)),
            (Port("linear_1", "scores", logits, model_output="logits"),
             Port("cross_entropy", "loss", loss, model_output="loss")),
            ("lm_head.weight",), (), {},
        ),
    )  # fmt: skip


def batch_of(size: int, seed: int = 0) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    draw = [torch.randint(0, VOCABULARY, (size, TIME), generator=generator) for _ in range(2)]
    return dict(zip(("tokens", "labels"), draw, strict=True))


def whole() -> Whole:
    """Returns the model, with running statistics that are not the initial ones."""
    torch.manual_seed(0)
    model = Whole()
    for _ in range(3):
        model(**batch_of(6))
    return model
