"""The traced program, which can be run, and the live tensors that it reads."""

from __future__ import annotations

import functools
import io
import logging
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, redirect_stderr
from typing import Any, ParamSpec, TypeVar

import torch
from torch import fx, nn
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

from pd2bw_fx.errors import Pd2bwError
from pd2bw_fx.graph import OperatorGraph
from pd2bw_fx.grouped_products import size_products_of_all_types
from pd2bw_fx.recurrent_operators import ON_PACKED_SEQUENCES, ON_SEQUENCES
from pd2bw_fx.value_checks import checks_passed_in

_Given = ParamSpec("_Given")
_Made = TypeVar("_Made")
_TRACING = threading.RLock()
# Torch's words where a forward differentiates without gradients; tests/test_torch_messages.py has torch say
# them. Where a later torch words it otherwise, the model fails in evaluation with torch's message.
NO_GRADIENT = "does not require grad"
_RECURRENT = ON_SEQUENCES | ON_PACKED_SEQUENCES


class FxProgram:
    """A graph that is interpreted rather than executed as code: `program(*inputs)` returns the outputs as a
    tuple.

    `values` are what its nodes refer to by name: the model's own tensors and layers, under the model's names.
    They are not attributes, as those of a torch.fx.GraphModule are: a model may have a `graph` or `code` of
    its own, and torch.fx pastes names unescaped into the code that it runs, so that a maliciously named
    module would run code of its own.
    """

    def __init__(self, graph: fx.Graph, values: Mapping[str, Any]) -> None:
        self.graph = graph
        named = (str(node.target) for node in graph.nodes if node.op in ("get_attr", "call_module"))
        self.values = {name: values[name] for name in named}

    def __call__(self, *tensors: torch.Tensor) -> tuple[Any, ...]:
        outputs: tuple[Any, ...] = ProgramInterpreter(self).run(*tensors)
        return outputs


class ProgramInterpreter(fx.Interpreter):
    """Runs each node in the no_grad and autocast regions that the model's author put it in."""

    def __init__(self, program: FxProgram, *, garbage_collect_values: bool = True) -> None:
        super().__init__(nn.Module(), garbage_collect_values, program.graph)
        self._values = program.values

    def fetch_attr(self, target: str) -> Any:
        return self._values[target]

    def run_node(self, n: fx.Node) -> Any:
        with region(n), checks_passed_in(n.target):
            return super().run_node(n)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target not in _RECURRENT or not any(map(_is_fake_on_a_gpu, pytree.tree_leaves((args, kwargs)))):
            return super().call_function(target, args, kwargs)
        with enable_python_dispatcher():  # cuDNN's own kernels would look for the memory of the weights
            return super().call_function(target, args, kwargs)

    @property
    def extra_traceback(self) -> bool:
        """Whether torch adds the node to an error's text: our own errors name it themselves."""
        return not isinstance(sys.exc_info()[1], Pd2bwError)

    @extra_traceback.setter
    def extra_traceback(self, value: bool) -> None:
        """Is ignored; torch's constructor sets it."""


def _is_fake_on_a_gpu(value: Any) -> bool:
    return isinstance(value, FakeTensor) and value.device.type == "cuda"


@contextmanager
def region(node: fx.Node, device_type: str | None = None) -> Iterator[None]:
    """Enters `node.meta["no_grad"]` (a bool: gradients off) and the node's `autocast_of`, where present.

    `device_type` is that of the device that the node runs on; None: the one it was traced on.
    """
    with ExitStack() as stack:
        if "no_grad" in node.meta:
            stack.enter_context(torch.set_grad_enabled(not node.meta["no_grad"]))
        autocast = autocast_of(node)
        if autocast is not None:
            named, dtype, enabled = autocast
            kind = named or device_type or _traced_on(node)
            stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))
        yield


def autocast_of(node: fx.Node) -> tuple[str | None, torch.dtype | None, bool] | None:
    """Returns the autocast region that a node is in: device type, dtype (None: the default one), enabled.

    The device type is None if it is the one that the node was traced on, and means that of the device the
    node runs on: a model traced on a CPU and trained on GPUs means its regions for the GPUs.
    """
    if "autocast" not in node.meta:
        return None
    device_type, dtype, enabled = node.meta["autocast"]
    return None if device_type == _traced_on(node) else device_type, dtype, enabled


def _traced_on(node: fx.Node) -> str:
    leaves = pytree.tree_leaves(node.meta.get("val"))
    return next((leaf.device.type for leaf in leaves if isinstance(leaf, torch.Tensor)), "cpu")


@contextmanager
def set_fast_path(*, on: bool) -> Iterator[None]:
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(on)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def without_gradients(
    forward: Callable[[Mapping[str, torch.Tensor]], Mapping[str, torch.Tensor]],
    inputs: Mapping[str, torch.Tensor],
) -> dict[str, torch.Tensor]:
    """Returns copies of a model's outputs in evaluation: a part of a buffer may be one, and is restored.

    A model that differentiates in its forward draws and writes twice.
    """
    return with_gradients_if_asked(lambda gradients: returned(forward, inputs, gradients=gradients))


def with_gradients_if_asked(run: Callable[[bool], _Made]) -> _Made:
    """Returns `run(False)`, without gradients, or `run(True)` for a model that differentiates in its forward.

    Such a model (forces from an energy) cannot do without gradients. Before it fails, the first run has drawn
    and written: the caller must begin each run with weights and generators as they were.
    """
    try:
        return run(False)
    except RuntimeError as error:
        if NO_GRADIENT not in str(error):
            raise
    return run(True)


def returned(
    forward: Callable[[Mapping[str, torch.Tensor]], Mapping[str, torch.Tensor]],
    inputs: Mapping[str, torch.Tensor],
    *,
    gradients: bool,
    fast_path: bool = False,
) -> dict[str, torch.Tensor]:
    """Returns copies of what a model returns.

    `fast_path`: torch may use its fast path for encoder layers, which gives padded positions zeros; else
    every layer computes as it is written.
    """
    with torch.set_grad_enabled(gradients), set_fast_path(on=fast_path):
        return {name: value.detach().clone() for name, value in forward(inputs).items()}


def written_by_schema(node: fx.Node) -> tuple[fx.Node, ...]:
    """Returns the nodes whose values an ATen operator changes in place, by its schema."""
    if not isinstance(node.target, torch._ops.OpOverload):
        return ()
    written = []
    for position, argument in enumerate(node.target._schema.arguments):
        if argument.alias_info is None or not argument.alias_info.is_write:
            continue
        value = node.args[position] if position < len(node.args) else node.kwargs.get(argument.name)
        values = value if isinstance(value, (list, tuple)) else [value]  # torch._foreach_lerp_ has lists
        written += [each for each in values if isinstance(each, fx.Node)]
    return tuple(written)


def one_at_a_time(function: Callable[_Given, _Made]) -> Callable[_Given, _Made]:
    """Lets a function that traces wait until no other thread traces: it changes torch in the whole process.

    It runs in a `training_context`, whatever the caller has switched off, and `as_written`.
    """

    @functools.wraps(function)
    def waiting(*args: _Given.args, **kwargs: _Given.kwargs) -> _Made:
        with _TRACING, training_context(), as_written():
            return function(*args, **kwargs)

    return waiting


@contextmanager
def training_context() -> Iterator[None]:
    """Turns gradients on and a surrounding autocast off: what is traced is the model's training by itself.

    Where only sizes are asked for, torch knows those of all that its kernels compute.
    """
    with ExitStack() as stack:
        stack.enter_context(size_products_of_all_types())
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        for device_type in surrounding_autocast():
            stack.enter_context(torch.autocast(device_type, enabled=False))
        yield


@contextmanager
def as_written() -> Iterator[None]:
    """Runs what torch.compile has compiled as its author wrote it: a few runs are not worth compiling for."""
    if "torch._dynamo" not in sys.modules:  # nothing is compiled yet, and importing it takes a second
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


@contextmanager
def silence_torch_errors() -> Iterator[None]:
    """Keeps torch from printing the errors that it raises here: our own errors and reports tell them."""
    names = ("torch._subclasses.fake_tensor", "torch.fx.experimental.symbolic_shapes")
    were_disabled = {logger: logger.disabled for logger in map(logging.getLogger, names)}
    try:
        for logger in were_disabled:
            logger.disabled = True  # a level would have all loggers of the process look up theirs again
        with redirect_stderr(io.StringIO()):
            yield
    finally:
        for logger, was_disabled in were_disabled.items():
            logger.disabled = was_disabled


def surrounding_autocast() -> tuple[str, ...]:
    """Returns the device types on which autocast is on."""
    return tuple(kind for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind))


def tensors(graph: OperatorGraph) -> dict[str, torch.Tensor]:
    """Returns the live values of all parameters, buffers and constants by name, also of unread ones."""
    if graph.root is None:
        raise ValueError("this operator graph has been read from a file and holds no live tensors")
    read = graph.fx.values if graph.fx is not None else {}
    return {
        name: read[name] if name in read else _get(graph.root, name)
        for name in (*graph.parameters, *graph.buffers)
    }


def _get(module: nn.Module, name: str) -> torch.Tensor:
    path, _, attribute = name.rpartition(".")
    value = getattr(module.get_submodule(path), attribute)
    assert isinstance(value, torch.Tensor), f"{name} is no tensor"
    return value
