"""All methods by their names, and methods of a user's own."""

from __future__ import annotations

from pd2bw_fx.arguments import require_kind
from pd2bw_fx.errors import InputError, shown

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


_OURS = frozenset(METHODS)


def register_method(method: Method) -> None:
    """Registers a method by its name, for `split`, `simulate` and the engine.

    Local workers get it from this process; ranks of torchrun get it from the script that they all run. A
    registered method of the same name is replaced.

    Raises InputError for what is not a method, and for the name of a built-in one.
    """
    require_kind("method", method, Method, "an object of a subclass of Method or StageMethod")
    name = getattr(method, "name", None)
    if not isinstance(name, str) or name in _OURS:
        taken = f"is one of ours ({', '.join(METHODS)})" if name in _OURS else "is no text"
        raise InputError(f"the method's name {name!r} {taken}; give it one of its own")
    METHODS[name] = method


def registered_method(name: str) -> Method | None:
    """Returns the method of this name that a user has registered, or None for a built-in one."""
    return None if name in _OURS else method_of(name)


def training_methods() -> tuple[str, ...]:
    """Returns all methods that train, the user's registered ones among them."""
    return tuple(name for name, method in METHODS.items() if method.trains)


def method_of(name: str) -> Method:
    """Returns the method of this name. Raises InputError for an unknown one."""
    if not isinstance(name, str) or name not in METHODS:
        meant = next((known for known in METHODS if known == str(name).lower()), None)
        advice = f"did you mean {meant!r}?" if meant else f"expected one of {', '.join(METHODS)}"
        raise InputError(f"method is {shown(name)}; {advice}")
    return METHODS[name]
