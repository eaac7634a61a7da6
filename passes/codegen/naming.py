"""Names values as their author did where the trace knows it, else after what made them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from torch import fx, nn

from pd2bw_fx.custom_function import custom_function
from pd2bw_fx.graph import RETURNED_AT
from pd2bw_fx.untraced_operands import NAMESPACE as UNTRACED

from .idioms import normalization
from .layers import LAYERS_GIVING_TUPLES
from .literals import identifier
from .loops.author_loops import NO_ROUND, round_of
from .outermost import is_outermost_call, is_outermost_operator
from .scopes import Line, Scope, line_at, module_calls
from .stage_tree import StageTree
from .statements import (
    appended_list,
    calls_one,
    filled_name,
    makes_one_by_one,
    names_of_what_it_makes,
    returns_a_list,
    state_names,
)

# Names of values to which the author gave none, by operator.
_RESULT_NAMES = {
    "add": "total", "sub": "difference", "mul": "product", "div": "ratio", "matmul": "product",
    "floor_divide": "quotient",
    "addmm": "projected", "linear": "projected", "layer_norm": "normed", "batch_norm": "normed",
    "dropout": "dropped", "alpha_dropout": "dropped", "feature_dropout": "dropped",
    "view": "viewed", "reshape": "viewed", "transpose": "turned", "permute": "turned",
    "numpy_T": "turned", "mT": "turned", "t": "turned", "sym_size": "size",
    "embedding": "embedded", "scaled_dot_product_attention": "attended",
    "cross_entropy_loss": "cross_entropy", "to": "cast", "mean": "mean", "cat": "joined",
    "unsqueeze": "widened", "expand": "expanded",
    "slice": "part", "select": "part", "index": "picked", "split": "parts", "chunk": "parts",
    "type_as": "cast", "detach": "detached", "squeeze": "squeezed", "contiguous": "copied", "clone": "copied",
    "where": "chosen", "neg": "negated", "arange": "positions",
    "__and__": "both", "__or__": "either", "bitwise_not": "inverted", "masked_fill": "masked",
    "le": "at_most", "lt": "less", "ge": "at_least", "gt": "more", "eq": "equal", "ne": "unequal",
    "getitem": "element", "softmax": "shares", "bmm": "product", "pow": "power", "flatten": "flat",
    "abs": "magnitude", "cumsum": "running_total", "expand_as": "expanded", "new_zeros": "zeros",
    "new_ones": "ones", "slice_scatter": "filled", "select_scatter": "filled", "full_like": "filled",
    "index_put": "filled", "index_fill": "filled", "fill": "filled", "linalg_vector_norm": "norm",
}  # fmt: skip


# They return their operand with other elements: after `out[:, t] = v` the value is still called out.
_FILLING = {"select_scatter", "slice_scatter", "index_put", "masked_fill", "index_fill"}
# What they return keeps the name of their operand.
_OF_THE_TRACE = re.compile(r"^constant_\d+$")  # a tensor that no attribute of the model holds
_SAME_VALUE = {"to", "contiguous", "clone", "detach", "type_as", "unsqueeze", "squeeze"}
# Names of operands by place: a value without a name is called after what it is for.
_PARTS = {
    "scaled_dot_product_attention": ("query", "key", "value", "mask"),
    "cross_entropy_loss": ("", "targets"),
    "nll_loss_nd": ("", "targets"),
}


def hands_on(item: fx.Node | Scope) -> fx.Node | None:
    """Returns the operand whose value an operator returns in another type or layout, or None."""
    if isinstance(item, Scope) or item.op != "call_function" or operator_name(item) not in _SAME_VALUE:
        return None
    operand = item.args[0]
    return operand if isinstance(operand, fx.Node) and operand.op != "get_attr" else None


def _part_in_an_operator(node: fx.Node) -> str | None:
    for user in node.users:
        parts = _PARTS.get(operator_name(user)) if user.op == "call_function" else None
        if parts is not None:
            return next(
                (name for operand, name in zip(user.args, parts, strict=False) if operand is node), None
            )
    return None


def place_in_mask(node: fx.Node) -> str | None:
    """Names numbers that count up along one dimension of a mask: its rows, its columns, or the samples."""
    made: fx.Node | None = node
    while made is not None and operator_name(made) != "arange":
        made = hands_on(made)
    if made is None:
        return None
    widest = node
    while (wider := next((u for u in widest.users if _is_operator(u, "unsqueeze")), None)) is not None:
        widest = wider
    if "val" not in widest.meta:
        return None  # torch.fx knows no shapes
    shape = widest.meta["val"].shape
    long = [place - len(shape) for place, size in enumerate(shape) if type(size) is not int or size != 1]
    if len(shape) < 2 or len(long) != 1:
        return None
    names = {-1: "columns", -2: "rows"}
    return names.get(long[0], "samples" if long[0] == -len(shape) else None)


def _compares_places(node: fx.Node) -> bool:
    """Whether a value holds for columns up to the row's own, which is what a causal mask lets through."""
    places = [
        place_in_mask(o) if isinstance(o, fx.Node) and o.op == "call_function" else None for o in node.args
    ]
    return (operator_name(node), *places) in {("le", "columns", "rows"), ("ge", "rows", "columns")}


def _is_operator(node: fx.Node, name: str) -> bool:
    return node.op == "call_function" and operator_name(node) == name


def is_final(node: fx.Node, depth: int, called_at: Line | None = None) -> bool:
    """Whether a value is what its author's statement is for, rather than an inner part of it.

    `called_at` is the line of the statement that calls the function in which the value is made, if that is
    meant.

    A value that is read on the same line is a part, unless that is in a loop, whose next round may be
    what reads it. Then it is the statement's own if the statement reads what it assigns, and the value
    comes from its outermost operation.
    """
    line, calls = called_at or line_at(node, depth), module_calls(node)[:depth]
    if line is None:
        return True
    chain = line.chain
    readers = [line_at(u, depth) for u in node.users if module_calls(u)[:depth] == calls]
    # On the line itself, or in a function that it calls.
    beside = [reader for reader in readers if reader is not None and reader.chain[: len(chain)] == chain]
    if not beside:
        return True
    if called_at is not None or round_of(line) == NO_ROUND:
        return False
    if len(module_calls(node)) > depth:
        return is_outermost_call(line.code, module_calls(node)[depth][1])
    return is_outermost_operator(line.code, node)


def name_of_filled(node: fx.Node, line: Line | None) -> str | None:
    """Returns the author's name of a tensor into which a statement has put elements, if this is it."""
    if line is None or node.op != "call_function" or operator_name(node) not in _FILLING:
        return None
    return filled_name(line.code)


def outer_name(node: fx.Node, depth: int, within: int = 0) -> str | None:
    """Returns the name assigned by a line that called the function in which the value was made, if any."""
    return next(outer_names(node, depth, within), None)


def outer_names(node: fx.Node, depth: int, within: int = 0) -> Iterator[str]:
    """Yields the names assigned by lines that called the function in which the value was made, inner first.

    Of the lines that led to the value, the first ones up to `within` are left out.
    There are none where another line of that function, or of one in between, goes on with the value.
    """
    line, calls = line_at(node, depth), module_calls(node)[:depth]
    if line is None or returns_a_list(line.code) or appended_list(line.code) is not None:
        return
    readers = [line_at(u, depth) for u in node.users if module_calls(u)[:depth] == calls]
    chains = [reader.chain for reader in readers if reader is not None]
    for place in reversed(range(within, len(line.outer))):
        names = line.outer[place].assigned
        goes_on = any(chain[: place + 1] == line.outer[: place + 1] for chain in chains)
        if goes_on or len(names) > 1 or names == ("_",):
            return
        yield from names


def list_returned(line: Line) -> str | None:
    """Returns the `ly` of `ly = self.embedded(x)`, if that returns a list: `[f(x) for f in self.layers]`."""
    if not line.outer or not returns_a_list(line.code):
        return None
    names = line.outer[-1].assigned
    return names[0] if len(names) == 1 and names[0] != "_" else None


def name_within(tree: StageTree, node: fx.Node, depth: int, end: int | None = None) -> str | None:
    """Returns the author's name for a value in the outermost body at this depth or below that has one.

    With `end`, bodies from that depth on are left out.
    """
    for inner in range(depth, len(module_calls(node)) + 1 if end is None else end):
        if left_otherwise(tree, node, inner):
            continue
        line = line_at(node, inner)
        names = line.assigned if line is not None else ()
        if line is not None and names and is_one_of_several(node, line, inner):
            continue
        if line is not None and len(names) > 1:
            name = _name_in_order(node, line, inner) or _name_by_place(node, line, inner)
            if name is not None:
                return name
        if len(names) == 1 and names[0] != "_" and is_final(node, inner):
            return names[0]
        if not names and (name := name_of_filled(node, line) or outer_name(node, inner)) is not None:
            return name
    return None


def _name_by_place(node: fx.Node, line: Line | None, depth: int) -> str | None:
    """Returns the `s` of `x, s = self.layer(x)` for the second value that the layer returns."""
    calls = module_calls(node)
    if line is None or depth >= len(calls) or not calls_one(line.code, calls[depth][1]):
        return None
    key, path, kind = calls[depth]
    place = Scope(path, kind, key, depth).result(node).place
    name = line.assigned[int(place)] if place < len(line.assigned) else "_"
    return name if name != "_" else None


def _name_in_order(node: fx.Node, line: Line, depth: int) -> str | None:
    """Returns the `k` of `q, k = map(cut, (q, k))` for the second value that the statement is for."""
    if not makes_one_by_one(line.code):
        return None
    before = [*_run_by(node, line, depth, "prev")]
    made = [*before[::-1], node, *_run_by(node, line, depth, "next")]
    final = [each for each in made if is_final(each, depth)]
    names = names_of_what_it_makes(line.code, line.assigned)
    name = names[final.index(node)] if node in final and len(final) == len(names) else "_"
    return name if name != "_" else None


def _run_by(node: fx.Node, line: Line, depth: int, way: str) -> Iterator[fx.Node]:
    """Yields the operators before or after a node that the same run of a statement makes."""
    other, calls = getattr(node, way), module_calls(node)[:depth]
    while other.op in {"call_function", "get_attr"}:
        if other.op == "call_function":
            if module_calls(other)[:depth] != calls or line_at(other, depth) != line:
                return
            yield other
        other = getattr(other, way)


def depth_within(tree: StageTree, node: fx.Node) -> int:
    """Returns the depth of the outermost body that has a value itself, not as a part of an inner call."""
    depths = enumerate(module_calls(node), 1)
    return max((depth for depth, (key, *_) in depths if tree.returns_others(node, key)), default=0)


def left_otherwise(tree: StageTree, node: fx.Node, depth: int) -> bool:
    """Whether `x = self.block(x)` gives x another value, and a hook took this one out of the block."""
    calls = module_calls(node)
    return depth < len(calls) and tree.leaves_otherwise(node, calls[depth][0])


def is_one_of_several(node: fx.Node, line: Line, depth: int) -> bool:
    """Whether `rope = self.rotary(x)` is a tuple, and this value is one of its elements."""
    calls = module_calls(node)
    if depth >= len(calls) or len(line.assigned) != 1 or not calls_one(line.code, calls[depth][1]):
        return False
    key, path, kind = calls[depth]
    return Scope(path, kind, key, depth).result(node).number > 1


def state_name(tree: StageTree, node: fx.Node) -> str | None:
    """Returns the author's name for a recurrent layer's output or last states, else what they are."""
    calls = module_calls(node)
    layer = tree.modules.get(calls[-1][1]) if calls else None
    if not isinstance(layer, LAYERS_GIVING_TUPLES) or not _is_operator(node, "getitem"):
        return None
    place = int(str(node.args[1]))
    line = line_at(node, len(calls) - 1)
    names = state_names(line.code) if line is not None and calls_one(line.code, calls[-1][1]) else ()
    own = ("hidden", "cell") if isinstance(layer, nn.LSTMCell) else ("output", "hidden", "cell")
    number = 3 if isinstance(layer, nn.LSTM) else 2
    if len(names) == 2 and number == 3:
        names = names[:1]  # `out, state = self.lstm(x)` has one name for both states
    name = names[place] if place < len(names) <= number else "_"
    return name if name != "_" else own[place]


def name_where_made(tree: StageTree, node: fx.Node, depth: int) -> str | None:
    """Returns the author's name for a value in a body at this depth or below."""
    state = state_name(tree, node)
    callers = None if state is None else name_within(tree, node, depth, len(module_calls(node)) - 1)
    named = callers or state or name_within(tree, node, depth)
    if named is not None or not _is_operator(node, "getitem"):
        return named
    line = line_at(node, len(module_calls(node)))  # its own line: further out, other things are taken apart
    names = line.assigned if line is not None else ()
    place: Any = node.args[1]
    is_one = isinstance(place, int) and place < len(names) > 1 and names[place] != "_"
    return names[place] if is_one else None


def is_link(node: fx.Node) -> bool:
    """Whether one member of an nn.Sequential returns this value, and the next one takes it."""
    returned = node.meta.get(RETURNED_AT, {})
    lines = [line_at(node, depth) for depth, (key, *_) in enumerate(module_calls(node)) if key in returned]
    return any(line is not None and line.is_of_a_sequential for line in lines)


def result_name(item: fx.Node | Scope, result: fx.Node) -> str:
    if isinstance(item, Scope) and item.call is None:
        last = item.path.rpartition(".")[2]
        return identifier(last if not last.isdigit() else _in_lower_case(item.type_name))
    if result.op == "get_attr":
        name = str(result.target).rpartition(".")[2]
        return identifier(_OF_THE_TRACE.sub("constant", name))
    custom = custom_function(result.target)
    if custom is not None:
        return identifier(custom.name.lower())
    if getattr(result.target, "namespace", None) == UNTRACED:
        part = re.sub(r"_\d+$", "", operator_name(result))  # the number counts parts of the whole process
        return identifier(part.lower()) if "training" in result.kwargs else "loss"
    special = _part_in_an_operator(result) or place_in_mask(result)
    if special is not None:
        return special
    if _compares_places(result):
        return "causal"
    if normalization(result) is not None:
        return "normed"
    name = operator_name(result)
    return identifier(_part_of_a_buffer(result) or _RESULT_NAMES.get(name, name))


def _part_of_a_buffer(node: fx.Node) -> str | None:
    """Returns the "cos" of `self.cos[:, :length]`, the part of a table."""
    while operator_name(node) in {"slice", "unsqueeze"} and isinstance(node.args[0], fx.Node):
        node = node.args[0]
        if node.op == "get_attr":
            name = str(node.target).rpartition(".")[2]
            return None if _OF_THE_TRACE.fullmatch(name) else name
    return None


def _in_lower_case(kind: str) -> str:
    """Returns a class's name as that of a value: "double_conv" for DoubleConv, "lstm_cell" for LSTMCell."""
    return re.sub(r"(?<=[a-z\d])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", kind).lower()


def element_name(item: fx.Node | Scope, place: int) -> str:
    """Returns the name that an operator's schema gives to an element of its result, else an ordinal."""
    schema = getattr(item.target, "_schema", None) if isinstance(item, fx.Node) else None
    returned = schema.returns if schema is not None else ()
    own = returned[place].name if place < len(returned) else ""
    if own:
        return identifier(own)
    if isinstance(item, fx.Node) and "max_pool" in operator_name(item):
        return ("pooled", "indices")[place]
    return _ORDINALS[place] if place < len(_ORDINALS) else f"part_{place + 1}"


_ORDINALS = ("first", "second", "third", "fourth")


def operator_name(node: fx.Node) -> str:
    return getattr(node.target, "__name__", str(node.target)).split(".")[0]
