"""Hugging Face's experts, with torch's own product of groups: as in a run, and known to every process.

While torch traces, they call an operator of theirs in its place, but for bfloat16. A stage that calls that
needs transformers, and is no longer the model to the last bit.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import torch

_EXPERTS, _ASKED = "transformers.integrations.moe", "is_torchdynamo_compiling"
_OLDEST_GPU = (8, 0)  # that torch has the product for


@contextmanager
def multiply_experts_as_in_a_run() -> Iterator[None]:
    """Has the experts answer for themselves that nothing is traced, unless a GPU here is too old for it."""
    experts = sys.modules.get(_EXPERTS)
    gpus = range(torch.cuda.device_count())
    is_too_old = any(torch.cuda.get_device_capability(gpu) < _OLDEST_GPU for gpu in gpus)
    if is_too_old or not hasattr(experts, _ASKED):  # other versions of transformers may not ask
        yield
        return
    with patch.object(experts, _ASKED, lambda: False):
        yield
