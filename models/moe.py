"""A GPT whose feed-forward networks are mixtures of experts, each token routed to its best few."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class MoEConfig:
    vocab_size: int = 256
    sequence_length: int = 32
    num_layers: int = 3
    num_heads: int = 4
    width: int = 32
    num_experts: int = 4
    experts_per_token: int = 2
    balance: float = 0.01  # weight of the loss that spreads tokens over experts

    @classmethod
    def small(cls) -> MoEConfig:
        return cls()

    @classmethod
    def paper(cls) -> MoEConfig:
        return cls(32000, sequence_length=1024, num_layers=12, num_heads=16, width=1024, num_experts=16)


class Experts(nn.Module):
    """All experts as one batch of matrices; a token's result is weighted by its gates, most of them zero.

    Every expert computes every token, which needs no data-dependent shapes: right for the few experts of one
    device.
    """

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        inner = 4 * config.width
        self.expand = nn.Parameter(torch.randn(config.num_experts, config.width, inner) * 0.02)
        self.contract = nn.Parameter(torch.randn(config.num_experts, inner, config.width) * 0.02)

    def forward(self, tokens: Tensor, gates: Tensor) -> Tensor:
        """tokens: (batch, time, width), gates: (batch, time, experts) -> (batch, time, width)"""
        inner = F.gelu(torch.einsum("btw,ewi->btei", tokens, self.expand))
        return torch.einsum("btei,eiw,bte->btw", inner, self.contract, gates)


class MixtureOfExperts(nn.Module):
    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.num_experts = config.num_experts
        self.experts_per_token = config.experts_per_token
        self.router = nn.Linear(config.width, config.num_experts, bias=False)
        self.experts = Experts(config)

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """hidden: (batch, time, width) -> the same, and the balance loss of arXiv 2101.03961, equation 4"""
        probabilities = self.router(hidden).softmax(dim=-1)  # (batch, time, experts)
        top, chosen = probabilities.topk(self.experts_per_token, dim=-1)  # (batch, time, experts per token)
        mask = F.one_hot(chosen, self.num_experts).to(hidden.dtype)  # (batch, time, per token, experts)
        gates = (mask * (top / top.sum(dim=-1, keepdim=True)).unsqueeze(-1)).sum(dim=-2)
        share = mask.sum(dim=-2).mean(dim=(0, 1)) / self.experts_per_token  # (experts,)
        balance = self.num_experts * (share * probabilities.mean(dim=(0, 1))).sum()
        return self.experts(hidden, gates), balance


class Block(nn.Module):
    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.norm_1 = nn.LayerNorm(config.width)
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)
        self.norm_2 = nn.LayerNorm(config.width)
        self.mixture = MixtureOfExperts(config)

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        heads = self.qkv(self.norm_1(hidden)).unflatten(-1, (3, self.num_heads, -1))
        query, key, value = heads.transpose(1, 3).unbind(dim=2)  # (batch, heads, time, width / heads)
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.out(mixed.transpose(1, 2).flatten(2))
        routed, balance = self.mixture(self.norm_2(hidden))
        return hidden + routed, balance


class MoE(nn.Module):
    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocab_size, config.width)
        self.positions = nn.Embedding(config.sequence_length, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocab_size, bias=False)

    @classmethod
    def from_config(cls, config: MoEConfig) -> MoE:
        return cls(config)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """tokens: (batch, time); the mean loss over `targets` (batch, time), else the logits."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        hidden = self.tokens(tokens) + self.positions(positions)  # (batch, time, width)
        balances = []
        for block in self.blocks:
            hidden, balance = block(hidden)
            balances.append(balance)
        logits: Tensor = self.head(self.norm(hidden))  # (batch, time, vocab)
        if targets is None:
            return logits
        loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return loss + self.config.balance * torch.stack(balances).mean()

    def example_inputs(self, batch_size: int = 4) -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(0)
        shape = (batch_size, self.config.sequence_length + 1)
        text = torch.randint(self.config.vocab_size, shape, generator=generator)
        return text[:, :-1].contiguous(), text[:, 1:].contiguous()
