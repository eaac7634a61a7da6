"""A GPT: pre-norm decoder with learned positions, the token embedding tied to the head."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class GPTConfig:
    vocab_size: int = 256
    sequence_length: int = 32
    num_layers: int = 4
    num_heads: int = 4
    width: int = 64
    dropout: float = 0.1
    tied: bool = True

    @classmethod
    def small(cls) -> GPTConfig:
        return cls()

    @classmethod
    def paper(cls) -> GPTConfig:
        """GPT-2 with 1.3 billion parameters, as in the 2BW paper (arXiv 2006.09503, section 4)."""
        return cls(50257, sequence_length=512, num_layers=24, num_heads=16, width=2048)

    @classmethod
    def paper_2_2b(cls) -> GPTConfig:
        """GPT-2 with 2.2 billion parameters, of the same comparison."""
        return cls(50257, sequence_length=512, num_layers=44, num_heads=16, width=2048)


class Attention(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.dropout = config.dropout
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)

    def forward(self, hidden: Tensor) -> Tensor:
        """hidden: (batch, time, width) -> the same"""
        batch, time, width = hidden.shape
        query, key, value = (
            part.view(batch, time, self.num_heads, width // self.num_heads).transpose(1, 2)
            for part in self.qkv(hidden).chunk(3, dim=-1)
        )  # (batch, heads, time, width / heads)
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(query, key, value, dropout_p=dropout, is_causal=True)
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, time, width))
        return out


class Block(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm_1 = nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.norm_2 = nn.LayerNorm(config.width)
        self.expand = nn.Linear(config.width, 4 * config.width)
        self.contract = nn.Linear(4 * config.width, config.width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self.dropout(self.attention(self.norm_1(hidden)))
        inner = F.gelu(self.expand(self.norm_2(hidden)))  # (batch, time, 4 * width)
        out: Tensor = hidden + self.dropout(self.contract(inner))
        return out


class GPT(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocab_size, config.width)
        self.positions = nn.Embedding(config.sequence_length, config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocab_size, bias=False)
        self.apply(_initialise)
        if config.tied:
            self.head.weight = self.tokens.weight

    @classmethod
    def from_config(cls, config: GPTConfig) -> GPT:
        return cls(config)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """tokens: (batch, time); the mean loss over `targets` (batch, time), else the logits."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        hidden = self.dropout(self.tokens(tokens) + self.positions(positions))  # (batch, time, width)
        for block in self.blocks:
            hidden = block(hidden)
        logits: Tensor = self.head(self.norm(hidden))  # (batch, time, vocab)
        if targets is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())

    def example_inputs(self, batch_size: int = 4) -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(0)
        shape = (batch_size, self.config.sequence_length + 1)
        text = torch.randint(self.config.vocab_size, shape, generator=generator)
        return text[:, :-1].contiguous(), text[:, 1:].contiguous()


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
