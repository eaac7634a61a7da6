"""The shape that two shapes have together, where sizes are open: torch's own function takes numbers alone.

kl_divergence(MultivariateNormal(..), MultivariateNormal(..)) asks it for the batch's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

_TORCHS = torch._C._infer_size


@contextmanager
def sizes_inferred() -> Iterator[None]:
    with patch.object(torch._C, "_infer_size", _inferred):
        yield


def _inferred(one: Sequence[Any], other: Sequence[Any]) -> Any:
    if all(type(size) is int for size in (*one, *other)):
        return _TORCHS(torch.Size(one), torch.Size(other))
    return torch.broadcast_shapes(one, other)  # type: ignore[no-untyped-call]
