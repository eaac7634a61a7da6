"""Sizes that a body reads often have a name, and the values of one statement stand in one line again."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pd2bw_fx
from pd2bw_fx.passes.codegen import generate
from tests.stages import case_of, compared, planned


def _body(model: nn.Module, *example: Tensor, of: str) -> list[str]:
    """Returns the lines of this class's forward, without comments; the stages equal the model."""
    case = case_of(model.double(), example)
    (program,) = programs = generate(case.graph, planned(case, 1))
    assert compared(case, planned(case, 1), programs).exact
    text = program.source.partition(f"class {of}(")[2].partition("def forward(")[2]
    return [line.partition("  # ")[0].strip() for line in text.partition("\n\n")[0].split("\n")[1:]]


def _turned(x: Tensor, cos: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second, first + second * cos], dim=-1)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
        self.cos = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor) -> Tensor:
        qkv = self.qkv(x).reshape(x.shape[0], 5, 3, 8).permute(2, 0, 1, 3)
        q, k, v = qkv[0], qkv[1], qkv[2]
        q, k = _turned(q, self.cos), _turned(k, self.cos)
        q = q.reshape(q.shape[0], 5, 2, 4).transpose(1, 2)
        k, v = (y.reshape(y.shape[0], 5, 2, 4).transpose(1, 2) for y in (k, v))
        mixed = F.scaled_dot_product_attention(q, k, v)
        return self.out(mixed.transpose(1, 2).reshape(x.shape[0], 5, 8))  # type: ignore[no-any-return]


class _Loss(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x).square().mean()  # type: ignore[no-any-return]


def test_a_size_that_is_read_often_has_a_name_and_values_of_one_statement_stand_in_one_line() -> None:
    assert _body(_Loss(Attention()), torch.randn(3, 5, 8).double(), of="Attention") == [
        "batch = x.shape[0]",
        "qkv = self.qkv(x).reshape(batch, 5, 3, 8).permute(2, 0, 1, 3)",
        "q, k, v = qkv[0], qkv[1], qkv[2]",
        "first, second = q.chunk(2, dim=-1)",
        "q = torch.cat([first * self.cos - second, first + second * self.cos], dim=-1)",
        "first, second = k.chunk(2, dim=-1)",
        "k = torch.cat([first * self.cos - second, first + second * self.cos], dim=-1)",
        "q = q.reshape(batch, 5, 2, 4).transpose(1, 2)",
        "k = k.reshape(batch, 5, 2, 4).transpose(1, 2)",
        "v = v.reshape(batch, 5, 2, 4).transpose(1, 2)",
        "mixed = F.scaled_dot_product_attention(q, k, v)",
        "return self.out(mixed.transpose(1, 2).reshape(batch, 5, 8))",
    ]


def test_a_size_has_no_name_where_a_value_has_that_name_or_only_rounds_of_a_loop_read_it() -> None:
    class Named(Attention):
        def forward(self, x: Tensor) -> Tensor:
            batch = torch.tanh(x)
            for _ in range(4):
                batch = torch.tanh(self.out(batch)).view(x.shape[0], 5, 8)
            y = batch.view(x.shape[0], 40) * batch.reshape(x.shape[0], 40)
            return y.view(x.shape[0], 5, 8) + batch

    class Rounds(Attention):
        def forward(self, x: Tensor) -> Tensor:
            for _ in range(4):
                x = torch.tanh(self.out(x)) + x.new_ones(x.shape[0], 1, 8)
            return x

    example = torch.randn(3, 5, 8).double()
    assert "y = batch.view(batch.shape[0], 40) * batch.reshape(batch.shape[0], 40)" in _body(
        _Loss(Named()), example, of="Named"
    )
    assert _body(_Loss(Rounds()), example, of="Rounds") == [
        "for _ in range(4):",
        "x = torch.tanh(self.out(x)) + x.new_ones(x.shape[0], 1, 8)",
        "return x",
    ]


def test_values_of_one_statement_keep_their_lines_where_they_are_long() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            y, z = self.first(x), self.second(x)
            long, other = (torch.tanh(u) * torch.sigmoid(u) + torch.sin(u) - torch.exp(u) for u in (y, z))
            first, second = long.exp(), other.exp()
            return first * second + long

    body = _body(_Loss(Net()), torch.randn(3, 8).double(), of="Net")
    assert body == [
        "y, z = self.first(x), self.second(x)",
        "long = torch.tanh(y) * torch.sigmoid(y) + torch.sin(y) - torch.exp(y)",
        "other = torch.tanh(z) * torch.sigmoid(z) + torch.sin(z) - torch.exp(z)",
        "first, second = long.exp(), other.exp()",
        "return first * second + long",
    ]


def test_a_loop_that_counts_all_members_of_a_list_goes_over_the_members() -> None:
    class Routed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.experts = nn.Linear(8, 4), nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

        def forward(self, x: Tensor) -> Tensor:
            chosen, out = self.gate(x).argmax(-1), torch.zeros_like(x)
            for number, expert in enumerate(self.experts):
                gate = torch.where(chosen == number, 1.0, 0.0)
                out = out + gate[:, None] * torch.tanh(expert(x))
            return out

    assert _body(_Loss(Routed()), torch.randn(3, 8).double(), of="Routed")[1:] == [
        "for number, expert in enumerate(self.experts):",
        "gate = torch.where(chosen == number, 1.0, 0.0)",
        "out = out + gate[:, None] * torch.tanh(expert(x))",
        "return out",
    ]


def test_a_linear_layer_that_is_called_by_its_weights_is_called() -> None:
    class Attending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
            self.attention.register_forward_hook(lambda *_: None)  # so that it is written out

        def forward(self, x: Tensor) -> Tensor:
            return self.attention(x, x, x, need_weights=False)[0]  # type: ignore[no-any-return]

    body = _body(Attending(), torch.randn(3, 5, 8).double(), of="MultiheadAttention")
    assert "attn_output = self.out_proj(attn_output)" in body
    assert "query, key, value" not in "\n".join(body)


def test_what_goes_into_a_part_of_a_sequence_has_a_line_of_its_own_in_front_of_the_loop() -> None:
    blocks = (nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(5))
    layers = nn.Sequential(*blocks)
    layers._modules = {f"layer_{name}": layer for name, layer in layers._modules.items()}

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.drop, self.layers, self.head = nn.Dropout(0.1), layers, nn.Linear(8, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(self.layers(self.drop(x))).square().mean()  # type: ignore[no-any-return]

    halves = pd2bw_fx.Constraints(stage_of={"layers.layer_2": 0, "layers.layer_3": 1})
    pipe = pd2bw_fx.split(Net(), torch.randn(4, 8), cluster=2, costs="analytic", constraints=halves)
    first = pipe.stages[0].source
    assert 'self.layers = nn.ModuleDict(\n            {f"layer_{i}": nn.Sequential(' in first
    assert "x = self.drop(x)" in first
    assert "for layer in self.layers.values():\n            x = layer(x)" in first


class _Mixed(nn.Module):
    """A mixture of experts: a sum over a generator, whose terms are short enough to stand in one line."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(4, 4)
        self.experts = nn.ModuleList([nn.Linear(4, 4) for _ in range(4)])

    def forward(self, x: Tensor) -> Tensor:
        shares = self.gate(x).softmax(-1)
        y = sum(shares[:, e, None] * expert(x) for e, expert in enumerate(self.experts))
        return y.square().mean()


def test_a_sum_over_experts_is_a_loop_whatever_the_length_of_its_terms() -> None:
    torch.manual_seed(0)
    case = case_of(_Mixed().double(), (torch.randn(3, 4).double(),))

    plan = planned(case, 1)
    (program,) = generate(case.graph, plan)

    assert compared(case, plan, [program]).exact
    lines = [line.strip().partition("  # ")[0] for line in program.source.splitlines()]
    start = lines.index("y = 0")
    assert lines[start + 1 : start + 3] == [
        "for e, expert in enumerate(self.experts):",
        "y = y + shares[:, e, None] * expert(x)",
    ]


class _Centred(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("center_of_the_outputs", torch.zeros(1, 8))
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        loss = (y - self.center_of_the_outputs).square().mean()
        with torch.no_grad():
            center_of_this_batch = y.mean(0, keepdim=True)
            self.center_of_the_outputs = self.center_of_the_outputs * 0.987654321 + center_of_this_batch
        return loss


def test_what_is_kept_in_an_attribute_is_called_as_the_attribute_is() -> None:
    source = pd2bw_fx.split(_Centred(), torch.randn(4, 8), cluster=1, costs="analytic").stages[0].source

    assert "center_of_the_outputs = self.center_of_the_outputs * 0.987654321 + center_of_this_batch" in source
    assert "self.center_of_the_outputs.copy_(center_of_the_outputs)" in source


class _Underscored(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x_ = self.layer(x)
        x_ = x_.tanh() + x_
        return (x_ * x).mean()


def test_an_underscore_at_the_end_of_a_name_tells_it_from_another() -> None:
    assert _body(_Underscored(), torch.randn(4, 8, dtype=torch.float64), of="UnderscoredStage0") == [
        "x_ = self.layer(x)",
        "x_ = x_.tanh() + x_",
        "return (x_ * x).mean()",
    ]
