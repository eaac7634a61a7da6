"""What a mask selects: two selections by one mask are as long as each other, as by indexing.

    loss(x.masked_select(mask), y.masked_select(mask))    ->    loss(x[mask], y[mask])

A trace knows a length that only a run can tell by the mask that it was counted in, and of masked_select it
does not know that it counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

_TORCHS = torch.masked_select


@contextmanager
def selected_by_index() -> Iterator[None]:
    with patch.object(torch, "masked_select", _selected), patch.object(Tensor, "masked_select", _selected):
        yield


def _selected(input: Tensor, mask: Tensor, **options: Any) -> Tensor:  # noqa: A002 - torch's word
    if options or mask.dtype is not torch.bool or input.shape != mask.shape:
        return _TORCHS(input, mask, **options)
    return input[mask]
