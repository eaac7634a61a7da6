"""The operator of an untraced part of a model: it returns tensors of the shapes that its author declares."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn
from torch._guards import detect_fake_mode
from torch.autograd.function import once_differentiable
from torch.func import functional_call
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from pd2bw_fx.custom_function import registered
from pd2bw_fx.errors import InputError
from pd2bw_fx.untraced_operands import (
    NAMESPACE,
    has_no_values,
    is_tensor,
    leaves_of,
    operator_of,
    read,
    written,
)

if TYPE_CHECKING:
    from pd2bw_fx.untraced_call import UntracedFunction
    from pd2bw_fx.untraced_operands import Known

_Shapes = list[tuple[torch.Size, torch.dtype]]
_Leaf = (Tensor, int, float, str, type(None))  # the leaves that results may have
_shapes: dict[Any, _Shapes] = {}  # the shapes of results, by what was given


class Part:
    """A module as a function of its parameters and buffers, and of what it is called with."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module  # without weights
        self.names = [name for name, _ in state_of(module)]

    def __call__(self, state: Sequence[Tensor], *args: Any, **kwargs: Any) -> Any:
        return functional_call(self.module, dict(zip(self.names, state, strict=True)), args, kwargs)

    def holding(self, state: Sequence[Tensor], function: Callable[[], None]) -> None:
        """Calls the function while the module has this state: a backward runs checkpoints in it again."""
        held = {f"module.{name}": tensor for name, tensor in zip(self.names, state, strict=True)}
        functional_call(_Holding(self.module), held, (function,))


class _Holding(nn.Module):
    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, function: Callable[[], None]) -> None:
        function()


def state_of(module: nn.Module) -> list[tuple[str, Tensor]]:
    return [*module.named_parameters(), *module.named_buffers()]


def register(name: str, known: Known) -> None:
    for overload, result in ((name, "Tensor"), (f"{name}.several", "Tensor[]")):
        is_single = result == "Tensor"
        registered(
            f"{overload}(Tensor[] tensors, str structure='', *, bool training) -> {result}",
            run=functools.partial(_given_back, _run, known, is_single),
            differentiable=functools.partial(_given_back, _differentiable, known, is_single),
            fake=functools.partial(_given_back, _expected, known, is_single),
            tags=(torch.Tag.nondeterministic_seeded,),  # it may draw random numbers
            namespace=NAMESPACE,
        )


def _given_back(
    function: Callable[..., list[Tensor]],
    known: Known,
    is_single: bool,
    tensors: Sequence[Tensor],
    structure: str = "",
    *,
    training: bool = True,
) -> Tensor | list[Tensor]:
    results = function(known, tensors, structure, training)
    return results[0] if is_single else results


def call(known: UntracedFunction, args: Any, kwargs: Any, tensors: Sequence[Any], *, training: bool) -> Any:
    if any(isinstance(tensor, fx.Proxy) for tensor in tensors):
        raise RuntimeError(f"{known.name} is run as it is written, which torch.export alone can trace")
    with _disable_current_modes(), detect_fake_mode(tensors) or nullcontext():  # a trace needs not have it
        said = _said(known, args, kwargs)
    leaves, structure = pytree.tree_flatten(said)
    operator = operator_of(known.name, "default" if isinstance(said, Tensor) else "several")
    is_plain = not kwargs and all(map(is_tensor, args))
    found = operator(tensors, *(() if is_plain else (written(args, kwargs),)), training=training)
    results = iter([found] if isinstance(said, Tensor) else found)
    return pytree.tree_unflatten([next(results) if is_tensor(leaf) else leaf for leaf in leaves], structure)


def _run(known: Known, tensors: Sequence[Tensor], structure: str, training: bool) -> list[Tensor]:
    own = known()
    versions = [tensor._version for tensor in tensors]
    args, kwargs = _arguments(own, tensors, structure)
    if isinstance(own.function, Part):
        own.function.module.train(training)
        args = (tensors[: len(own.function.names)], *args)
    found = own.function(*args, **kwargs)
    for place, (tensor, version) in enumerate(zip(tensors, versions, strict=True)):
        if tensor._version != version:
            names = own.function.names if isinstance(own.function, Part) else []
            what = f"its {names[place]}" if place < len(names) else "what it is given"
            raise InputError(
                f"{own.name} writes in place into {what}; expected a part that leaves it as it is"
            )
    results = _checked(own, found, _shapes_of(own, tensors, structure, training))
    memory = {t.untyped_storage()._cdata for t in tensors if t.layout is torch.strided}
    return [r.clone() if r.untyped_storage()._cdata in memory else r for r in results]


def _arguments(own: UntracedFunction, tensors: Sequence[Tensor], structure: str) -> tuple[Any, Any]:
    """Returns the arguments without a module's state, with which the tensors begin."""
    rest = tensors[len(own.function.names) :] if isinstance(own.function, Part) else tensors
    return read(rest, structure) if structure else (tuple(rest), {})


def _checked(own: UntracedFunction, found: Any, shapes: _Shapes) -> list[Tensor]:
    """Returns the results in the declared precision: under autocast a function may choose another one."""
    results = [leaf for leaf in pytree.tree_leaves(found) if isinstance(leaf, Tensor)]
    if [(r.shape, _kind(r.dtype)) for r in results] == [(shape, _kind(dtype)) for shape, dtype in shapes]:
        return [result.to(dtype) for result, (_, dtype) in zip(results, shapes, strict=True)]
    listed, said = _listed([(r.shape, r.dtype) for r in results]), _listed(shapes)
    raise InputError(f"{own.name} returns {listed}, and by its `returns` it would be {said}")


def _kind(dtype: torch.dtype) -> tuple[bool, bool]:
    return dtype.is_floating_point, dtype.is_complex


def _listed(shapes: _Shapes) -> str:
    return ", ".join(f"{dtype} of shape {tuple(shape)}" for shape, dtype in shapes) or "no tensor"


def _shapes_of(own: UntracedFunction, tensors: Sequence[Tensor], structure: str, training: bool) -> _Shapes:
    key = (own.name, own.returns, structure, *((tensor.shape, tensor.dtype) for tensor in tensors))
    if key not in _shapes:
        with torch.no_grad():
            expected = _expected(lambda: own, tensors, structure, training)
        _shapes[key] = [(tensor.shape, tensor.dtype) for tensor in expected]
    return _shapes[key]


def _expected(known: Known, tensors: Sequence[Tensor], structure: str, training: bool) -> list[Tensor]:
    own = known()
    args, kwargs = _arguments(own, tensors, structure)
    leaves = pytree.tree_leaves(_said(own, args, kwargs))
    strange = [leaf for leaf in leaves if not isinstance(leaf, _Leaf)]
    results = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
    if strange or not results:
        what = f"a {type(strange[0]).__name__}" if strange else "no tensor"
        raise InputError(f"`returns` of {own.name} gives {what}; expected tensors of the results' shapes")
    return results


def _said(own: UntracedFunction, args: Any, kwargs: Any) -> Any:
    assert own.returns is not None
    try:
        return own.returns(*args, **kwargs)
    except TypeError as error:
        raise InputError(
            f"`returns` of {own.name} raises TypeError: {error}; expected a function of the same arguments"
        ) from error


def _differentiable(known: Known, tensors: Sequence[Tensor], structure: str, training: bool) -> list[Tensor]:
    if not torch.is_grad_enabled() and not any(map(has_no_values, tensors)):
        return _run(known, tensors, structure, training)
    results: Any = _Differentiable.apply(known, structure, training, *tensors)  # type: ignore[no-untyped-call]
    return list(results)


class _Differentiable(torch.autograd.Function):
    """A function that keeps the graph of its forward for the backward, which may be asked for twice."""

    @staticmethod
    def forward(ctx: Any, known: Known, structure: str, training: bool, *tensors: Tensor) -> Any:
        if any(map(has_no_values, tensors)):
            ctx.given = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in tensors]
            ctx.results = ()
            with torch._C._AutoDispatchBelowAutograd():
                results = operator_of(known().name, "several")(list(tensors), structure, training=training)
                return tuple(results)
        given = [tensor.detach().requires_grad_(tensor.requires_grad) for tensor in tensors]
        with torch.enable_grad():
            results = _run(known, given, structure, training)
        for leaf in {id(leaf): leaf for result in results for leaf in leaves_of(result)}.values():
            if all(leaf is not tensor for tensor in given):
                raise InputError(
                    f"{known().name} reads a parameter that it was not given; pass it as an argument"
                )
        ctx.own, ctx.training, ctx.given, ctx.results = known(), training, given, results
        ctx.mark_non_differentiable(*(result for result in results if not result.requires_grad))
        return tuple(result.detach() if result.requires_grad else result for result in results)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *of_results: Tensor) -> Any:
        if not ctx.results:
            return None, None, None, *(torch.zeros_like(t) if t.requires_grad else None for t in ctx.given)
        pairs = [(r, g) for r, g in zip(ctx.results, of_results, strict=True) if r.requires_grad]
        results, seeds = zip(*pairs, strict=True)
        # Not autograd.grad, which a reentrant checkpoint refuses; these leaves are this call's own.
        backward = functools.partial(torch.autograd.backward, results, seeds, retain_graph=True)
        part = ctx.own.function
        with _reentrant_checkpoints_named(ctx.own.name):
            if isinstance(part, Part):
                part.module.train(ctx.training)
                part.holding(ctx.given[: len(part.names)], backward)
            else:
                backward()
        gradients = [tensor.grad for tensor in ctx.given]
        for tensor in ctx.given:
            tensor.grad = None
        return None, None, None, *gradients


@contextmanager
def _reentrant_checkpoints_named(name: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:  # torch's, where this backward is itself one for some inputs alone
        if "use_reentrant=True" not in str(error):
            raise
        raise InputError(
            f"{name} calls torch.utils.checkpoint with use_reentrant=True, which cannot give gradients for "
            "some inputs alone; pass use_reentrant=False"
        ) from error
