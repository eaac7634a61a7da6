"""VGG: a plain stack of 3x3 convolutions, then fully connected layers with dropout."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class VGGConfig:
    groups: tuple[tuple[int, ...], ...] = ((8, 8), (16, 16), (32, 32))  # channels; a pool ends each group
    image_size: int = 16
    hidden: int = 64
    num_classes: int = 10
    dropout: float = 0.5

    @classmethod
    def small(cls) -> VGGConfig:
        return cls()

    @classmethod
    def paper(cls) -> VGGConfig:
        """VGG-16."""
        groups = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))
        return cls(groups, image_size=224, hidden=4096, num_classes=1000)


class VGG(nn.Module):
    def __init__(self, config: VGGConfig) -> None:
        super().__init__()
        self.config = config
        layers: list[nn.Module] = []
        channels = 3
        for group in config.groups:
            for width in group:
                layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU(inplace=True)]
                channels = width
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        side = config.image_size // 2 ** len(config.groups)
        self.classifier = nn.Sequential(
            nn.Linear(channels * side * side, config.hidden),
            nn.ReLU(inplace=True),
            nn.Dropout(config.dropout),
            nn.Linear(config.hidden, config.hidden),
            nn.ReLU(inplace=True),
            nn.Dropout(config.dropout),
            nn.Linear(config.hidden, config.num_classes),
        )

    @classmethod
    def from_config(cls, config: VGGConfig) -> VGG:
        return cls(config)

    def forward(self, image: Tensor, labels: Tensor | None = None) -> Tensor:
        """image: (batch, 3, height, width); the mean loss over `labels` (batch,), else the logits."""
        hidden = self.features(image)  # (batch, channels, height / 2^groups, width / 2^groups)
        logits: Tensor = self.classifier(hidden.flatten(1))  # (batch, num_classes)
        return logits if labels is None else F.cross_entropy(logits, labels)

    def example_inputs(self, batch_size: int = 4) -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(0)
        size = self.config.image_size
        image = torch.randn(batch_size, 3, size, size, generator=generator)
        labels = torch.randint(self.config.num_classes, (batch_size,), generator=generator)
        return image.to(next(self.parameters()).dtype), labels
