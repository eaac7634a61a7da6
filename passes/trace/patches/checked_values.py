"""Checks of values by `torch._check_tensor_all`, which the stages assert, as they do a condition of Python's.

    torch._check_tensor_all(image_tokens.sum() == features.shape[0])      as Hugging Face's models check

Torch asks for the outcome in Python, and a trace has none.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from pd2bw_fx.assumptions import assumption

from .asked_places import authors_place
from .constants import constant_number

_torchs: Any = torch._check_tensor_all_with


@contextmanager
def assert_checked_values() -> Iterator[None]:
    """Makes this thread's checks of tensors assertions of the traced program."""
    thread = threading.get_ident()

    def check(error_type: Any, condition: Any, message: Any = None) -> None:
        is_traced = threading.get_ident() == thread and isinstance(condition, Tensor)
        if not is_traced or condition.dtype is not torch.bool or constant_number(condition.all()) is not None:
            _torchs(error_type, condition, message)
            return
        place, line = authors_place()
        torch.ops.aten._assert_async.msg(condition.all(), assumption(place, line, check=place))

    with patch.object(torch, "_check_tensor_all_with", check):
        yield
