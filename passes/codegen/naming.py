"""Names values as their author did where the trace knows it, else after what made them."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping, Sequence
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
from .scopes import AuthorCall, Line, Scope, line_at, module_calls, passed_to
from .stage_tree import StageTree
from .statements import appended_list, calls_one, filled_name, returns_a_list, state_names

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
_CASTS = {"float", "double", "half", "bfloat16", "type"}
# What they return keeps the name of their operand.
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
        if len(names) > 1 and (name := _name_by_place(node, line, inner)) is not None:
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


def argument_name(tree: StageTree, scope: Scope, node: fx.Node) -> str:
    """Returns what a body calls a value that it is given."""
    if scope.call is None:
        return _argument_name(tree, scope, node)
    parameter = _parameters_given(tree, scope, scope.call)[node]
    return _argument_name(tree, scope, node) if parameter is None else identifier(parameter)


def given_to(tree: StageTree, scope: Scope) -> list[fx.Node]:
    """Lists what a call is given, in the order of the author's parameters where all of them are known."""
    reads = tree.reads(scope)
    if scope.call is None:
        return reads
    given = _parameters_given(tree, scope, scope.call)
    place = {parameter: number for number, parameter in enumerate(scope.call.parameters)}
    if any(parameter not in place for parameter in given.values()):
        return reads
    return sorted(reads, key=lambda node: place[given[node] or ""])


def _parameters_given(tree: StageTree, scope: Scope, call: AuthorCall) -> dict[fx.Node, str | None]:
    """Maps what a function of the author's is given to its parameters, None where that cannot be told."""
    reads = tree.reads(scope)
    if len(reads) == 1:
        return {reads[0]: call.parameters[0]}
    found = {node: call.given_as.get(_argument_name(tree, scope, node)) for node in reads}
    for node in reads:
        parameter = call.given_as.get(passed_to(call.caller, node).name)
        if found[node] is None and parameter not in found.values():
            found[node] = parameter
    unknown = sorted(node for node, parameter in found.items() if parameter is None)
    if len(unknown) == len(call.unnamed) == 1:
        ((_, found[unknown[0]]),) = call.unnamed
    elif len(unknown) == len(left := set(call.given_as.values()).difference(found.values())) == 1:
        (found[unknown[0]],) = left
    functions = {node: _function_called(scope, call.line, node) for node in unknown}
    return found | matched_with_arguments(unknown, call.unnamed, functions)


def _function_called(scope: Scope, line: Line, node: fx.Node) -> str:
    """Returns the function that this line calls to make a value, "" if the value is not from there."""
    own = line_at(node, scope.depth)
    chain, outer = () if own is None else own.chain, len(line.chain)
    return chain[outer].function if len(chain) > outer and chain[:outer] == line.chain else ""


def _argument_name(tree: StageTree, scope: Scope, node: fx.Node) -> str:
    if node.op == "placeholder" and not scope.path:
        return identifier(node.name)
    if own := scope.argument(node).name:
        return identifier(own)
    inside = any((key, path) == (scope.key, scope.path) for key, path, _ in module_calls(node))
    if not inside and scope.path and scope.function is None and len(tree.reads(scope)) == 1:
        first = next(iter(inspect.signature(tree.modules[scope.path].forward).parameters.values()), None)
        if first is not None and first.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD:
            return identifier(first.name)
    if node.op == "placeholder":
        return identifier(node.name)
    depth = scope.depth if inside or scope.function is not None else max(scope.depth - 1, 0)
    if (named := name_where_made(tree, node, depth)) is not None:
        return named
    if _is_link(node):
        return "hidden"
    source = hands_on(node)
    return result_name(node, node) if source is None else _argument_name(tree, scope, source)


def matched_with_arguments(
    nodes: Sequence[fx.Node], made: Sequence[tuple[str, str]], functions: Mapping[fx.Node, str] | None = None
) -> dict[fx.Node, str]:
    """Matches operators with a call's arguments that make them; both are in the order in which they run.

    Of an argument there are the method that its expression calls last, and the parameter that it is given as.
    `functions` are those of the author's that make the operators, if any do.
    """
    found: dict[fx.Node, str] = {}
    at = 0
    for node in nodes:
        own = (functions or {}).get(node) or operator_name(node)
        later = (place for place in range(at, len(made)) if _is_called(made[place][0], own))
        place = next(later, None)
        if place is None:
            return {}
        found[node], at = identifier(made[place][1]), place + 1
    return found


def _is_called(method: str, operator: str) -> bool:
    return method == operator or (operator == "to" and method in _CASTS)


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


def _is_link(node: fx.Node) -> bool:
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
        return identifier(re.sub(r"^constant_\d+$", "constant", name))
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
    return identifier(_RESULT_NAMES.get(name, name))


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
