"""Questions of sizes that torch asks while it describes the result of one operator, recorded as a whole.

They choose nothing of what a trace holds, and have an answer for a number of rows that depends on values:

h[mask].logsumexp(0)                asks whether there are rows, to know the sizes of the result
if h[mask].shape[0] == 0: ..        asks to go another way, in the author's code or in a function of torch
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from pathlib import Path
from types import FrameType

import torch
from torch._subclasses import fake_tensor
from torch.distributions import Distribution
from torch.fx.experimental import proxy_tensor
from torch.nn import functional

from pd2bw_fx.selected_rows import take_selected_rows_for_many

_OF_TORCH = os.path.dirname(torch.__file__)
_OF_LAYERS = os.path.dirname(functional.__file__)
_PATCHES = str(Path(__file__).parent)
_DESCRIBING = {fake_tensor.__file__, proxy_tensor.__file__}
# They raise an error, or do nothing: for a single value of each channel, and for a value of another shape.
_RAISING = {
    functional._verify_batch_size.__code__,  # type: ignore[attr-defined]
    functional._verify_spatial_size.__code__,  # type: ignore[attr-defined]
    Distribution._validate_sample.__code__,
}


def describe_operators_on_selected_rows() -> AbstractContextManager[None]:
    return take_selected_rows_for_many(_describes_an_operator)


def _describes_an_operator(asking: FrameType) -> bool:
    """Whether a question comes of running one operator on tensors without values."""
    frame: FrameType | None = asking
    while frame is not None:
        code = frame.f_code
        if code in _RAISING or code.co_filename in _DESCRIBING:
            return True
        if code.co_name == "decompose" and frame.f_back is not None:
            return frame.f_back.f_code.co_filename == fake_tensor.__file__  # else its parts are recorded
        is_torchs = code.co_filename.startswith(_OF_TORCH) and not code.co_filename.startswith(_OF_LAYERS)
        if not is_torchs and not code.co_filename.startswith(_PATCHES):
            return False
        frame = frame.f_back
    return False
