"""An LSTM encoder-decoder with attention, after GNMT: bidirectional first layer, residual stack."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class EncDecConfig:
    vocab_size: int = 128
    width: int = 32
    num_layers: int = 3  # of the encoder and of the decoder
    source_length: int = 10
    target_length: int = 8
    dropout: float = 0.2

    @classmethod
    def small(cls) -> EncDecConfig:
        return cls()

    @classmethod
    def paper(cls) -> EncDecConfig:
        """GNMT with 8 layers a side and width 1024."""
        return cls(32000, width=1024, num_layers=8, source_length=50, target_length=50)


class Encoder(nn.Module):
    def __init__(self, config: EncDecConfig) -> None:
        super().__init__()
        width = config.width
        self.embed = nn.Embedding(config.vocab_size, width)
        self.both_ways = nn.LSTM(width, width // 2, batch_first=True, bidirectional=True)
        self.layers = nn.ModuleList(
            nn.LSTM(width, width, batch_first=True) for _ in range(config.num_layers - 1)
        )
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, source: Tensor) -> Tensor:
        """source: (batch, source time) -> (batch, source time, width)"""
        hidden: Tensor
        hidden, _ = self.both_ways(self.dropout(self.embed(source)))
        for layer in self.layers:
            out, _ = layer(self.dropout(hidden))
            hidden = hidden + out
        return hidden


class Decoder(nn.Module):
    def __init__(self, config: EncDecConfig) -> None:
        super().__init__()
        width = config.width
        self.embed = nn.Embedding(config.vocab_size, width)
        self.first = nn.LSTM(width, width, batch_first=True)
        self.query = nn.Linear(width, width, bias=False)
        self.join = nn.Linear(2 * width, width)
        self.layers = nn.ModuleList(
            nn.LSTM(width, width, batch_first=True) for _ in range(config.num_layers - 1)
        )
        self.dropout = nn.Dropout(config.dropout)
        self.head = nn.Linear(width, config.vocab_size)

    def forward(self, target: Tensor, memory: Tensor) -> Tensor:
        """target: (batch, time), memory: (batch, source time, width) -> (batch, time, vocab)"""
        hidden, _ = self.first(self.dropout(self.embed(target)))  # (batch, time, width)
        context = F.scaled_dot_product_attention(self.query(hidden), memory, memory)
        hidden = torch.tanh(self.join(torch.cat([hidden, context], dim=-1)))
        for layer in self.layers:
            out, _ = layer(self.dropout(hidden))
            hidden = hidden + out
        logits: Tensor = self.head(hidden)
        return logits


class EncDec(nn.Module):
    def __init__(self, config: EncDecConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder = Encoder(config)
        self.decoder = Decoder(config)

    @classmethod
    def from_config(cls, config: EncDecConfig) -> EncDec:
        return cls(config)

    def forward(self, source: Tensor, target: Tensor, labels: Tensor | None = None) -> Tensor:
        """source: (batch, source time), target: (batch, time); the mean loss over `labels` (batch, time),
        the target moved on by one, else the logits."""
        logits: Tensor = self.decoder(target, self.encoder(source))
        if labels is None:
            return logits
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())

    def example_inputs(self, batch_size: int = 4) -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(0)
        config = self.config
        source = torch.randint(config.vocab_size, (batch_size, config.source_length), generator=generator)
        text = torch.randint(config.vocab_size, (batch_size, config.target_length + 1), generator=generator)
        return source, text[:, :-1].contiguous(), text[:, 1:].contiguous()
