"""A multilayer perceptron classifier: the smallest model that can be split."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class MLPConfig:
    num_inputs: int = 32
    width: int = 64
    num_layers: int = 8
    num_classes: int = 10

    @classmethod
    def small(cls) -> MLPConfig:
        return cls()

    @classmethod
    def paper(cls) -> MLPConfig:
        """Wide enough that each layer fills a device: 1.1 billion parameters."""
        return cls(num_inputs=8192, width=8192, num_layers=16, num_classes=1000)


class MLP(nn.Module):
    def __init__(self, config: MLPConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Linear(config.num_inputs, config.width)
        self.layers = nn.ModuleList(nn.Linear(config.width, config.width) for _ in range(config.num_layers))
        self.head = nn.Linear(config.width, config.num_classes)

    @classmethod
    def from_config(cls, config: MLPConfig) -> MLP:
        return cls(config)

    def forward(self, features: Tensor, labels: Tensor | None = None) -> Tensor:
        """features: (batch, num_inputs); the mean loss over `labels` (batch,), else the logits."""
        hidden = F.gelu(self.embed(features))  # (batch, width)
        for layer in self.layers:
            hidden = hidden + F.gelu(layer(hidden))
        logits: Tensor = self.head(hidden)  # (batch, num_classes)
        return logits if labels is None else F.cross_entropy(logits, labels)

    def example_inputs(self, batch_size: int = 4) -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(0)
        features = torch.randn(batch_size, self.config.num_inputs, generator=generator)
        labels = torch.randint(self.config.num_classes, (batch_size,), generator=generator)
        return features.to(self.embed.weight.dtype), labels
