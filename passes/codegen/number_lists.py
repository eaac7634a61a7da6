"""Numbers that are read out of a tensor all at once, which a trace has one by one.

counts = counts.tolist()            first, second, third = counts.unbind()
total = sum(counts)                 a, b, c = first.item(), second.item(), third.item()
rows = x[:total].split(counts)      total = a + b + c ..
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence

import torch
from torch import fx

from .scopes import Scope

_ITEMS = (torch.ops.aten.item.default, torch.ops.aten._local_scalar_dense.default)


def number_lists(items: Sequence[fx.Node | Scope]) -> dict[fx.Node, list[fx.Node]]:
    """Returns the numbers of each list by the unbind that makes it: every part is only read as a number."""
    found: dict[fx.Node, list[fx.Node]] = {}
    here = {item for item in items if isinstance(item, fx.Node)}
    for node in items:
        if isinstance(node, Scope) or node.target is not torch.ops.aten.unbind.int:
            continue
        if node.args[1:] in ((), (0,)) and not node.kwargs:
            numbers = _numbers_of(node, here)
            if len(numbers) == len(node.meta["val"]) > 1:
                found[node] = [numbers[place] for place in sorted(numbers)]
    return found


def _numbers_of(parts: fx.Node, here: set[fx.Node]) -> dict[int, fx.Node]:
    found: dict[int, fx.Node] = {}
    for part in parts.users:
        readers = list(part.users)
        is_read_once = len(readers) == 1 and readers[0].target in _ITEMS
        if part.target is not operator.getitem or part not in here or not is_read_once:
            return {}
        if readers[0] in here:
            found[int(str(part.args[1]))] = readers[0]
    return found


def sums_of(
    lists: Mapping[fx.Node, Sequence[fx.Node]], items: Sequence[fx.Node | Scope]
) -> dict[fx.Node, list[fx.Node]]:
    """Returns the additions of each sum of a whole list, by the last of them.

    A tracer sorts the whole numbers of a sum by their symbols; numbers of floats stay in their order.
    """
    here = {item for item in items if isinstance(item, fx.Node)}
    found: dict[fx.Node, list[fx.Node]] = {}
    for numbers in lists.values():
        for first in dict.fromkeys(user for number in numbers for user in number.users):
            additions = _additions(first, numbers)
            if additions and here.issuperset(additions):
                found[additions[-1]] = additions
    return found


def _additions(first: fx.Node, numbers: Sequence[fx.Node]) -> list[fx.Node]:
    """Returns the additions of all numbers, from this one on, if that is what they are."""
    if first.target is not operator.add or first.args[0] not in numbers:
        return []
    additions, added = [first], [first.args[0]]
    while additions[-1].target is operator.add:
        total, number = additions[-1].args
        if total not in (added[0], *additions[-2:-1]):
            return []
        added.append(number)
        if len(added) == len(numbers):
            return additions if _are_all(added, numbers) else []
        if len(additions[-1].users) != 1:
            return []
        additions.append(next(iter(additions[-1].users)))
    return []


def _are_all(added: Sequence[object], numbers: Sequence[fx.Node]) -> bool:
    if all(isinstance(number.meta["val"], int | torch.SymInt) for number in numbers):
        return set(added) == set(numbers)
    return added == numbers
