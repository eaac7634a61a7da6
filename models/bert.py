"""BERT: a bidirectional encoder with segments and a padding mask, trained on masked tokens, head tied."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

IGNORED = -100  # the label of a token that was not masked


@dataclass(frozen=True, slots=True)
class BertConfig:
    vocab_size: int = 256
    sequence_length: int = 32
    num_layers: int = 4
    num_heads: int = 4
    width: int = 64
    dropout: float = 0.1

    @classmethod
    def small(cls) -> BertConfig:
        return cls()

    @classmethod
    def paper(cls) -> BertConfig:
        """BERT-large: 24 layers, width 1024."""
        return cls(30522, sequence_length=512, num_layers=24, num_heads=16, width=1024)


class Layer(nn.Module):
    """Self-attention and a feed-forward network, each added to its input and then normalised."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.query = nn.Linear(config.width, config.width)
        self.key = nn.Linear(config.width, config.width)
        self.value = nn.Linear(config.width, config.width)
        self.mix = nn.Linear(config.width, config.width)
        self.norm_1 = nn.LayerNorm(config.width)
        self.expand = nn.Linear(config.width, 4 * config.width)
        self.contract = nn.Linear(4 * config.width, config.width)
        self.norm_2 = nn.LayerNorm(config.width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        """hidden: (batch, time, width); mask: (batch, 1, 1, time), True where attention is allowed"""
        query, key, value = (self._heads(part(hidden)) for part in (self.query, self.key, self.value))
        mixed = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        hidden = self.norm_1(hidden + self.dropout(self.mix(mixed.transpose(1, 2).flatten(2))))
        inner = self.contract(F.gelu(self.expand(hidden)))
        out: Tensor = self.norm_2(hidden + self.dropout(inner))
        return out

    def _heads(self, x: Tensor) -> Tensor:
        """(batch, time, width) -> (batch, heads, time, width / heads)"""
        return x.view(*x.shape[:2], self.num_heads, -1).transpose(1, 2)


class Bert(nn.Module):
    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocab_size, config.width)
        self.positions = nn.Embedding(config.sequence_length, config.width)
        self.segments = nn.Embedding(2, config.width)
        self.norm = nn.LayerNorm(config.width)
        self.dropout = nn.Dropout(config.dropout)
        self.layers = nn.ModuleList(Layer(config) for _ in range(config.num_layers))
        self.transform = nn.Linear(config.width, config.width)
        self.transform_norm = nn.LayerNorm(config.width)
        self.decoder = nn.Linear(config.width, config.vocab_size)
        nn.init.normal_(self.tokens.weight, std=0.02)
        self.decoder.weight = self.tokens.weight

    @classmethod
    def from_config(cls, config: BertConfig) -> Bert:
        return cls(config)

    def forward(
        self, tokens: Tensor, segments: Tensor, attended: Tensor, labels: Tensor | None = None
    ) -> Tensor:
        """tokens, segments (0 or 1), attended (1, or 0 for padding), labels: (batch, time); the mean loss
        over the labels that are not IGNORED, else the logits."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        embedded = self.tokens(tokens) + self.positions(positions) + self.segments(segments)
        hidden = self.dropout(self.norm(embedded))  # (batch, time, width)
        mask = attended.bool()[:, None, None, :]
        for layer in self.layers:
            hidden = layer(hidden, mask)
        transformed = self.transform_norm(F.gelu(self.transform(hidden)))
        logits: Tensor = self.decoder(transformed)  # (batch, time, vocab)
        if labels is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED)

    def example_inputs(self, batch_size: int = 4) -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(0)
        shape = (batch_size, self.config.sequence_length)
        tokens = torch.randint(self.config.vocab_size, shape, generator=generator)
        segments = torch.randint(2, shape, generator=generator)
        attended = torch.ones(shape, dtype=torch.long)
        attended[:, -3:] = 0
        labels = torch.where(torch.rand(shape, generator=generator) < 0.5, tokens, IGNORED)
        labels[:, 0] = tokens[:, 0]
        return tokens, segments, attended, labels
