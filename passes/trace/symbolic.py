"""The other front end: torch.fx symbolic tracing, which needs no example inputs.

Modules of torch.nn stay whole (`call_module`), and control flow on tensors or sizes cannot be followed.
"""

from __future__ import annotations

import copy
import operator
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from traceback import StackSummary
from typing import Any

import torch
from torch import fx, nn
from torch.autograd.function import _SingleLevelFunction
from torch.utils._python_dispatch import TorchDispatchMode

from pd2bw_fx.modes import LAYERS_WITH_MODES
from pd2bw_fx.program import surrounding_autocast

from .checks.parameter_memory import require_untrained
from .checks.second_call import require_the_same_again
from .eager_run import require_nothing_written
from .patches.helper_frames import record_helper_frames
from .patches.named_values import record_value_names
from .patches.parameters_elsewhere import ParametersReadInstead
from .program import MODEL_PREFIX, Program
from .source_lines import is_the_authors

# What a forward reads of a buffer's form becomes a constant of the program, as the sizes of layers are.
_OF_A_BUFFERS_FORM = frozenset(("shape", "ndim", "size", "dim", "numel", "dtype", "device"))

_NO_NUMBER = (
    "the forward makes a Python number of a tensor's values, which the stages would have as it is now; "
    "compute with the tensor (torch.exp(t), not math.exp(t)), or keep what never changes as a number"
)


class _Proxy(fx.Proxy):
    """Refuses assignments: torch.fx would silently lose `self.weight.data = ..`."""

    tracer: _Tracer

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in ("node", "tracer"):
            require_nothing_written([str(self.node.target)], how=f"through .{name}")
        super().__setattr__(name, value)

    def __getattr__(self, k: str) -> Any:
        buffer = self.tracer.buffer_of(self.node) if k in _OF_A_BUFFERS_FORM else None
        return _Attribute(self, k) if buffer is None else getattr(buffer, k)

    def __float__(self) -> float:
        raise TypeError(_NO_NUMBER)

    def __int__(self) -> int:
        raise TypeError(_NO_NUMBER)

    def __len__(self) -> int:
        buffer = self.tracer.buffer_of(self.node)
        return super().__len__() if buffer is None else len(buffer)


class _Attribute(fx.proxy.Attribute):
    """Has its node belong to the module where it was read: the node is made only when it is first used."""

    def __init__(self, root: fx.Proxy, attr: str) -> None:
        super().__init__(root, attr)
        self.read_in = copy.copy(root.tracer.module_stack)

    @property
    def node(self) -> fx.Node:  # type: ignore[override]
        used_in, self.tracer.module_stack = self.tracer.module_stack, self.read_in
        try:
            return super().node
        finally:
            self.tracer.module_stack = used_in

    def __getattr__(self, k: str) -> fx.proxy.Attribute:
        return _Attribute(self, k)


class _Tracer(fx.Tracer):
    """Traces a `Program` with one proxy for each flat input, and marks the regions that fx does not see."""

    def __init__(self, program: Program) -> None:
        super().__init__()
        self.record_stack_traces = True
        self.proxy_buffer_attributes = True  # else numbers read from a buffer would be constants
        self.input_names = program.flat.names
        self.parameter_names = {id(parameter): name for name, parameter in program.named_parameters()}
        self.modes = {module: module.training for module in program.modules()}

    def trace(self, root: Any, concrete_args: Any = None) -> fx.Graph:
        with ParametersReadInstead(self.of_parameter, but_data=True):
            return super().trace(root, concrete_args)

    def of_parameter(self, tensor: torch.Tensor) -> Any:
        """Returns the proxy of its module for a parameter that the forward has from elsewhere."""
        name = self.parameter_names.get(id(tensor))
        return tensor if name is None else self.create_proxy("get_attr", name, (), {})

    def create_args_for_root(
        self, root_fn: Callable[..., Any], is_module: bool, concrete_args: Any = None
    ) -> tuple[Callable[..., Any], list[Any]]:
        proxies = [self.create_proxy("placeholder", name, (), {}) for name in self.input_names]
        return root_fn, [self.root, *proxies]

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        node = super().create_node(*args, **kwargs)
        if not torch.is_grad_enabled():
            node.meta["no_grad"] = True
        for device_type in surrounding_autocast():
            node.meta["autocast"] = (device_type, torch.get_autocast_dtype(device_type), True)
        return node

    def proxy(self, node: fx.Node) -> fx.Proxy:
        return _Proxy(node, self)

    def to_bool(self, obj: fx.Proxy) -> bool:
        """Decides conditions on buffers by the buffers' values; `_asserted` has the answers asserted."""
        try:
            return bool(self._value_in_buffers(obj.node))
        except _InNoBufferError:
            return super().to_bool(obj)

    def iter(self, obj: Any) -> Iterator[Any]:
        buffer = self.buffer_of(obj.node)
        return super().iter(obj) if buffer is None else (obj[row] for row in range(len(buffer)))

    def buffer_of(self, node: fx.Node) -> torch.Tensor | None:
        if node.op != "get_attr":
            return None
        buffer = dict(self.root.named_buffers(remove_duplicate=False)).get(str(node.target))
        return None if isinstance(buffer, fx.Proxy) else buffer  # a buffer that the forward has assigned

    def _value_in_buffers(self, node: Any) -> Any:
        if not isinstance(node, fx.Node):
            return node
        buffer = self.buffer_of(node)
        if buffer is not None:
            return buffer
        if node.op not in ("call_function", "call_method") or any(map(_may_write, self.graph.nodes)):
            raise _InNoBufferError
        args = [self._value_in_buffers(arg) for arg in node.args]
        kwargs = {name: self._value_in_buffers(arg) for name, arg in node.kwargs.items()}
        if isinstance(node.target, str):
            return getattr(args[0], node.target)(*args[1:], **kwargs)
        assert callable(node.target)
        return node.target(*args, **kwargs)

    def _filter_traceback_frames(self, user_stack_summary: StackSummary) -> StackSummary:
        frames = super()._filter_traceback_frames(user_stack_summary)
        return StackSummary.from_list(frame for frame in frames if is_the_authors(frame.filename))

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        # A layer is traced into if it calls submodules of its own (Sequential, TransformerEncoder) or is the
        # whole model.
        is_layer = super().is_leaf_module(m, module_qualified_name) and not isinstance(m, fx.GraphModule)
        return is_layer and m is not self.root.model

    def call_module(
        self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        if isinstance(m, nn.Sequential) and all(m is not module for module in self.root.modules()):
            return forward(*args, **kwargs)  # a slice, `layers[1:3]`, is not a module of the model
        if isinstance(m, LAYERS_WITH_MODES) and self.modes.get(m, m.training) != m.training:
            raise ValueError(
                f"torch.fx keeps the layer {self.path_of_module(m).removeprefix(MODEL_PREFIX)} whole, which "
                "is in another mode here than before the forward; give example_args, and tracer='export'"
            )
        return super().call_module(m, forward, args, kwargs)


class _InNoBufferError(Exception):
    """A value depends on something else than the buffers as they are before the forward."""


class _Uncompiled(fx.GraphModule):
    """Compiles no code: its names may come from an attacker, and torch.fx would paste them in unescaped."""

    def recompile(self) -> Any:
        return None


class _RefuseDraws(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Refuses random numbers that depend on no input: drawn while tracing, they would be constants."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags:
            raise ValueError(
                f"{func} draws random numbers that depend on no input, and torch.fx would keep those of the "
                "trace; torch.rand_like(x) draws anew"
            )
        return func(*args, **(kwargs or {}))


@contextmanager
def _refuse_custom_backwards() -> Iterator[None]:
    """Refuses custom autograd functions: torch.fx would keep their forward and lose the backward."""

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled() and any(isinstance(arg, fx.Proxy) for arg in args):
            raise ValueError(
                f"torch.fx does not see the backward of the custom autograd function {cls.__name__}; give "
                "example_args, with which torch.export traces the model"
            )
        return super(_SingleLevelFunction, cls).apply(*args, **kwargs)

    _SingleLevelFunction.apply = classmethod(apply)  # type: ignore[attr-defined]
    try:
        yield
    finally:
        del _SingleLevelFunction.apply  # type: ignore[attr-defined]


def trace_symbolically(program: Program) -> fx.GraphModule:
    tracer = _Tracer(program)
    with _RefuseDraws(), _refuse_custom_backwards(), record_helper_frames(), record_value_names():  # type: ignore[no-untyped-call]
        graph = tracer.trace(program)

        def text_again() -> list[tuple[str, ...]]:
            return _text(program, _Tracer(program).trace(program))

        require_the_same_again(program, _text(program, graph), text_again)
    read = [operator.attrgetter(str(node.target))(program) for node in graph.find_nodes(op="get_attr")]
    require_untrained((tensor for tensor in read if not isinstance(tensor, nn.Parameter)), program.model)
    for node in graph.nodes:
        _write_plainly(node)
    return _Uncompiled(tracer.root, graph, type(program.model).__name__)


def writes_in_place(graph: fx.Graph) -> bool:
    """Whether an operator may write in place, by its name: answers of the trace may then be out of date."""
    return any(map(_may_write, graph.nodes))


def _may_write(node: fx.Node) -> bool:
    name = getattr(node.target, "__name__", str(node.target))
    return name in ("setitem", "iadd", "imul", "isub", "itruediv") or re.search(r"[a-z]_$", name) is not None


def _text(root: nn.Module, graph: fx.Graph) -> list[tuple[str, ...]]:
    """Returns the nodes in a form to be compared, whatever names torch.fx gave to nodes and constants."""
    number = {node: f"%{at}" for at, node in enumerate(graph.nodes)}
    return [
        (
            node.op,
            str(getattr(root, node.target).tolist() if _is_constant(node) else node.target),
            str(fx.node.map_arg((node.args, node.kwargs), lambda n: number[n])),
        )
        for node in graph.nodes
    ]


def _is_constant(node: fx.Node) -> bool:
    return node.op == "get_attr" and str(node.target).startswith("_tensor_constant")


def _write_plainly(node: fx.Node) -> None:
    """Rewrites Python's operators as functions, and named results (`x.max(-1).values`) as indexing."""
    if node.op == "call_method" and str(node.target).startswith("__"):  # table[x], of a buffer
        function = getattr(operator, str(node.target), None)
        if function is not None:
            node.op, node.target = "call_function", function
    elif node.op == "call_function" and node.target is getattr:
        made, name = node.args
        assert isinstance(made, fx.Node)
        maker = made.target if isinstance(made.target, str) else getattr(made.target, "__name__", "")
        names = getattr(getattr(torch.return_types, maker, None), "__match_args__", ())
        if name in names:
            node.target, node.args = operator.getitem, (made, names.index(name))
