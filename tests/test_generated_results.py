"""Results of a call have their own names where it is called, and rounds of a loop the names of the loop."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pd2bw_fx import Constraints, split


class _Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, kept: list[Tensor]) -> Tensor:
        logits = self.gate(x)
        kept.append(logits)
        return x + self.up(x * logits.softmax(-1))


class _Body(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_Gated() for _ in range(2))

    def forward(self, x: Tensor, kept: list[Tensor]) -> Tensor:
        for layer in self.layers:
            x = layer(x, kept)
        return x


class _Leaking(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = _Body(), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        kept: list[Tensor] = []
        out = self.body(x, kept)
        balance = kept[0].logsumexp(-1) - kept[1].logsumexp(-1)
        return (self.head(out).sum(-1) + balance).mean()


def test_what_leaves_a_call_beside_its_result_is_not_called_as_the_result_is() -> None:
    source = split(_Leaking(), torch.randn(4, 8), cluster=1, costs="analytic").stages[0].source

    assert "x, logits = self.layers[0](x)" in source
    assert "return x, logits, logits_2" in source
    assert "out, logits, logits_2 = self.body(x)" in source


class _Rotation(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        angles = x.double().cumsum(-1)
        cos, sin = angles.cos(), angles.sin()
        return cos.to(dtype=x.dtype), sin.to(dtype=x.dtype)


class _Rotated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rotation, self.out = _Rotation(), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        position_embeddings = self.rotation(x)
        return (self.out(x) * position_embeddings[0] + x * position_embeddings[1]).mean()


def test_results_that_are_cast_as_they_are_returned_keep_their_names() -> None:
    source = split(_Rotated(), torch.randn(4, 8), cluster=1, costs="analytic").stages[0].source

    assert "return cos.to(torch.float32), sin.to(torch.float32)" in source
    assert "cos, sin = self.rotation(x)" in source


def _loss(logits: Tensor, targets: Tensor) -> Tensor:
    logits = logits.double()
    logits = logits.view(-1, 8)
    return nn.functional.cross_entropy(logits, targets.flatten())


class _Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 8)

    def forward(self, x: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.head(x)
        return _loss(logits, targets), logits


def test_a_value_whose_name_is_taken_until_later_gets_no_line_of_its_own() -> None:
    inputs = torch.randn(2, 4, 8), torch.randint(8, (2, 4))
    source = split(_Classifier(), inputs, cluster=1, costs="analytic").stages[0].source

    assert "loss = F.cross_entropy(logits.double().view(-1, 8), targets.flatten())" in source


class _Skipping(nn.Module):
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.res, self.skip = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, z: Tensor) -> tuple[Tensor, Tensor]:
            return z + self.res(z.tanh()), self.skip(z.cos())

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(self.Layer() for _ in range(6))

    def forward(self, image: Tensor) -> Tensor:
        x, added = image, image
        for layer in self.layers:
            x, s = layer(x)
            added = added * s
        return added.mean() + x.mean()


def test_a_value_that_crosses_has_its_name_among_the_results_of_a_call() -> None:
    stages = {f"layers.{at}": at // 3 for at in range(6)}
    pipe = split(_Skipping(), torch.randn(4, 8), cluster=2, constraints=Constraints(stage_of=stages))

    first, last = (stage.source for stage in pipe.stages)
    assert "x: float32 (batch, 8), to stage 1" in first
    assert "for layer in self.layers.values():\n            x, s = layer(x)" in last


class _Masked(nn.Module):
    class Layer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
            return hidden + self.linear(hidden) * mask

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(self.Layer() for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        mask = x > 0
        hidden = x
        for layer in self.layers:
            hidden = layer(hidden, mask)
        return hidden.square().mean() + x.mean()


class _Since(_Masked):
    def forward(self, x: Tensor) -> Tensor:
        hidden, mask = x.cos(), x > 0
        before = hidden
        hidden = self.layers[0](x, hidden)
        for layer in self.layers[1:]:
            hidden = layer(hidden, hidden)
        return hidden.square().mean() + before.mean() + mask.sum()


def test_a_first_round_of_another_value_is_in_the_loop_if_nothing_else_is_otherwise_in_it() -> None:
    source = split(_Masked(), torch.randn(4, 8), cluster=1, costs="analytic").stages[0].source
    since = split(_Since(), torch.randn(4, 8), cluster=1, costs="analytic").stages[0].source

    loop = "for layer in self.layers:\n            hidden = layer(hidden, mask)"
    assert f"hidden = x\n        {loop}" in source
    assert "for layer in self.layers[1:]:" in since


class _Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(7, 4) for _ in range(6))
        self.head = nn.Linear(24, 1)

    def embedded(self, words: Tensor) -> list[Tensor]:
        return [table(words[:, at].clamp(min=0)) for at, table in enumerate(self.tables)]

    def forward(self, words: Tensor) -> Tensor:
        found = self.embedded(words)
        return self.head(torch.cat(found, dim=1)).mean()  # type: ignore[no-any-return]


def test_a_list_that_a_function_returns_gives_no_name_to_the_first_in_it() -> None:
    words = torch.zeros(4, 6, dtype=torch.int64)
    source = split(_Embedding(), words, cluster=1, costs="analytic").stages[0].source

    assert "found = self.tables[0]" not in source
    assert "torch.cat(found, dim=1)" in source


class _Step(nn.Module):
    """Both states are given back, as one."""

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.out = nn.LSTM(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, state: tuple[Tensor, Tensor]) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        output, (hidden, cell) = self.rnn(x[None], state)
        return self.out(output[0]), (hidden, cell)


class _Mixing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query, self.value = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        weights = (self.query(x) @ x.transpose(1, 2)).softmax(-1)
        return weights @ self.value(x), weights


class _Translating(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = _Mixing(), _Mixing()
        self.step = _Step()

    def forward(self, x: Tensor) -> Tensor:
        x, weights = self.first(x)
        x, _ = self.second(x)
        state = (torch.zeros(1, x.shape[0], 4), weights.mean((1, 2))[None, :, None].expand(1, x.shape[0], 4))
        outs = []
        for t in range(5):
            out, state = self.step(x[:, t], state)
            outs.append(out)
        return torch.stack(outs).square().mean()


def test_what_nobody_reads_of_one_call_makes_no_other_class_and_no_other_forward() -> None:
    pipe = split(_Translating(), torch.randn(2, 5, 4), cluster=1, costs="analytic", check="full")
    source = pipe.stages[0].source

    assert source.count("class ") == 3  # _Mixing is one, and the stage's own
    assert "forward_2" not in source
    assert "x, weights = self.first(x)" in source
    assert "x, _ = self.second(x)" in source
    assert "for t in range(5):\n            out, hidden, cell = self.step(x[:, t], hidden, cell)" in source
    pipe.verify()


@dataclass
class Output:
    logits: Tensor
    penalty: Tensor


class _Returning(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Output:
        x = torch.tanh(self.first(x))
        out = Output(self.head(x), x.square().mean() * 0.1)
        return out


def test_what_an_object_is_made_of_is_not_called_as_the_object() -> None:
    source = split(_Returning(), torch.randn(4, 8), cluster=1, costs="analytic").stages[0].source

    assert "        logits = self.head(x)" in source
    assert "        penalty = x.square().mean() * 0.1" in source
    assert "        return logits, penalty" in source
