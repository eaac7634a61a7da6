"""Calls of custom autograd functions, kept whole: each becomes an operator with a forward and a backward.

A tracer sees only the operators inside the forward of such a function, and would lose its backward. Here each
call is handled separately while the model is traced: the forward and backward of its class are traced
together, as one joint graph over tensors of open sizes, which is then split in two.
"""

from __future__ import annotations

import functools
import inspect
import keyword
import re
import threading
import traceback
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, fx
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.function import _SingleLevelFunction
from torch.fx.experimental.proxy_tensor import get_proxy_mode, make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv
from torch.utils._python_dispatch import _disable_current_modes

from pd2bw_fx.custom_function import CustomFunction, as_operator, draws
from pd2bw_fx.errors import TraceError
from pd2bw_fx.passes.trace.source_lines import one_line
from pd2bw_fx.units import counted

from .alike_calls import OpenSizes, hint_of, order_in_memory, what_is_traced
from .detached_data import DataIsDetached
from .function_constants import write_out_constants
from .given_tensors import OnlyGivenTensors
from .joint_graph import Halves


@contextmanager
def keep_custom_functions() -> Iterator[None]:
    """Makes this thread's calls of custom autograd functions calls of operators.

    Torch's own functions (those of activation checkpointing) and calls within other functions run as they
    are.
    """
    thread, names = threading.get_ident(), _Names()

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != thread or kwargs or cls.__module__.partition(".")[0] in _RUN_AS_THEY_ARE:
            return super(_SingleLevelFunction, cls).apply(*args, **kwargs)
        computed = _computed_again(cls, args)
        return _call(cls, args, names) if computed is None else computed()

    # Function.apply ends in this one, also where a model has kept `Function.apply` under another name.
    _SingleLevelFunction.apply = classmethod(apply)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        del _SingleLevelFunction.apply  # type: ignore[attr-defined]


def _computed_again(cls: type, args: Sequence[Any]) -> Callable[[], Any] | None:
    """Returns what a library's own copy of activation checkpointing computes, without the checkpointing.

    guided-diffusion, latent-diffusion and Megatron have a `CheckpointFunction`, which is called as
    `CheckpointFunction.apply(function, length or flag, *operands)`. None for any other function.
    """
    if not cls.__name__.endswith("CheckpointFunction") or len(args) < 2 or not callable(args[0]):
        return None
    function, flag, *operands = args
    if type(flag) is int:
        operands = operands[:flag]  # and then the parameters that a gradient is wanted for
    elif type(flag) is not bool:
        operands = [flag, *operands]
    return functools.partial(function, *operands)


_RUN_AS_THEY_ARE = ("torch", "pd2bw_fx")


@dataclass(slots=True)
class _Names:
    """Names of the classes in generated code: each is unique in a model and begins with a capital.

    `traced` is what has been traced so far, by `what_is_traced`.
    """

    given: dict[str, tuple[Any, str]] = field(default_factory=dict)
    traced: dict[Hashable, _TracedFunction | Exception] = field(default_factory=dict)

    def of(self, cls: type, text: str) -> str:
        base = re.sub(r"\W+", "_", cls.__name__, flags=re.ASCII).strip("_")
        base = base[:1].upper() + base[1:]
        if not base[:1].isalpha() or keyword.iskeyword(base) or base in ("F", "OrderedDict", "Tensor"):
            base = f"Custom{base}"
        name, count = base, 1
        while self.given.setdefault(name, (cls, text)) != (cls, text):
            count += 1
            name = f"{base}_{count}"
        return name


def _call(cls: Any, args: Sequence[Any], names: _Names) -> Any:
    """Makes the call by an operator, or raises TraceError with the reason why it cannot be traced."""
    answer: list[_TracedFunction | Exception] = []

    def work() -> None:
        answer.append(_traced(cls, args, names))

    # Some modes of the tracer that is at work on the model belong to its thread, and others do not.
    thread = threading.Thread(target=work)
    with _disable_current_modes():
        thread.start()
        thread.join()
    (found,) = answer
    if isinstance(found, _TracedFunction):
        tensors = (value for value in args if isinstance(value, Tensor))
        return as_operator(found.function)(*tensors, *found.constants)
    if isinstance(found, _FixedSizeError):
        raise found
    raise TraceError(
        f"the model calls the custom autograd function {cls.__module__}.{cls.__qualname__}, whose forward "
        f"and backward cannot be traced: {one_line(found)}. Write its forward with differentiable torch "
        "operators (then no backward is needed), register it with torch.library.custom_op and "
        "register_autograd, or have the module that calls it, with all weights that it reads, run as it is "
        "written: pd2bw_fx.untraced(module, returns=..)"
    ) from found


@dataclass(frozen=True, slots=True)
class _TracedFunction:
    """A function, and the constants that it takes as operands beside those of the call."""

    function: CustomFunction
    constants: tuple[Tensor, ...]


def _traced(cls: Any, args: Sequence[Any], names: _Names) -> _TracedFunction | Exception:
    """Returns the function, traced with as many open sizes as it allows, or the error if it cannot be traced.

    A function may raise anything for an open size: numpy, for example, does not take one for a number.
    """
    failed: Exception | None = None
    for open_sizes in OpenSizes:
        found = _traced_once(cls, args, names, open_sizes)
        if isinstance(found, Exception):
            if open_sizes is OpenSizes.OF_THE_MODEL and isinstance(found, _FixedSizeError):
                return found
            failed = found
            continue
        if open_sizes is OpenSizes.NONE and failed is not None and _has_open_sizes(args):
            return _FixedSizeError(
                f"the custom autograd function {cls.__module__}.{cls.__qualname__} can be traced at the "
                f"example's sizes alone: {one_line(failed)}"
            )
        return found
    assert failed is not None
    return failed


def _traced_once(
    cls: Any, args: Sequence[Any], names: _Names, open_sizes: OpenSizes
) -> _TracedFunction | Exception:
    key = what_is_traced(cls, args, open_sizes)
    if key is not None and key in names.traced:
        return names.traced[key]
    found: _TracedFunction | Exception
    try:
        traced = _Traced(cls, args, open_sizes)
        found = _TracedFunction(traced.function(names), tuple(traced.constants.values()))
    except Exception as error:  # the function is the model's
        found = error
    if key is not None:
        names.traced[key] = found
    return found


def _has_open_sizes(args: Sequence[Any]) -> bool:
    tensors = (value for value in args if isinstance(value, Tensor))
    return any(isinstance(extent, torch.SymInt) for tensor in tensors for extent in tensor.shape)


class _FixedSizeError(ValueError):
    """The function can only be traced at fixed sizes; a front end that fixes them may trace the model."""


class _Context:
    """The `ctx` that a function's forward and backward get."""

    def __init__(self, needs_input_grad: tuple[bool, ...]) -> None:
        self.needs_input_grad = needs_input_grad
        self.saved_tensors: tuple[Any, ...] = ()
        self.not_differentiable: tuple[Tensor, ...] = ()

    @property
    def saved_variables(self) -> tuple[Any, ...]:
        """The old name, which torch knows too."""
        return self.saved_tensors

    def save_for_backward(self, *tensors: Any) -> None:
        self.saved_tensors = tensors

    def save_for_forward(self, *tensors: Any) -> None:
        """Does nothing: that is for forward derivatives."""

    def mark_non_differentiable(self, *tensors: Tensor) -> None:
        self.not_differentiable = tensors

    def set_materialize_grads(self, value: bool) -> None:
        """Does nothing: missing gradients are passed as zeros, which None stands for."""

    def mark_dirty(self, *tensors: Tensor) -> None:
        raise ValueError("it writes to its input")


class _Traced:
    """One call: its forward and backward as a joint graph, and which nodes belong to the forward."""

    def __init__(self, cls: Any, args: Sequence[Any], open_sizes: OpenSizes) -> None:
        self.cls = cls
        self.args = args
        self.open_sizes = open_sizes
        self.symbols: dict[Any, Any] = {}  # the function's symbols, by the model's
        self.has_setup = cls.setup_context is not _SingleLevelFunction.setup_context
        self.places = [place for place, value in enumerate(args) if isinstance(value, Tensor)]
        self.needs_input_grad = tuple(isinstance(v, Tensor) and v.requires_grad for v in args)
        self.context = _Context(self.needs_input_grad)
        # It writes to its operands without telling autograd: scratch memory, which nobody reads.
        self.writes = False
        self.returns_tuple = False
        self.not_differentiable: tuple[int, ...] = ()
        self.early: set[fx.Node] = set()  # nodes of the forward
        self.constants: dict[fx.Node, Tensor] = {}  # tensors that the function makes, as placeholders
        if not self.places:
            raise ValueError("it is given no tensor")
        if any(isinstance(value, torch.SymInt | torch.SymFloat) for value in args):
            raise ValueError("it is given a size as a number; let it take the size from a tensor's shape")

    def function(self, names: _Names) -> CustomFunction:
        shapes = ShapeEnv(duck_shape=False)  # two sizes that are equal here need not be so elsewhere
        # A function may keep tensors of numbers from an earlier call, which are no fake ones.
        mode = FakeTensorMode(shape_env=shapes, allow_non_fake_inputs=True)
        # Without the dispatcher, operators of C++ would have to compute sizes, and take numbers alone.
        dispatcher: Any = enable_python_dispatcher()
        with torch.no_grad(), mode, dispatcher, DataIsDetached():
            tensors = [self._without_data(place, shapes) for place in self.places]
            with OnlyGivenTensors(mode):
                versions = [tensor._version for tensor in tensors]
                gradients = [torch.empty_like(result) for result in self._forward(tensors)]
                self.writes = [tensor._version for tensor in tensors] != versions
                joint = make_fx(
                    self._joint, tracing_mode="symbolic", pre_dispatch=True, record_stack_traces=True
                )(*tensors, *gradients)
        self._require_open(shapes)
        self.constants = write_out_constants(joint, self.early)
        _require_operators(joint.graph)
        forward, backward = self._parts(joint.graph)
        _require_one_draw(forward, backward)
        return CustomFunction(
            name=names.of(self.cls, f"{forward}{backward}"),
            origin=_origin(self.cls),
            forward=forward,
            backward=backward,
            returns_tuple=self.returns_tuple,
            not_differentiable=self.not_differentiable,
        )

    def _forward(self, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        given_args = list(self.args)
        for place, tensor in zip(self.places, tensors, strict=True):
            given_args[place] = tensor.clone() if self.writes else tensor
        self.context = _Context(self.needs_input_grad)
        if self.has_setup:
            returned = self.cls.forward(*given_args)
            self.cls.setup_context(self.context, tuple(given_args), returned)
        else:
            returned = self.cls.forward(self.context, *given_args)
        self.returns_tuple = isinstance(returned, tuple)
        results = returned if isinstance(returned, tuple) else (returned,)
        if not results or not all(isinstance(result, Tensor) for result in results):
            raise ValueError("it returns something else than tensors")
        marked = {id(tensor) for tensor in self.context.not_differentiable}
        self.not_differentiable = tuple(p for p, result in enumerate(results) if id(result) in marked)
        return results

    def _without_data(self, place: int, shapes: ShapeEnv) -> Tensor:
        """Returns a fake tensor of the argument's type and memory layout, whose sizes are symbols."""
        like: Tensor = self.args[place]
        sizes = []
        for dimension, extent in enumerate(like.shape):
            hint = hint_of(extent)
            if hint is None:
                raise ValueError("the size of its operand is known only when it runs")
            is_open = hint > 1 and self._is_open(extent)
            sizes.append(self._symbol(extent, shapes, f"operand_{place}_{dimension}") if is_open else hint)
        order = order_in_memory(like)
        laid_out = torch.empty([sizes[d] for d in order], dtype=like.dtype, device=like.device)
        return laid_out.permute([order.index(dimension) for dimension in range(like.dim())])

    def _is_open(self, extent: Any) -> bool:
        if self.open_sizes is OpenSizes.OF_THE_MODEL:
            return isinstance(extent, torch.SymInt)
        return self.open_sizes is OpenSizes.ALL

    def _symbol(self, extent: Any, shapes: ShapeEnv, name: str) -> Any:
        """Returns a symbol for a size; with `OF_THE_MODEL`, equal sizes of the model share one."""
        if self.open_sizes is OpenSizes.ALL:
            return _symbol(hint_of(extent), shapes, name)
        if extent.node.expr not in self.symbols:
            self.symbols[extent.node.expr] = _symbol(hint_of(extent), shapes, name)
        return self.symbols[extent.node.expr]

    def _require_open(self, shapes: ShapeEnv) -> None:
        for guard in shapes.guards:
            expression: Any = guard.expr
            if not (expression.is_Equality and all(side.is_Symbol for side in expression.args)):
                name = f"{self.cls.__module__}.{self.cls.__qualname__}"
                raise _FixedSizeError(
                    f"what the custom autograd function {name} computes depends on sizes, by {expression}"
                )

    def _joint(self, *tensors: Tensor) -> Any:
        mode: Any = get_proxy_mode()
        mode.tracer._filter_traceback_frames = self._own_frames
        results = self._forward(tensors[: len(self.places)])
        self.early = set(mode.tracer.graph.nodes)
        returned = self.cls.backward(self.context, *tensors[len(self.places) :])
        returned = returned if isinstance(returned, tuple) else (returned,)
        if len(returned) < len(self.args):
            raise ValueError(
                f"its backward returns {counted(len(returned), 'gradient')} for "
                f"{counted(len(self.args), 'argument')}"
            )
        return results, tuple(returned[place] for place in self.places)

    def _own_frames(self, stack: traceback.StackSummary) -> traceback.StackSummary:
        """Keeps the lines of the forward and the backward; torch keeps those of functions named forward."""
        codes = [getattr(inspect.unwrap(f), "__code__", None) for f in (self.cls.forward, self.cls.backward)]
        own = {(code.co_filename, code.co_name) for code in codes if code is not None}
        return traceback.StackSummary.from_list([f for f in stack if (f.filename, f.name) in own])

    def _parts(self, joint: fx.Graph) -> tuple[fx.Graph, fx.Graph]:
        calls = [node for node in joint.nodes if node.op == "call_function"]
        placeholders = [node for node in joint.find_nodes(op="placeholder") if node not in self.constants]
        returned: Any = joint.output_node().args[0]
        results, wanted = returned
        num_given = len(self.places)
        halves = Halves(
            given=dict(zip(placeholders[:num_given], self._argument_names(), strict=True))
            | {node: node.name for node in self.constants},
            gradients=dict(zip(placeholders[num_given:], self._gradient_names(len(results)), strict=True)),
            early=[node for node in calls if node in self.early],
            late=[node for node in calls if node not in self.early],
        )
        saved = halves.saved(wanted)
        none_of_constants = (None,) * len(self.constants)
        return halves.forward(results, saved), halves.backward(saved, (*wanted, *none_of_constants))

    def _argument_names(self) -> list[str]:
        return _several([*inspect.signature(self.cls.forward).parameters][not self.has_setup :], self.places)

    def _gradient_names(self, count: int) -> list[str]:
        return _several([*inspect.signature(self.cls.backward).parameters][1:], range(count))


def _several(names: Sequence[str], places: Iterable[int]) -> list[str]:
    """Returns the names of the arguments at these places; the last one may be `*tensors`."""
    return [names[place] if place < len(names) else f"{names[-1]}_{place}" for place in places]


def _symbol(hint: int, shapes: ShapeEnv, name: str) -> Any:
    from torch._dynamo.source import ConstantSource  # dynamo takes a second to import

    source = ConstantSource(name)
    symbol = shapes.create_symbol(hint, source, dynamic_dim=DimDynamic.DYNAMIC)
    return shapes.create_symintnode(symbol, hint=hint, source=source)


def _require_operators(graph: fx.Graph) -> None:
    """Raises ValueError for a node that cannot be written as a line of code of its own."""
    for node in list(graph.nodes):
        if node.target is torch._C._set_grad_enabled:
            if node.args[0] is not False:
                raise ValueError("it enables gradients within")
            graph.erase_node(node)
        elif node.op == "get_attr":
            raise ValueError("it reads a tensor that it is not given")
        elif node.op not in ("placeholder", "call_function", "output"):
            raise ValueError(f"it contains a {node.op}")


def _require_one_draw(forward: fx.Graph, backward: fx.Graph) -> None:
    """Raises ValueError for several draws: random numbers are seeded by operator, and this is one."""
    if sum(draws(node) for node in forward.nodes) > 1 or any(draws(node) for node in backward.nodes):
        raise ValueError("it draws random numbers more than once, or in its backward")


def _origin(cls: Any) -> str:
    try:
        return f"{Path(inspect.getsourcefile(cls) or '').name}:{inspect.getsourcelines(cls)[1]}"
    except (OSError, TypeError):
        return ""
