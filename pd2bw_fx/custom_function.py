"""Custom autograd functions as operators: a forward and a backward that the model's author wrote.

The trace keeps a call of one as one operator, and generated code has a `torch.autograd.Function` of its own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from pd2bw_fx.errors import TraceError

_NAMESPACE = "pd2bw_fx"


@dataclass(frozen=True, slots=True)
class CustomFunction:
    """A custom autograd function as two programs of ATen operators over tensors.

    `forward` takes the call's tensors and returns (results, saved). `backward` takes what was saved and a
    gradient for each result, and returns one for each tensor, or None where none flows. `not_differentiable`
    are positions among the results.
    """

    name: str  # the name of the class in generated code
    origin: str  # "modeling_bloom.py:141"
    forward: fx.Graph
    backward: fx.Graph
    returns_tuple: bool
    not_differentiable: tuple[int, ...] = ()

    @property
    def tensors(self) -> list[fx.Node]:
        return list(self.forward.find_nodes(op="placeholder"))

    @property
    def results(self) -> Sequence[fx.Node]:
        return _returned(self.forward)[0]  # type: ignore[no-any-return]

    @property
    def saved(self) -> Sequence[fx.Node]:
        return _returned(self.forward)[1]  # type: ignore[no-any-return]

    @property
    def gradients(self) -> Sequence[fx.Node | None]:
        """The values that the backward returns, one for each of `tensors`."""
        return _returned(self.backward)  # type: ignore[no-any-return]

    @property
    def is_random(self) -> bool:
        return any(draws(node) for node in self.forward.nodes)


def draws(node: fx.Node) -> bool:
    """Whether an operator takes numbers from a generator."""
    is_operator = isinstance(node.target, torch._ops.OpOverload)
    return is_operator and torch.Tag.nondeterministic_seeded in node.target.tags  # type: ignore[union-attr]


_KNOWN: dict[torch._ops.OpOverload, CustomFunction] = {}
_LIBRARIES: list[torch.library.Library] = []  # kept, for a library's operators go with it


def custom_function(target: Any) -> CustomFunction | None:
    """Returns the function that an operator of a traced program stands for, if `as_operator` made it."""
    return _KNOWN.get(target) if isinstance(target, torch._ops.OpOverload) else None


def as_operator(function: CustomFunction) -> torch._ops.OpOverload:
    """Returns an operator of torch that computes the function, with its backward. Equal functions share one.

    Raises TraceError for a function that enters torch.autocast.
    """
    _require_no_autocast(function)
    name = f"{function.name}_{_fingerprint(function)}"
    known = next((target for target in _KNOWN if target._schema.name == f"{_NAMESPACE}::{name}"), None)
    if known is not None:
        return known
    tensors = ", ".join(f"Tensor x{place}" for place in range(len(function.tensors)))
    results = f"({', '.join(['Tensor'] * len(function.results))})" if function.returns_tuple else "Tensor"
    tags = (torch.Tag.nondeterministic_seeded,) if function.is_random else ()
    run, differentiable = _kernels(function)
    schema = f"{name}({tensors}) -> {results}"
    target = registered(schema, run=run, differentiable=differentiable, fake=run, tags=tags)
    _KNOWN[target] = function
    return target


def _require_no_autocast(function: CustomFunction) -> None:
    for half, graph in (("forward", function.forward), ("backward", function.backward)):
        if graph.find_nodes(op="call_function", target=torch.amp.autocast_mode._enter_autocast):
            raise TraceError(
                f"the custom autograd function {function.name} ({function.origin}) enters torch.autocast in "
                f"its {half}, as torch.amp.custom_bwd does, and a stage's own class of it does not. Where "
                "autocast is off, custom_fwd and custom_bwd do nothing: leave them out. Or have the module "
                "that calls the function, with all weights that it reads, run as it is written: "
                "pd2bw_fx.untraced(module, returns=..)"
            )


def registered(
    schema: str,
    *,
    run: Callable[..., Any],
    differentiable: Callable[..., Any],
    fake: Callable[..., Any],
    tags: Sequence[torch.Tag] = (),
    namespace: str = _NAMESPACE,
) -> torch._ops.OpOverload:
    """Returns a new operator with kernels without gradients, with them, and for tensors without values."""
    name = schema.partition("(")[0]
    make_library: Any = torch.library.Library  # torch gives it no types
    library = make_library(namespace, "FRAGMENT")
    library.define(schema, tags=tuple(tags))
    library.impl(name, run, "CompositeExplicitAutograd")
    library.impl(name, differentiable, "Autograd")
    torch.library.register_fake(f"{namespace}::{name}", fake, lib=library)
    _LIBRARIES.append(library)
    packet, _, overload = name.partition(".")
    target: torch._ops.OpOverload = getattr(
        getattr(getattr(torch.ops, namespace), packet), overload or "default"
    )
    return target


def _returned(graph: fx.Graph) -> Any:
    return graph.output_node().args[0]


def _fingerprint(function: CustomFunction) -> str:
    """Returns a hash that is the same in every process: costs are kept by an operator's name."""
    lines = [
        f"{node.name} {node.op} {node.target} {node.args} {node.kwargs}"
        for graph in (function.forward, function.backward)
        for node in graph.nodes
    ]
    text = "\n".join([*lines, str(function.returns_tuple), str(function.not_differentiable)])
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def _kernels(function: CustomFunction) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Returns the kernels without gradients and with them."""
    forward = fx.GraphModule(nn.Module(), function.forward)
    backward = fx.GraphModule(nn.Module(), function.backward)

    class Kernel(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *tensors: Tensor) -> Any:
            results, saved = forward(*tensors)
            ctx.save_for_backward(*saved)
            fresh = _fresh(tensors, results)
            ctx.mark_non_differentiable(*(fresh[place] for place in function.not_differentiable))
            return fresh if function.returns_tuple else fresh[0]

        @staticmethod
        def backward(ctx: Any, *gradients: Tensor) -> Any:
            return backward(*ctx.saved_tensors, *gradients)

    def run(*tensors: Tensor) -> Any:
        fresh = _fresh(tensors, forward(*tensors)[0])
        return fresh if function.returns_tuple else fresh[0]

    return run, Kernel.apply


def _fresh(tensors: Sequence[Tensor], results: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Returns results in memory of their own: an operator's results share none with its operands."""
    held = {tensor.untyped_storage()._cdata for tensor in tensors}
    return tuple(r.clone() if r.untyped_storage()._cdata in held else r for r in results)
