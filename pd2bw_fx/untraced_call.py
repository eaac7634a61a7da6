"""Functions and parts of a model that no trace can follow: a matching of boxes, or a mining of pairs.

Such a function, which asks for values in Python, is one operator of the model. A stage calls it by its name,
and it runs as it is written.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from types import CellType, CodeType, FunctionType, MethodType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pd2bw_fx import untraced_loss, untraced_part
from pd2bw_fx.arguments import require_function
from pd2bw_fx.errors import InputError, shown
from pd2bw_fx.model_arguments import require_loss_function
from pd2bw_fx.untraced_operands import is_tensor

_known: dict[str, UntracedFunction] = {}  # by operator name
_MARK = "_untraced"  # the attribute that holds the function itself, on what `untraced` returns


def untraced(
    function: Callable[..., Any], *, name: str | None = None, returns: Callable[..., Any] | None = None
) -> Any:
    """Marks a function, or a module of the model, that is run instead of traced.

    Without `returns` it is a loss, in the model's forward or as the `loss_fn` of `split`: `function` returns
    a scalar tensor. `returns` is for everything else. It is called with the same arguments and returns what
    the function returns, a tensor or several in a tuple, a dict or the like, but with any values:

        def like(x, lengths):
            return x.new_empty(x.shape[0], x.shape[1], 64)

        pd2bw_fx.untraced(model.encoder, returns=like)

    The function may compute in any way from the tensors that it is given, also nested in tuples, lists and
    dicts. autograd has to know the derivatives, nothing may be written in place, and checkpoints within it
    need use_reentrant=False. A parameter that it reads must be among its arguments. A module's own parameters
    are: what is returned is that module itself, which has another class from now on, and its buffers must not
    change.

    `name` is what the stages call it by; the default is its own name. Of several functions of one name (two
    of one factory, one that a notebook defines again) the second is called name_2, and a pipeline keeps the
    one that it was split with. Local workers are sent the function; under torchrun, and where a saved
    pipeline is loaded, it has to be defined in the same way. It cannot be in an ONNX file.

    Raises InputError for what is not a function, for a loss with parameters to train, and for an impossible
    name; and when it runs, where the result is not what `returns` said, where it writes to an argument, and
    where it depends on a parameter that was not given.
    """
    if not callable(function):
        raise InputError(
            f"function is {shown(function)}; a loss function, or a part of the model, was expected"
        )
    if returns is None:
        _require_loss(function)
    else:
        require_function("function", function, "a function, or a module of the model,")
        require_function("returns", returns, "a function of the same arguments")
    if isinstance(function, nn.Module) and returns is not None:
        return _untraced_module(function, name, returns)
    known = _register(getattr(function, _MARK, function), name, returns)

    @functools.wraps(function, updated=())
    def call(*args: Any, **kwargs: Any) -> Any:
        return known.called_with(args, kwargs)

    setattr(call, _MARK, known.function)
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
    """Returns a forward that traces and errors find where the author wrote the module's own."""
    code = getattr(forward, "__code__", run.__code__)
    line = "def forward(self, *args, **kwargs): return run(self, args, kwargs)"
    namespace: dict[str, Any] = {"run": run}
    exec(compile("\n" * (code.co_firstlineno - 1) + line, code.co_filename, "exec"), namespace)
    return namespace["forward"]


class _Untraced:
    """Marks the classes of modules that are run as they are written."""


def _register(
    function: Callable[..., Any], name: str | None, returns: Callable[..., Any] | None
) -> UntracedFunction:
    """Registers a function under its name, or name_2 and so on: a pipeline keeps the one it was split
    with.
    """
    if name is None:
        name = getattr(function, "__name__", type(function).__name__)
        name = ("loss" if returns is None else "part") if name == "<lambda>" else name
    if not name.isidentifier():
        raise InputError(f"{name!r} is no name for a function; a word was expected")
    count, known = 1, name
    while known in _known:
        before = _known[known]
        if _is_the_same(before.function, function) and _is_the_same(before.returns, returns):
            return before
        count += 1
        known = f"{name}_{count}"
    registered_one = UntracedFunction(known, function, returns)
    registered_one.register()
    return registered_one


_Constant = (type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, type(Ellipsis))


def _is_the_same(one: Any, other: Any, compared: frozenset[tuple[int, int]] = frozenset()) -> bool:
    """Returns whether two are one object, or functions that compute the same.

    A factory that is called again, or a notebook's cell that is run again, makes such functions.
    """
    if one is other or (id(one), id(other)) in compared:  # the latter reads itself
        return True
    if type(one) is not type(other):
        return False
    same = functools.partial(_is_the_same, compared=compared | {(id(one), id(other))})
    match one:
        case FunctionType():
            return (
                one.__globals__ is other.__globals__
                and _without_lines(one.__code__) == _without_lines(other.__code__)
                and same(_values(one), _values(other))
            )
        case MethodType():
            return bool(one == other)
        case functools.partial():
            return same(
                (one.func, one.args, *_items(one.keywords)), (other.func, other.args, *_items(other.keywords))
            )
        case tuple():
            return len(one) == len(other) and all(map(same, one, other))
    # What can be written is compared by identity: it need not stay equal. 0.0 is not -0.0.
    return isinstance(one, _Constant) and repr(one) == repr(other)


def _values(function: FunctionType) -> Any:
    """Returns what a function has besides its code and its module's names."""
    held = tuple(map(_content, function.__closure__ or ()))
    return function.__defaults__, _items(function.__kwdefaults__ or {}), held


def _items(named: Mapping[str, Any]) -> tuple[Any, ...]:
    return tuple(sorted(named.items(), key=itemgetter(0)))


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # the cell is still empty
        return cell


def _without_lines(code: CodeType) -> CodeType:
    """Returns a code object without its lines, for a comparison of the text alone."""
    constants = tuple(_without_lines(c) if isinstance(c, CodeType) else c for c in code.co_consts)
    return code.replace(co_firstlineno=1, co_linetable=b"", co_consts=constants)


@dataclass(frozen=True, slots=True)
class UntracedFunction:
    """A function in a form in which another process can be sent it."""

    name: str
    function: Callable[..., Any]
    returns: Callable[..., Any] | None  # None: a loss

    @classmethod
    def called(cls, name: str) -> UntracedFunction | None:
        return _known.get(name)

    def register(self) -> None:
        """Registers the operator; a worker that has imported one of this name uses the one that was sent."""
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
