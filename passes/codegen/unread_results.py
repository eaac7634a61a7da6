"""Results of a call that nobody reads, where other calls of its kind return them to a reader."""

from __future__ import annotations

import math
from collections import defaultdict
from operator import getitem
from typing import TYPE_CHECKING

from torch import fx

from pd2bw_fx.graph import RETURNED_AT, RETURNED_INSIDE

from .cut import is_size
from .scopes import Scope, module_calls, walk

if TYPE_CHECKING:
    from .stage_tree import StageTree

LAYERS_OF_TORCH = "torch.nn.modules."


def returned_unread(tree: StageTree) -> dict[fx.Node, int]:
    """Maps each such value to the depth of the outermost call that returns it, as its author has it.

    So `out, state = self.step(x, state)` of a last round, whose state nobody needs, is the line of all
    rounds, and `y, _ = self.attention(x)` is a call of the class whose weights another call reads. Elements
    of tuples that the program has left out are put back into their calls.
    """
    calls: dict[str, list[Scope]] = defaultdict(list)
    for scope in walk(tree.root):
        if scope.path and scope.function is None and not scope.kind.startswith(LAYERS_OF_TORCH):
            calls[scope.kind].append(scope)
    found: dict[fx.Node, int] = {}
    for alike in (group for scopes in calls.values() for group in _alike(tree, scopes)):
        read = {place: (scope, node) for scope in alike for place, node in _read_at(tree, scope).items()}
        for scope in alike:
            left = sorted(read.keys() - _read_at(tree, scope).keys())
            unread = [_returned_at(tree, scope, place) or _element(scope, *read[place]) for place in left]
            if None in unread:
                continue
            for node in filter(None, unread):
                found[node] = min(scope.depth, found.get(node, scope.depth))
                _put_in(scope, node)
    return found


def operators_of(tree: StageTree, scope: Scope) -> tuple[str, ...]:
    """Lists what a call computes, without regard to the values it computes on and to the elements taken."""

    def number(operand: fx.Node) -> str | None:
        return str(tree.numbers[str(operand.target)]) if tree.makes(scope, operand) else None

    return tuple(
        f"{node.target}{fx.map_arg((node.args, dict(node.kwargs)), number)}" for node in _operators(scope)
    )


def _operators(scope: Scope) -> list[fx.Node]:
    return [node for node in scope.nodes if node.op != "get_attr" and node.target is not getitem]


def _alike(tree: StageTree, scopes: list[Scope]) -> list[list[Scope]]:
    """Groups the calls that compute the same, unless all of them are read at the same places."""
    if len({frozenset(_read_at(tree, scope)) for scope in scopes}) == 1:
        return []
    found: dict[tuple[object, ...], list[Scope]] = defaultdict(list)
    for scope in scopes:
        found[len(tree.reads(scope)), *operators_of(tree, scope)].append(scope)
    return list(found.values())


def _read_at(tree: StageTree, scope: Scope) -> dict[float, fx.Node]:
    places = {_place(scope, node): node for node in tree.gives(scope)}
    places.pop(math.inf, None)  # it leaves the call in another way
    return places


def _place(scope: Scope, node: fx.Node) -> float:
    inside: float = node.meta.get(RETURNED_INSIDE, {}).get(scope.key, math.inf)
    return min(scope.result(node).place, inside)


def _returned_at(tree: StageTree, scope: Scope, place: float) -> fx.Node | None:
    values = (node for node in scope.nodes if _place(scope, node) == place)
    return next((node for node in values if not is_size(tree.graph, node)), None)


def _element(scope: Scope, other: Scope, node: fx.Node) -> fx.Node | None:
    """Makes, for this call, the element of a tuple that `node` is of the other call, which computes the same.

    The result is None where `node` is no such element, or this call's tuple does not match.
    """
    theirs = node.args[0] if node.target is getitem else None
    if not isinstance(theirs, fx.Node) or theirs not in (operators := _operators(other)):
        return None
    own, place = _operators(scope)[operators.index(theirs)], node.args[1]
    calls, their_calls = module_calls(own)[scope.depth - 1 :], module_calls(theirs)[other.depth - 1 :]
    is_taken = any(user.target is getitem and user.args[1] == place for user in own.users)
    if is_taken or len(calls) != len(their_calls) or _shapes(own) != _shapes(theirs):
        return None
    # It has the operator's name, and the program does not know of it.
    made = fx.Node(own.graph, own.name, "call_function", getitem, (own, place), {})
    del own.users[made]
    made.meta = own.meta | {"val": own.meta["val"][place]}
    keys = {there: here for (here, *_), (there, *_) in zip(calls, their_calls, strict=True)}
    for kind in (RETURNED_AT, RETURNED_INSIDE):
        made.meta[kind] = {keys[key]: at for key, at in node.meta.get(kind, {}).items() if key in keys}
    return made


def _shapes(operator: fx.Node) -> list[str]:
    return [str(getattr(value, "shape", None)) for value in operator.meta["val"]]


def _put_in(scope: Scope, node: fx.Node) -> None:
    """Puts a node behind the operator that it is an element of, unless it is in the call."""
    if any(node in inner.items for inner in walk(scope)):
        return
    source, place = node.args
    holder = next(inner for inner in walk(scope) if source in inner.items)
    before = [
        at for at, item in enumerate(holder.items) if item is source or _is_earlier(item, source, place)
    ]
    holder.items.insert(before[-1] + 1, node)


def _is_earlier(item: fx.Node | Scope, source: object, place: object) -> bool:
    if isinstance(item, Scope) or item.target is not getitem or item.args[0] is not source:
        return False
    return int(str(item.args[1])) < int(str(place))
