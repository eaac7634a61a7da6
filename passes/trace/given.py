"""A program that the user traced: an ExportedProgram or a GraphModule, taken as it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind, OutputKind
from torch.func import functional_call
from torch.utils import _pytree as pytree

from pd2bw_fx.errors import InputError, TraceError
from pd2bw_fx.names import free_name
from pd2bw_fx.traced import Traced, TraceReport
from pd2bw_fx.units import counted

from .exported import batch_sizes
from .program import loss_place, named_outputs
from .vmap_regions import has_transforms

_WRITES = {OutputKind.BUFFER_MUTATION, OutputKind.USER_INPUT_MUTATION}


def accept_exported(program: ExportedProgram) -> Traced:
    """Accepts a program with its own example inputs; its first dynamic dimension 0 is the batch."""
    if has_transforms(program.graph_module):
        raise TraceError(
            "the ExportedProgram maps or differentiates by torch.func (torch.vmap, torch.func.grad), which "
            "cannot be cut into stages; pass the model itself: of it, what torch.vmap maps is written out"
        )
    signature = program.graph_signature
    nodes = {node.name: node for node in program.graph.find_nodes(op="placeholder")}
    entries = [entry for entry in signature.input_specs if entry.kind is InputKind.USER_INPUT]
    names = [entry.arg.name for entry in entries if not isinstance(entry.arg, ConstantArgument)]
    args, kwargs = program.example_inputs or ((), {})
    leaves = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    if len(leaves) != len(names):
        raise InputError(
            f"the ExportedProgram carries {counted(len(leaves), 'example tensor')} for "
            f"{counted(len(names), 'input')}; expected "
            "one each: export it with example inputs, or pass the model itself"
        )
    kept = [
        entry
        for entry in signature.output_specs
        if entry.kind in {OutputKind.USER_OUTPUT, OutputKind.LOSS_OUTPUT}
    ]
    results = program.graph.output_node().args[0]
    assert isinstance(results, (tuple, list))
    written = [entry.target for entry in signature.output_specs if entry.kind in _WRITES]
    if written:
        raise TraceError(
            f"the ExportedProgram writes {written[0]!r} by returning it, which run_decompositions() does; "
            "pass what torch.export.export returned, or the model itself"
        )
    values = [result for entry, result in zip(signature.output_specs, results, strict=True) if entry in kept]
    spec = program.call_spec.out_spec
    output = pytree.tree_unflatten([_fake(value) for value in values], spec) if spec is not None else values
    names_out, loss, places = _names(output)
    symbols = [_batch_symbol(nodes[name]) for name in names]
    batch = next((symbol for symbol in symbols if symbol is not None), None)
    batched = frozenset(
        name for name, symbol in zip(names, symbols, strict=True) if symbol is not None and symbol == batch
    )
    examples = dict(zip(names, leaves, strict=True))
    module = program.module(check_guards=False)
    return Traced(
        program=program,
        model=module,
        inputs=tuple(names),
        outputs=names_out,
        output_places=places,
        loss=loss,
        report=TraceReport("given", notes=("the user's own ExportedProgram",)),
        batch_size=examples[min(batched)].shape[0] if batched else None,
        batched_inputs=batched,
        dynamic_batch=batch is not None,
        batch_sizes=batch_sizes(program, batched),
        examples=examples,
        call=_caller(module, args, kwargs, tuple(names), names_out),
    )


def accept_graph_module(
    module: fx.GraphModule, args: Sequence[Any], kwargs: Mapping[str, Any], batch_size: int | None
) -> Traced:
    names = [str(node.target) for node in module.graph.find_nodes(op="placeholder")]
    given = [*args, *(kwargs[name] for name in names[len(args) :] if name in kwargs)]
    if given and (len(given) != len(names) or not all(isinstance(value, torch.Tensor) for value in given)):
        raise InputError(
            f"the GraphModule has the inputs {', '.join(names)}; expected a tensor for each of them, found "
            f"{len(given)} example values"
        )
    names_out, loss, places = _names(_returned(module, args, kwargs))
    examples = dict(zip(names, given, strict=False))
    return Traced(
        program=_without_guards(module),
        model=module,
        inputs=tuple(names),
        outputs=names_out,
        output_places=places,
        loss=loss,
        report=TraceReport("given", notes=("the user's own GraphModule",)),
        batch_size=batch_size,
        batched_inputs=frozenset(
            name for name, t in examples.items() if t.dim() > 0 and t.shape[0] == batch_size
        ),
        examples=examples,
        call=_caller(module, tuple(args), kwargs, tuple(names), names_out) if examples else None,
    )


def _returned(module: fx.GraphModule, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Returns what the module returns for tensors like the examples, in its form.

    Shapes and gradients tell which one is a loss. torch.fx notes none, nor does an operator that a user put
    in, and torch.export does not note what has a gradient. If only a real run can tell them, or there are no
    examples, the graph's nodes are returned in their places.
    """
    if args or kwargs:
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        held = dict(chain(module.named_parameters(), module.named_buffers()))
        try:
            fakes: dict[str, torch.Tensor] = {name: mode.from_tensor(held[name]) for name in held}
            given = pytree.tree_map_only(torch.Tensor, mode.from_tensor, (tuple(args), dict(kwargs)))
            with mode, torch.enable_grad():
                return functional_call(module, fakes, *given)
        except Exception:  # what is wrong is said where the program is normalised
            return _returned_by_graph(module)
    return _returned_by_graph(module)


def _returned_by_graph(module: fx.GraphModule) -> Any:
    """Returns the output's nodes in its form, which the graph of `ExportedProgram.module()` lacks."""
    output = module.graph.output_node().args[0]
    info = getattr(module.graph._codegen, "pytree_info", None)
    if info is None or info.out_spec is None:
        return output
    assert isinstance(output, tuple | list)
    return pytree.tree_unflatten([_fake(value) for value in output], info.out_spec)


def _without_guards(module: fx.GraphModule) -> fx.GraphModule:
    """Returns the module without the call that checks input sizes, which `ExportedProgram.module()` adds."""
    guards = module.graph.find_nodes(op="call_module", target="_guards_fn")
    if not guards:
        return module
    kept: dict[fx.Node, fx.Node] = {}
    graph = fx.Graph()
    graph.output(graph.graph_copy(module.graph, kept))
    for guard in guards:
        graph.erase_node(kept[guard])
    return fx.GraphModule(module, graph, type(module).__name__)


def _caller(
    module: nn.Module,
    args: Any,
    kwargs: Mapping[str, Any],
    names: tuple[str, ...],
    names_out: tuple[str, ...],
) -> Callable[[Mapping[str, torch.Tensor]], dict[str, torch.Tensor]]:
    """Returns a function that runs the module on tensors by name, in the places of the example's tensors."""
    leaves, spec = pytree.tree_flatten((args, dict(kwargs)))

    def call(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        waiting = iter(names)
        put = [tensors[next(waiting)] if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        positional, keywords = pytree.tree_unflatten(put, spec)
        named = named_outputs(module(*positional, **keywords), has_loss=True)
        values = (value for _, value in named if isinstance(value, torch.Tensor))
        return dict(zip(names_out, values, strict=True))

    return call


def _fake(value: Any) -> Any:
    return value.meta.get("val", value) if isinstance(value, fx.Node) else value


def _names(output: Any) -> tuple[tuple[str, ...], str | None, tuple[int, ...]]:
    """Returns the names of outputs that are tensors, the loss's name, and which leaf each of them is.

    A tuple's loss can only be its first element.
    """
    named = named_outputs(output, has_loss=True, place=0 if loss_place(output) == 0 else None)
    leaves = pytree.tree_leaves(output)
    names: list[str] = []
    places: list[int] = []
    for name, value in named:
        if isinstance(value, torch.Tensor | fx.Node):
            names.append(free_name(name, names, first=1))
            places.append(next(place for place, leaf in enumerate(leaves) if leaf is value))
    return tuple(names), "loss" if names and names[0] == "loss" else None, tuple(places)


def _batch_symbol(node: fx.Node) -> str | None:
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor) or value.dim() == 0:
        return None
    size: Any = value.shape[0]
    return str(size.node.expr) if isinstance(size, torch.SymInt) else None
