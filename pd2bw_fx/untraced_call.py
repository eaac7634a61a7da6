"""What no trace can follow: a matching of boxes, a mining of pairs, whatever asks values in Python.

Such a function, or such a part of a model, is one operator of the model. A stage calls it by its name, and it
is run as it is written.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pd2bw_fx import untraced_loss, untraced_part
from pd2bw_fx.arguments import require_function, require_loss_function
from pd2bw_fx.errors import InputError
from pd2bw_fx.untraced_operands import is_tensor

_known: dict[str, UntracedFunction] = {}  # by operator name


def untraced(
    function: Callable[..., Any], *, name: str | None = None, returns: Callable[..., Any] | None = None
) -> Any:
    """A function, or a module of the model, that is run instead of traced.

    Without `returns` it is a loss, in the model's forward or as the `loss_fn` of `split`: `function` returns
    a scalar tensor. `returns` is for all else. It is called with the same arguments, and gives what the
    function returns, a tensor or several in a tuple, a dict or the like, but for their values:

        def like(x, lengths):
            return x.new_empty(x.shape[0], x.shape[1], 64)

        pd2bw_fx.untraced(model.encoder, returns=like)

    The function computes however it likes from the tensors that it is given, also nested in tuples, lists and
    dicts; autograd has to know the derivatives, and nothing may be written in place. Checkpoints within it
    are those with use_reentrant=False. A parameter that it reads must be among its arguments. Those of a
    module are; what is returned is that module itself, of a class of its own from now on, and its buffers
    must stay as they are.

    `name` is what the stages call it by: its own name, if that is left out. Local workers are sent the
    function; under torchrun, and where a saved pipeline is loaded, it has to be defined the same way. No ONNX
    file can have it.

    Raises InputError for what is no function, is a loss with parameters to train, or a name that is none, and
    when it is run where the result is another than was said, where it writes what it was given, and where it
    depends on a parameter that was not given.
    """
    if returns is None:
        _require_loss(function)
    else:
        require_function("function", function, "a function, or a module of the model,")
        require_function("returns", returns, "a function of the same arguments")
    if isinstance(function, nn.Module) and returns is not None:
        return _untraced_module(function, name, returns)
    known = _register(function, name, returns)

    @functools.wraps(function, updated=())
    def call(*args: Any, **kwargs: Any) -> Any:
        return known.called_with(args, kwargs)

    return call


def _require_loss(function: Any) -> None:
    if isinstance(function, nn.Module) and any(p.requires_grad for p in function.parameters()):
        kind = type(function).__name__
        raise InputError(
            f"{kind} has parameters to train, and is no loss; of a part of a model say the shapes too: "
            "pd2bw_fx.untraced(part, returns=...)"
        )
    require_loss_function("function", function)


def _untraced_module(module: nn.Module, name: str | None, returns: Callable[..., Any]) -> nn.Module:
    own: Any = type(module)
    if issubclass(own, _Untraced):
        own = own.__mro__[2]
        module.__class__ = own
    kept: dict[int, Any] = {id(p): nn.Parameter(p.to("meta"), p.requires_grad) for p in module.parameters()}
    kept |= {id(buffer): buffer.to("meta") for buffer in module.buffers()}
    bare = copy.deepcopy(module, kept)
    bare._forward_hooks.clear()  # the module itself calls them
    bare._forward_pre_hooks.clear()
    known = _register(untraced_part.Part(bare), name or own.__name__, returns)

    def run(self: Any, args: Any, kwargs: Any) -> Any:
        state = [tensor for _, tensor in untraced_part.state_of(self)]
        return known.called_with(args, kwargs, state, training=self.training)

    class Untraced(_Untraced, own):  # type: ignore[misc]
        forward = _at_the_line_of(own.forward, run)

    for attribute in ("__name__", "__qualname__", "__module__", "__doc__"):
        setattr(Untraced, attribute, getattr(own, attribute))
    module.__class__ = Untraced
    return module


def _at_the_line_of(forward: Any, run: Callable[..., Any]) -> Any:
    """A forward that traces and errors find where the author wrote that of the module."""
    code = getattr(forward, "__code__", run.__code__)
    line = "def forward(self, *args, **kwargs): return run(self, args, kwargs)"
    namespace: dict[str, Any] = {"run": run}
    exec(compile("\n" * (code.co_firstlineno - 1) + line, code.co_filename, "exec"), namespace)
    return namespace["forward"]


class _Untraced:
    """Among the classes of a module that is run as it is written."""


def _register(
    function: Callable[..., Any], name: str | None, returns: Callable[..., Any] | None
) -> UntracedFunction:
    """A function that is defined anew keeps its name; of several objects of a class each has its own."""
    if name is None:
        name = getattr(function, "__name__", type(function).__name__)
        name = ("loss" if returns is None else "part") if name == "<lambda>" else name
    if not name.isidentifier():
        raise InputError(f"{name!r} is no name for a function; a word was expected")
    count, known = 1, name
    while known in _known and not _is_the_same(_known[known], function, returns):
        count += 1
        known = f"{name}_{count}"
    registered_one = UntracedFunction(known, function, returns)
    registered_one.register()
    return registered_one


def _is_the_same(
    known: UntracedFunction, function: Callable[..., Any], returns: Callable[..., Any] | None
) -> bool:
    one = known.function
    if (known.returns is None) != (returns is None):
        return False
    if one is function:
        return True
    if not (isinstance(one, FunctionType) and isinstance(function, FunctionType)):
        return False
    named = one.__name__ != "<lambda>"
    return named and (one.__module__, one.__qualname__) == (function.__module__, function.__qualname__)


@dataclass(frozen=True, slots=True)
class UntracedFunction:
    """What another process needs to know it."""

    name: str
    function: Callable[..., Any]
    returns: Callable[..., Any] | None  # None: a loss

    @classmethod
    def called(cls, name: str) -> UntracedFunction | None:
        return _known.get(name)

    def register(self) -> None:
        """Make the operator known, or change what it calls."""
        if self.name not in _known:
            kernels = untraced_loss if self.returns is None else untraced_part
            kernels.register(self.name, functools.partial(_known.__getitem__, self.name))
        _known[self.name] = self

    def called_with(
        self, args: Any, kwargs: Any, state: Sequence[Tensor] = (), *, training: bool = True
    ) -> Any:
        tensors = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if is_tensor(leaf)]
        if self.returns is None:
            return untraced_loss.call(self, args, kwargs, tensors)
        return untraced_part.call(self, args, kwargs, [*state, *tensors], training=training)
