"""What the calls of torch.nn layers are given in a stage, and what they return."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn

from .attention import AttentionCall, attention_call
from .layers import LAYERS_GIVING_TUPLES, LAYERS_OF_PAIRS, LAYERS_OF_TWO, RECURRENT_CELLS, is_layer
from .scopes import Scope

if TYPE_CHECKING:
    from .stage_tree import StageTree


def takes_and_gives_what_the_layer_does(tree: StageTree, call: Scope, layer: nn.Module) -> bool:
    """Whether a call can be printed as a call of the layer.

    A hook may take another value out of it, and a stage may need a value that the layer does not return.
    """
    if isinstance(layer, nn.MultiheadAttention):
        return attention_call(tree, call, layer) is not None
    return _gives_what_it_gives(tree, call, layer) and _takes_what_it_takes(tree, call, layer)


def attention_of(tree: StageTree, item: fx.Node | Scope) -> AttentionCall | None:
    """Returns what a call of nn.MultiheadAttention is given, if the item is one that is printed as such."""
    if not isinstance(item, Scope) or not tree.is_layer(item):
        return None
    layer = tree.modules[item.path]
    return attention_call(tree, item, layer) if isinstance(layer, nn.MultiheadAttention) else None


def call_arguments(tree: StageTree, call: Scope) -> list[fx.Node | tuple[fx.Node, ...]]:
    """Lists the tensors that a call is given, in order; both states of an LSTM are one argument."""
    reads = tree.reads(call)
    if not tree.is_layer(call):
        return list(reads)
    if (attention := attention_of(tree, call)) is not None:
        return [*attention.arguments]
    layer, given = tree.modules[call.path], list[Any]()
    if isinstance(layer, RECURRENT_CELLS):
        given = _given_to_a_cell(call)
    elif isinstance(layer, LAYERS_OF_PAIRS):
        given = _given_to_an_operator_of_several(tree, call)
    given = given if set(given) == set(reads) else list(reads)  # a tensor passed twice is listed twice
    if isinstance(layer, LAYERS_OF_PAIRS) and len(given) == 3:
        return [given[0], (given[1], given[2])]
    return given


def idle_layers(tree: StageTree, path: str) -> list[str]:
    """Lists layers that nobody calls, where the class at this path holds all of their tensors."""
    owned, found = tree.owned[path], list[str]()
    for holder in sorted({name.rpartition(".")[0] for name in owned} - {path}):
        module = tree.modules.get(holder)
        if module is not None and is_layer(module, training=tree.model.training):
            tensors = {n for n, _ in module.named_parameters(remove_duplicate=False)}
            tensors |= {n for n, _ in module.named_buffers(remove_duplicate=False)}
            found += [holder] if {f"{holder}.{name}" for name in tensors} <= owned else []
    return found


def linear_of(tree: StageTree, scope: Scope, node: fx.Node) -> str | None:
    """Returns the path of the linear layer whose weight and bias an operator takes, as the layer's own does.

    The author has called it by its weights (`F.linear(x, self.out.weight, self.out.bias)`).
    """
    if node.target is not torch.ops.aten.linear.default:
        return None
    held = [tree.parameter(scope, o) for o in node.args[1:] if isinstance(o, fx.Node) and o.op == "get_attr"]
    names = [name for name in held if name is not None]
    path = names[0].rpartition(".")[0] if len(names) == len(node.args) - 1 else ""
    layer = tree.modules.get(path)
    if not isinstance(layer, nn.Linear) or path not in idle_layers(tree, scope.path):
        return None
    wanted = ["weight"] if layer.bias is None else ["weight", "bias"]
    return path if names == [f"{path}.{name}" for name in wanted] else None


def _gives_what_it_gives(tree: StageTree, call: Scope, layer: nn.Module) -> bool:
    given = tree.gives(call)
    if isinstance(layer, LAYERS_GIVING_TUPLES):
        return all(len(node.args) == 2 and isinstance(node.args[1], int) for node in given)
    return len(given) == 1


def _takes_what_it_takes(tree: StageTree, call: Scope, layer: nn.Module) -> bool:
    reads = tree.reads(call)
    if isinstance(layer, LAYERS_OF_TWO):
        (given,) = tree.gives(call)
        return len(reads) == 2 and list(given.args[:2]) == reads
    if isinstance(layer, RECURRENT_CELLS):
        return list(dict.fromkeys(_given_to_a_cell(call))) == reads
    if isinstance(layer, nn.EmbeddingBag) and len(reads) == 1:
        return bool(reads[0].meta["val"].ndim == 2)  # bags of equal length; a single row of words has offsets
    given_once = list(dict.fromkeys(_given_to_an_operator_of_several(tree, call)))
    return len(reads) == 1 or given_once == reads


def _given_to_a_cell(call: Scope) -> list[Any]:
    """Returns a recurrent cell's input and states, without the states that the cell makes itself."""
    inside = set(call.nodes)
    cell = next((node for node in inside if str(node.target).endswith("_cell.default")), None)
    if cell is None:
        return []
    given, states = cell.args[:2]
    operands = [given, *(states if isinstance(states, list | tuple) else [states])]
    return [operand for operand in operands if operand not in inside]


def _given_to_an_operator_of_several(tree: StageTree, call: Scope) -> list[Any]:
    """Returns a recurrent layer's sequence and first states, or an EmbeddingBag's words and offsets."""
    made = next((node.args[0] for node in tree.gives(call) if node.args), None)
    if not isinstance(made, fx.Node):
        return []
    if made.target is torch.ops.aten.embedding_bag.padding_idx:
        return list(made.args[1:3])
    if getattr(made.target, "_overloadname", "") != "input":
        return []
    sequence, states = made.args[:2]
    return [sequence, *(states if isinstance(states, list | tuple) else [states])]
