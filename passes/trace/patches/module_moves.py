"""`self.layer.to(x.device)` in a forward, of a layer that is there: torch cannot move what it traces."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import _disable_current_modes


@contextmanager
def skip_no_op_moves() -> Iterator[None]:
    """Makes a module's `to`, `float`, `cuda` and the like do nothing where they would change nothing."""
    own: Any = nn.Module._apply

    def apply(module: nn.Module, fn: Callable[[Tensor], Tensor], *args: Any, **kwargs: Any) -> nn.Module:
        kinds = {(t.dtype, t.device) for t in (*module.parameters(), *module.buffers())}
        with _disable_current_modes():
            examples = [torch.empty(0, dtype=dtype, device=device) for dtype, device in kinds]
            changed = {(moved.dtype, moved.device) for moved in map(fn, examples)} != kinds
        if not changed:
            return module
        result: nn.Module = own(module, fn, *args, **kwargs)
        return result

    with patch.object(nn.Module, "_apply", apply):
        yield
