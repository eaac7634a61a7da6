"""Real text without a download: the language reference that ships with Python, as bytes."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from pydoc_data.topics import topics
from typing import Literal

import torch
from torch import Tensor


@cache
def corpus() -> Tensor:
    """About 700 kB of English about Python: (bytes,), uint8."""
    text = "\n".join(topics[name] for name in sorted(topics))
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def byte_batches(
    *,
    batch_size: int,
    sequence_length: int,
    seed: int,
    num_batches: int | None = None,
    split: Literal["train", "validation"] = "train",
) -> Iterator[tuple[Tensor, Tensor]]:
    """Tokens and the same moved on by one, both (batch, time): windows drawn at random.

    The last tenth of the text is for validation. Without `num_batches` it never ends; the same seed gives
    the same batches.
    """
    text = corpus()
    border = len(text) * 9 // 10
    part = text[:border] if split == "train" else text[border:]
    generator = torch.Generator().manual_seed(seed)
    drawn = 0
    while num_batches is None or drawn < num_batches:
        starts = torch.randint(len(part) - sequence_length, (batch_size, 1), generator=generator)
        windows = part[starts + torch.arange(sequence_length + 1)].long()
        yield windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
        drawn += 1
