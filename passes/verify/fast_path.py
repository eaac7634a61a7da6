"""Torch's fast path for encoder layers: a model in evaluation takes it without gradients, and no stage does.

It packs the positions that a mask does not mark as padding, and padded positions come out as zeros. Computed
layer by layer, they have values as all positions do.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from pd2bw_fx.program import returned, with_gradients_if_asked

from .evaluation import outputs_differ
from .sides import Sides, randomness, weights_of

_WITH_FAST_PATH = (nn.TransformerEncoder, nn.TransformerEncoderLayer, nn.MultiheadAttention)


def may_take_fast_path(model: nn.Module) -> bool:
    """Whether the fast path is on and the model has encoders, which may be in evaluation mode (if frozen)."""
    return torch.backends.mha.get_fastpath_enabled() and _has(model, _WITH_FAST_PATH)


def may_give_zeros(model: nn.Module) -> bool:
    """Whether an encoder packs positions; with others the fast path only rounds differently."""
    encoders = (module for module in model.modules() if isinstance(module, nn.TransformerEncoder))
    return any(encoder.use_nested_tensor for encoder in encoders)


def _has(model: nn.Module, kinds: tuple[type[nn.Module], ...]) -> bool:
    return any(isinstance(module, kinds) for module in model.modules())


def note_on_fast_path(sides: Sides, tensors: Mapping[str, Tensor]) -> str:
    """Returns a note for users where the fast path changes the model's results on the example, or ""."""
    if not _has(sides.model, _WITH_FAST_PATH):
        return ""

    def run(gradients: bool) -> list[Mapping[str, Tensor]]:
        with weights_of(sides, tensors) as live:
            sides.model.eval()
            given = sides.given(tensors, live)
            found: list[Mapping[str, Tensor]] = []
            for fast in (True, False):
                with randomness(on=True):
                    found.append(returned(sides.forward, given, gradients=gradients, fast_path=fast))
            return found

    try:
        found = with_gradients_if_asked(run)
    except Exception:  # whatever the model's other branch raises, which `evaluation_of` reports
        return ""
    differs = outputs_differ(sides, *found)
    if not differs:
        return ""
    return (
        f"in evaluation without gradients the model's encoder takes torch's fast path, and {differs}: padded "
        "positions come out as zeros. The stages compute them as all others: leave them out of what the "
        "model returns, by the mask, or build the encoder with enable_nested_tensor=False"
    )
