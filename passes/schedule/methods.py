"""The methods by their names."""

from __future__ import annotations

from pd2bw_fx.errors import InputError

from .flushed import DataParallel, GPipe, Inference, OneForwardOneBackward
from .interleaved import Interleaved
from .method import Method
from .streamed import PipeDream, PipelinedBackpropagation, PipeMare, TwoBuffered

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
        DataParallel(),
        Inference(),
    )
}


def method_of(name: str) -> Method:
    """Raises InputError for a name that is none."""
    if name not in METHODS:
        raise InputError(f"method is {name!r}; expected one of {', '.join(METHODS)}")
    return METHODS[name]
