"""Attention layers are called as what they are, with the masks and options that their authors give them."""

from __future__ import annotations

from pathlib import Path

import torch
from onnx_exports import assert_alike
from torch import Tensor, nn
from torch.nn import functional as F

from pd2bw_fx import Constraints, split


class Reading(nn.Module):
    """Each kind of call that there is."""

    def __init__(self) -> None:
        super().__init__()
        self.queries = nn.Parameter(torch.randn(4, 8))
        self.own = nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True)
        self.cross = nn.MultiheadAttention(8, 2, bias=False, kdim=6, vdim=6, batch_first=True)
        self.masked = nn.MultiheadAttention(8, 2, dropout=0.1, add_bias_kv=True, add_zero_attn=True)
        self.drop, self.causal = nn.Dropout(0.1), nn.MultiheadAttention(8, 4, batch_first=True)
        self.split = nn.MultiheadAttention(8, 2, batch_first=True)
        self.register_buffer("mask", torch.ones(4, 4, dtype=torch.bool).triu(1))

    def forward(self, x: Tensor, padded: Tensor) -> tuple[Tensor, Tensor]:
        q = self.queries.expand(x.shape[0], -1, -1)
        out, weights = self.cross(q, x, x, key_padding_mask=padded)
        y, _ = self.own(out, out, out, need_weights=False)
        y = self.drop(y) + out
        for _ in range(3):
            z, _ = self.own(y, y, y, need_weights=False)
            y = y + z
        turned = y.transpose(0, 1)
        y = y + self.masked(turned, turned.tanh(), turned, attn_mask=self.mask)[0].transpose(0, 1)
        y = y + self.causal(y, y, y, attn_mask=self.mask, is_causal=True, need_weights=False)[0]
        shared = y.tanh()
        pair = self.split(y, shared, shared, average_attn_weights=False)
        return pair[0].square().mean() + pair[1].square().mean(), weights


def test_attention_is_called_as_its_author_called_it(tmp_path: Path) -> None:
    torch.manual_seed(0)
    padded = torch.zeros(3, 5, dtype=torch.bool)
    padded[0, 3:] = True
    model, batch = Reading(), (torch.randn(3, 5, 6), padded)
    pipe = split(model, batch, cluster=1, costs="analytic", check="full")
    source = pipe.stages[0].source
    for line in (
        "self.own = nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True)",
        "self.cross = nn.MultiheadAttention(8, 2, bias=False, kdim=6, vdim=6, batch_first=True)",
        "self.masked = nn.MultiheadAttention(8, 2, dropout=0.1, add_bias_kv=True, add_zero_attn=True)",
        "out, weights = self.cross(q, x, x, key_padding_mask=padded)",
        "y, _ = self.own(out, out, out, need_weights=False)",
        "        for _ in range(3):\n            z, _ = self.own(y, y, y, need_weights=False)",
        "self.masked(turned, turned.tanh(), turned, attn_mask=self.mask)[0]",
        "attn_mask=nn.Transformer.generate_square_subsequent_mask(4, device=y.device),",
        "self.split(y, shared, shared, average_attn_weights=False)",
    ):
        assert line in source, source
    assert pipe.verify().exact

    pipe.export_onnx(tmp_path / "onnx")
    assert_alike(tmp_path / "onnx", model.eval(), x=torch.randn(2, 5, 6), padded=padded[:2])


class Unlike(nn.Module):
    """Calls that the layer as its constructor makes it would answer otherwise."""

    def __init__(self) -> None:
        super().__init__()
        layers = [nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True) for _ in range(6)]
        self.hooked, self.evaluated, self.annealed, self.normed, self.weighing, self.tied = layers
        self.hooked.register_forward_hook(lambda module, given, made: (made[0] * 2, made[1]))
        nn.utils.parametrizations.weight_norm(self.normed.out_proj)
        self.tied.bias_k = self.tied.bias_v = nn.Parameter(torch.randn(1, 1, 8))

    def forward(self, x: Tensor) -> Tensor:
        x = self.hooked(x, x, x)[0]
        x = x + self.evaluated.eval()(x, x, x)[0]
        self.evaluated.train()
        self.annealed.dropout = 0.5
        x = x + self.annealed(x, x, x)[0]
        self.annealed.dropout = 0.1
        x = x + self.normed(x, x, x)[0] + self.tied(x, x, x)[0]
        x = x * self.weighing(x, x, x)[1].sum()
        return x.square().mean()


def test_attention_that_does_something_else_in_a_call_is_written_out() -> None:
    torch.manual_seed(0)
    pipe = split(Unlike(), (torch.randn(3, 5, 8),), cluster=1, costs="analytic", check=False)
    assert "nn.MultiheadAttention(" not in pipe.stages[0].source
    assert pipe.verify().exact


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn, self.norm = nn.MultiheadAttention(8, 2, batch_first=True), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        heard, _ = self.attn(h, h, h, need_weights=False)
        return x + heard


def test_attention_that_a_cut_divides_is_written_out_where_it_is_divided() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks, self.head = nn.ModuleList(Block() for _ in range(2)), nn.Linear(8, 5)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
            return F.cross_entropy(self.head(x[:, 0]), y)

    torch.manual_seed(0)
    batch = torch.randn(3, 4, 8), torch.tensor([1, 4, 0])
    within = Constraints(stage_of={"linear_2": 0, "scaled_dot_product_attention_1": 1})
    pipe = split(Net(), batch, cluster=2, costs="analytic", constraints=within, check=False)
    first = pipe.stages[0].source
    assert "heard, _ = self.attn(h, h, h, need_weights=False)" in first
    assert pipe.verify().exact
