"""What one stage consists of: its operators, what it is given and what it gives."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import mul

import torch
from torch import fx

from pd2bw_fx.graph import OperatorGraph, TensorSpec
from pd2bw_fx.plan import Plan


@dataclass(frozen=True, slots=True)
class Cut:
    """One stage of the plan.

    `nodes` are its calls in program order, including those that it recomputes. `inputs` and `outputs` are
    nodes in program order, model inputs first. `source` gives the stage that sends an input (None for an
    input of the model), `targets` the stages that an output is sent to. A value that the stage passes on is
    both an input and an output.
    """

    stage: int
    nodes: tuple[fx.Node, ...]
    inputs: tuple[fx.Node, ...]
    outputs: tuple[fx.Node, ...]
    source: Mapping[str, int | None]
    targets: Mapping[str, tuple[int, ...]]
    model_outputs: Mapping[str, str]  # value -> the model's name for it
    unread: tuple[str, ...]  # parameters and buffers that it holds though no stage reads them


def cut(graph: OperatorGraph, plan: Plan) -> tuple[Cut, ...]:
    """Cuts the program into the stages of the plan.

    Sizes never cross between stages: each stage reads them off a tensor that it has.
    """
    assert graph.fx is not None, "a graph read from a file cannot be generated from"
    nodes = {node.name: node for node in graph.fx.graph.nodes}
    stage_of = {
        name: stage for name, stage in plan.stage_of.items() if not graph.operators[name].is_replicable
    }
    outputs_at = _stages_of_outputs(graph, stage_of, plan.num_stages)
    needed = [_needed(graph, nodes, stage_of, outputs_at[s], s) for s in range(plan.num_stages)]
    read = [_received(graph, nodes, stage_of, names, s) for s, names in enumerate(needed)]
    sent = _sent(plan, stage_of, read)
    unread = {name: stage_of[operator] for name, operator in graph.unread().items()}
    return tuple(
        _cut(
            graph,
            nodes,
            s,
            needed[s],
            sent,
            outputs_at[s],
            tuple(name for name, home in unread.items() if home == s),
        )
        for s in range(plan.num_stages)
    )


def _sent(plan: Plan, stage_of: Mapping[str, int], read: Sequence[set[str]]) -> dict[tuple[str, int], int]:
    """Returns which stage sends a value to a stage that reads it: (value, stage) -> sender.

    The plan says which stages pass a value on. A route of the plan that does not begin at the stage that
    makes the value is ignored, and the value is sent directly.
    """
    planned = {(transfer.value, transfer.target): transfer.source for transfer in plan.transfers}
    sent: dict[tuple[str, int], int] = {}
    for stage, values in enumerate(read):
        for value in values:
            way, at = {}, stage
            while planned.get((value, at), at) < at:
                way[value, at] = planned[value, at]
                at = planned[value, at]
            sent |= way if at == stage_of[value] else {(value, stage): stage_of[value]}
    return sent


_OF_VALUES = re.compile(r"\bu\d+\b")  # torch's names for sizes that are known only when it runs


def size_symbol(graph: OperatorGraph, node: fx.Node) -> int | str | None:
    """Returns the size that a node reads as `x.shape[d]`: a number, or an expression in the graph's symbols.

    The result is None for a node that reads no size, and for a size that depends on values (one after
    indexing with a mask). Such a size is read off its own tensor.
    """
    operator = graph.operators.get(node.name)
    if operator is None or not operator.target.startswith("aten.sym_size"):
        return None
    tensor, dimension = node.args[0], node.args[1]
    assert isinstance(tensor, fx.Node)
    assert isinstance(dimension, int)
    spec = spec_of(graph, tensor)
    if spec is None or spec.shape is None:
        return None
    size = spec.shape[dimension]
    return None if isinstance(size, str) and _OF_VALUES.search(size) else size


def times_size(size: str) -> tuple[str, str] | None:
    """Returns both factors of "6*batch", the size of a tensor of flattened samples; None for other sizes."""
    found = re.fullmatch(r"(\d+)\*([A-Za-z_]\w*)", size)
    return None if found is None else (found[1], found[2])


def multiple_of_size(graph: OperatorGraph, node: fx.Node) -> tuple[int, str] | None:
    """Returns the factor and the symbol of a node that is a multiple of a size, as `10 * x.shape[0]` is."""
    if node.target is not mul or not is_size(graph, node):
        return None
    factors = [size_symbol(graph, each) if isinstance(each, fx.Node) else each for each in node.args]
    numbers = [each for each in factors if type(each) is int]
    symbols = [each for each in factors if isinstance(each, str) and each.isidentifier()]
    return (numbers[0], symbols[0]) if numbers and symbols else None


def divisors(number: int, symbol: str, sizes: Iterable[int | str]) -> list[tuple[int, str]]:
    """Returns those sizes of which `number * symbol` is a multiple, each with how many times it is that.

    Of 10 times "batch" they are 2 times "5*batch", say.
    """
    products = {size: times_size(size) for size in sizes if isinstance(size, str)}
    return [
        (number // int(product[0]), size)
        for size, product in products.items()
        if product is not None and product[1] == symbol and number % int(product[0]) == 0
    ]


def operands(graph: OperatorGraph, node: fx.Node) -> list[fx.Node]:
    """Lists what a node reads, in order.

    The list is empty for a size, which is read off whatever tensor is at hand.
    """
    return [] if size_symbol(graph, node) is not None else list(node.all_input_nodes)


def tensors_read(graph: OperatorGraph, node: fx.Node) -> list[fx.Node]:
    """Lists the tensors that a node reads, in order.

    A size among its operands adds no tensor, unless there is only one that it can be read off.
    """
    found: dict[fx.Node, None] = {}
    for operand in operands(graph, node):
        found |= dict.fromkeys(tensors_read(graph, operand) if is_size(graph, operand) else [operand])
    return list(found)


def spec_of(graph: OperatorGraph, node: fx.Node) -> TensorSpec | None:
    """Returns the spec of the one tensor that a node stands for; None for tuples and sizes."""
    if node.op == "placeholder":
        return graph.inputs.get(node.name)
    operator = graph.operators.get(node.name)
    if operator is None or len(operator.outputs) != 1:
        return None
    return operator.outputs[0]


def is_size(graph: OperatorGraph, node: fx.Node) -> bool:
    """Whether a node is a number that is written where it is used, and never sent.

    It is computed from shapes, or read out of a tensor that nothing writes.
    """
    operator = graph.operators.get(node.name)
    if operator is None or operator.outputs or operator.writes_buffers:
        return False
    return operator.memory_group is None and bool(node.users)


def is_number(node: fx.Node) -> bool:
    """Whether a value is a number, as those that are read out of tensors and passed to calls."""
    return isinstance(node.meta.get("val"), int | float | torch.SymInt | torch.SymFloat | torch.SymBool)


def _stages_of_outputs(
    graph: OperatorGraph, stage_of: Mapping[str, int], num_stages: int
) -> list[dict[str, str]]:
    """Returns, for each stage, the model outputs that it returns: value -> name."""
    found: list[dict[str, str]] = [{} for _ in range(num_stages)]
    for output in graph.outputs:
        found[stage_of.get(output.value, num_stages - 1)].setdefault(output.value, output.name)
    return found


def _needed(
    graph: OperatorGraph,
    nodes: Mapping[str, fx.Node],
    stage_of: Mapping[str, int],
    outputs: Mapping[str, str],
    stage: int,
) -> set[str]:
    """Collects the stage's own operators, and the replicable ones that they need."""
    own = {name for name, owner in stage_of.items() if owner == stage}
    todo = [*own, *(value for value in outputs if value not in stage_of)]
    needed: set[str] = set()
    while todo:
        name = todo.pop()
        if name in needed or name not in graph.operators:
            continue
        if name in stage_of and stage_of[name] != stage:
            continue
        needed.add(name)
        todo += [node.name for node in operands(graph, nodes[name])]
    return needed


def _received(
    graph: OperatorGraph,
    nodes: Mapping[str, fx.Node],
    stage_of: Mapping[str, int],
    needed: set[str],
    stage: int,
) -> set[str]:
    read = {operand.name for name in needed for operand in operands(graph, nodes[name])}
    return {name for name in read if stage_of.get(name, stage) != stage}


def _cut(
    graph: OperatorGraph,
    nodes: Mapping[str, fx.Node],
    stage: int,
    needed: set[str],
    sent: Mapping[tuple[str, int], int],
    outputs: Mapping[str, str],
    unread: tuple[str, ...],
) -> Cut:
    kept = tuple(node for name, node in nodes.items() if name in needed)
    received = {name: sender for (name, target), sender in sent.items() if target == stage}
    returned = {name for (name, _), sender in sent.items() if sender == stage} | set(outputs)
    loaded = _loaded_inputs(graph, kept, outputs) | _size_inputs(graph, kept, set(received))
    inputs = [nodes[name] for name in graph.inputs if name in loaded]
    inputs += [node for name, node in nodes.items() if name in received]
    return Cut(
        stage=stage,
        nodes=kept,
        inputs=tuple(inputs),
        outputs=tuple(node for name, node in nodes.items() if name in returned),
        source={node.name: received.get(node.name) for node in inputs},
        targets={
            name: tuple(sorted(t for (value, t), sender in sent.items() if (value, sender) == (name, stage)))
            for name in returned
        },
        model_outputs=outputs,
        unread=unread,
    )


def _loaded_inputs(graph: OperatorGraph, kept: Sequence[fx.Node], outputs: Mapping[str, str]) -> set[str]:
    read = {operand.name for node in kept for operand in operands(graph, node)}
    return {name for name in graph.inputs if name in read or name in outputs}


def _size_inputs(graph: OperatorGraph, kept: Sequence[fx.Node], received: set[str]) -> set[str]:
    """Picks a model input for each size that no other input of the stage has."""
    wanted = {symbol for node in kept if isinstance(symbol := size_symbol(graph, node), str)}
    read = {operand.name for node in kept for operand in operands(graph, node)}
    at_hand = [graph.inputs[name] for name in graph.inputs if name in read]
    at_hand += [graph.operators[name].outputs[0] for name in received]
    have = {size for spec in at_hand for size in spec.shape or ()}
    added: set[str] = set()
    missing = wanted - have
    for symbol in sorted({product[1] if (product := times_size(size)) else size for size in missing} - have):
        if symbol in {size for name in added for size in graph.inputs[name].shape or ()}:
            continue
        added |= {next(name for name, spec in graph.inputs.items() if symbol in (spec.shape or ()))}
    return added
