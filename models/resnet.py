"""ResNet: residual blocks with batch norm, basic or bottleneck."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class ResNetConfig:
    blocks: tuple[int, ...] = (
        2,
        2,
        2,
    )  # how many in each group; every group after the first halves the image
    width: int = 8  # channels of the first group; doubled in each later one
    bottleneck: bool = False
    image_size: int = 16
    num_classes: int = 10
    large_stem: bool = False  # 7x7 with stride 2 and a pool, for images of 224

    @classmethod
    def small(cls) -> ResNetConfig:
        return cls()

    @classmethod
    def paper(cls) -> ResNetConfig:
        """ResNet-50."""
        return cls((3, 4, 6, 3), width=64, bottleneck=True, image_size=224, num_classes=1000, large_stem=True)


class BasicBlock(nn.Module):
    expansion = 1

    def __init__(self, num_inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv_1 = nn.Conv2d(num_inputs, width, 3, stride, padding=1, bias=False)
        self.norm_1 = nn.BatchNorm2d(width)
        self.conv_2 = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.norm_2 = nn.BatchNorm2d(width)
        self.shortcut = _shortcut(num_inputs, width, stride)

    def forward(self, image: Tensor) -> Tensor:
        """image: (batch, inputs, height, width) -> (batch, width, height / stride, width / stride)"""
        hidden = F.relu(self.norm_1(self.conv_1(image)), inplace=True)
        return F.relu(self.norm_2(self.conv_2(hidden)) + self.shortcut(image))


class Bottleneck(nn.Module):
    expansion = 4

    def __init__(self, num_inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv_1 = nn.Conv2d(num_inputs, width, 1, bias=False)
        self.norm_1 = nn.BatchNorm2d(width)
        self.conv_2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.norm_2 = nn.BatchNorm2d(width)
        self.conv_3 = nn.Conv2d(width, self.expansion * width, 1, bias=False)
        self.norm_3 = nn.BatchNorm2d(self.expansion * width)
        self.shortcut = _shortcut(num_inputs, self.expansion * width, stride)

    def forward(self, image: Tensor) -> Tensor:
        """image: (batch, inputs, height, width) -> (batch, 4 * width, height / stride, width / stride)"""
        hidden = F.relu(self.norm_1(self.conv_1(image)), inplace=True)
        hidden = F.relu(self.norm_2(self.conv_2(hidden)), inplace=True)
        return F.relu(self.norm_3(self.conv_3(hidden)) + self.shortcut(image))


def _shortcut(num_inputs: int, num_outputs: int, stride: int) -> nn.Module:
    if stride == 1 and num_inputs == num_outputs:
        return nn.Identity()
    return nn.Sequential(
        nn.Conv2d(num_inputs, num_outputs, 1, stride, bias=False), nn.BatchNorm2d(num_outputs)
    )


class ResNet(nn.Module):
    def __init__(self, config: ResNetConfig) -> None:
        super().__init__()
        self.config = config
        kernel, stride, padding = (7, 2, 3) if config.large_stem else (3, 1, 1)
        self.stem = nn.Conv2d(3, config.width, kernel, stride, padding=padding, bias=False)
        self.stem_norm = nn.BatchNorm2d(config.width)
        self.pool = nn.MaxPool2d(3, stride=2, padding=1) if config.large_stem else nn.Identity()
        kind = Bottleneck if config.bottleneck else BasicBlock
        channels, groups = config.width, []
        for group, num_blocks in enumerate(config.blocks):
            width, blocks = config.width * 2**group, []
            for block in range(num_blocks):
                blocks.append(kind(channels, width, stride=2 if group and not block else 1))
                channels = kind.expansion * width
            groups.append(nn.Sequential(*blocks))
        self.groups = nn.ModuleList(groups)
        self.head = nn.Linear(channels, config.num_classes)

    @classmethod
    def from_config(cls, config: ResNetConfig) -> ResNet:
        return cls(config)

    def forward(self, image: Tensor, labels: Tensor | None = None) -> Tensor:
        """image: (batch, 3, height, width); the mean loss over `labels` (batch,), else the logits."""
        hidden = self.pool(F.relu(self.stem_norm(self.stem(image))))
        for group in self.groups:
            hidden = group(hidden)
        pooled = hidden.mean(dim=(2, 3))  # (batch, channels)
        logits: Tensor = self.head(pooled)  # (batch, num_classes)
        return logits if labels is None else F.cross_entropy(logits, labels)

    def example_inputs(self, batch_size: int = 4) -> tuple[Tensor, ...]:
        generator = torch.Generator().manual_seed(0)
        size = self.config.image_size
        image = torch.randn(batch_size, 3, size, size, generator=generator)
        labels = torch.randint(self.config.num_classes, (batch_size,), generator=generator)
        return image.to(self.stem.weight.dtype), labels
