"""The methods by their names."""

from __future__ import annotations

from pd2bw_fx.errors import InputError

from .chimera import Chimera
from .flushed import BaPipe, DataParallel, GPipe, Inference, OneForwardOneBackward
from .interleaved import Interleaved
from .method import Method
from .streamed import PipeDream, PipelinedBackpropagation, PipeMare, TwoBuffered
from .zb_auto import ZeroBubbleAuto
from .zero_bubble import ZeroBubble1, ZeroBubble2

METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        TwoBuffered(),
        OneForwardOneBackward(),
        GPipe(),
        Interleaved(),
        PipeDream(),
        PipelinedBackpropagation(),
        PipeMare(),
        Chimera(),
        ZeroBubble1(),
        ZeroBubble2(),
        ZeroBubbleAuto(),
        BaPipe(),
        DataParallel(),
        Inference(),
    )
}


def method_of(name: str) -> Method:
    """Raises InputError for a name that is none."""
    if name not in METHODS:
        raise InputError(f"method is {name!r}; expected one of {', '.join(METHODS)}")
    return METHODS[name]
