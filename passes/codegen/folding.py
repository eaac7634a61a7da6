"""Which items of a method's body are written inside a longer expression."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator

from torch import fx

from .body import Body, is_second_name
from .calls import occurrences
from .limits import is_asked_for_a_limit
from .loops.author_loops import round_of
from .naming import operator_name, place_in_mask
from .put_away import name_in_list
from .scopes import Line, Scope
from .second_names import second_name
from .statements import appended_list, assigns_attributes, parsed_statement, returns_a_list, sums_over

_MOST_FOLDED = 40  # items in one statement; it is too long for a line long before that


class Folding:
    """Decides which results are written inside their only reader's expression.

    Results in `kept` are not. `size_readers` maps arguments to the places of the items that read their sizes.
    """

    def __init__(self, body: Body, kept: set[fx.Node], size_readers: dict[fx.Node, set[int]]) -> None:
        self.body = body
        self.items = body.items
        self.end = len(self.items)
        self.kept = kept
        self.results = [body.results(item) for item in self.items]
        self.ordered = [body.is_ordered(item) for item in self.items]
        self.maker = {result: index for index, made in enumerate(self.results) for result in made}
        self.users = self._users(size_readers)
        self.folded: set[fx.Node] = set()
        self._named: dict[str, list[fx.Node]] | None = None  # the author's name -> values, once it is asked
        self._fold()

    def is_folded(self, index: int) -> bool:
        """Whether the item at this place has no statement of its own."""
        results = self.results[index]
        return len(results) == 1 and results[0] in self.folded

    def emitted_at(self, index: int) -> int:
        """Returns the place where an item is really written: that of the statement that it is folded into."""
        while index < self.end and self.is_folded(index):
            index = self.users[self.results[index][0]][0]
        return index

    def is_pure(self, index: int) -> bool:
        """Whether the statement at this place is pure, with all that is folded into it."""
        inside = (at for at in range(min(index + 1, self.end)) if at == index or self.is_folded(at))
        return all(self.body.is_pure(self.items[at]) for at in inside if self.emitted_at(at) == index)

    def operands_of(self, item: fx.Node | Scope) -> list[fx.Node]:
        """Lists the tensors that an item's expression reads by name, with those of all folded into it."""
        found: list[fx.Node] = []
        for node in self.body.operands_of(item):
            if node in self.folded:
                found += self.operands_of(self.items[self.maker[node]])
            elif node.op != "get_attr":
                found.append(node)
        return found

    def is_pending(self, index: int) -> bool:
        """Whether an item before this place is written after it."""
        return any(self.emitted_at(at) > index for at in range(index) if self.is_folded(at))

    def last_use(self, node: fx.Node) -> int:
        return max((self.emitted_at(index) for index in self.users.get(node, [])), default=-1)

    def _users(self, size_readers: dict[fx.Node, set[int]]) -> dict[fx.Node, list[int]]:
        users: dict[fx.Node, list[int]] = {}
        for index, item in enumerate(self.items):
            for operand in self.body.operands_of(item):
                given = self.body.arguments_of(item) if isinstance(item, Scope) else item.args
                times = occurrences((given, {} if isinstance(item, Scope) else dict(item.kwargs)), operand)
                users.setdefault(operand, []).extend([index] * max(times, 1))
        for node in self.body.gives:
            users.setdefault(node, []).append(self.end)
        for node, readers in size_readers.items():
            users.setdefault(node, []).extend(readers)
        return users

    def _fold(self) -> None:
        """Chooses the results that are written in their reader's expression; the order of computation stays.

        Autograd adds up gradients in the reverse order of the computations, and random numbers are drawn in
        order. Another order would be correct, but not bit for bit the same.
        """
        sizes: Counter[int] = Counter()  # statement -> number of items folded into it
        for index in reversed(range(self.end)):
            results = self.results[index]
            # Values between the members of a chain keep their own lines, so that equal lines become a loop.
            if len(results) != 1 or self.body.tree.is_link(self.body.scope, results[0]):
                continue
            if self._may_fold(index, self.items[index], results[0]):
                statement = self.emitted_at(self.users[results[0]][0])
                if sizes[statement] == _MOST_FOLDED:
                    continue
                self.folded.add(results[0])
                if self._is_in_order(index):
                    sizes[statement] += 1
                else:
                    self.folded.remove(results[0])

    def _is_put_into_attributes(self, item: fx.Node | Scope) -> bool:
        """Whether the author writes `self.keys = f(x)`, which a stage only needs where it reads it again."""
        line = self.body.line(item)
        return line is not None and assigns_attributes(line.code)

    def _is_in_order(self, index: int) -> bool:
        """Whether the order of computation holds with the item at `index` folded, if it held before.

        Items evaluated before that item, or after the statement that it is now part of, keep their order.
        """
        statements = range(index, self.emitted_at(index) + 1)
        evaluated = [at for at in self._evaluated(statements) if self.ordered[at]]
        return evaluated == sorted(evaluated)

    def _evaluated(self, statements: range) -> Iterator[int]:
        """Yields the items of these statements as Python evaluates them; the place `end` is the return's."""
        for index in statements:
            if index == self.end:
                for node in self.body.gives:
                    if node in self.folded:
                        yield from self._evaluated_within(self.maker[node])
            elif not self.is_folded(index):
                yield from self._evaluated_within(index)

    def _evaluated_within(self, index: int) -> Iterator[int]:
        item = self.items[index]
        inner = [node for node in self.body.operands_of(item) if node in self.folded]
        if not isinstance(item, Scope) and operator_name(item) == "rsub":
            inner.reverse()  # written as other - self
        for node in inner:
            yield from self._evaluated_within(self.maker[node])
        yield index

    def _may_fold(self, index: int, item: fx.Node | Scope, result: fx.Node) -> bool:
        users = self.users.get(result, [])
        if len(users) != 1 or result in self.kept:
            return False
        if self._has_its_name(index, item, result) and not self._is_put_into_attributes(item):
            return False
        if self.body.elements(item) is not None:
            return False
        if self.body.is_element(item) or self.body.is_recurrent(item) or self.body.is_taken_apart(item):
            return False
        reader = users[0]
        if self.body.part_write(item) is not None or self._is_written_into(result, reader):
            return False
        if reader == self.end:
            if len(self.body.gives) > 1 and not is_second_name(item):
                return self._is_made_to_be_returned(item)
            return is_second_name(item) or index == self.end - 1
        if isinstance(item, Scope) and item.function is not None and item.call is None:
            return False
        reading = self.items[reader]
        if self._is_of_a_loop(item, reading) or self._is_of_a_sum(item, reading):
            return False
        if self.begins_a_chain(result):
            return False
        if not isinstance(reading, Scope) and is_asked_for_a_limit(result, reading):
            return False
        if self._is_place(item) and not self._is_place(reading):
            return False  # the rows and columns of a mask are worth a name
        return self.body.region(item) == self.body.region(reading)

    def _is_written_into(self, result: fx.Node, reader: int) -> bool:
        write = None if reader == self.end else self.body.part_write(self.items[reader])
        return write is not None and write.base is result

    def _has_its_name(self, index: int, item: fx.Node | Scope, result: fx.Node) -> bool:
        """Whether a line for the item would begin with the author's name for its result.

        In `loss = self.loss(logits, y)` with `logits = logits.float()`, it would not where the first logits
        are read later, as in `return loss, logits`.
        """
        name, line = self.body.author_name(item, result), self.body.line(item)
        if name is None or line is None or self.body.is_of_rounds(item):
            return name is not None
        reader = self.users[result][0]
        for made in self._bearers(name):
            at = self.maker.get(made, -1)
            if at < index and max(self.users.get(made, [-1])) > reader:
                made_at = None if at < 0 else self.body.line(self.items[at])
                is_put_away = made_at is not None and name_in_list(made_at, name) is not None
                ran = self.body.lines_between(at, index)
                return is_put_away or second_name(line, name, made_at, ran) is not None
        return True

    def _bearers(self, name: str) -> list[fx.Node]:
        """Lists the values to which the author gives this name in the body."""
        if self._named is None:
            self._named = {}
            for item, results in zip(self.items, self.results, strict=True):
                own = self.body.author_name(item, results[0]) if len(results) == 1 else None
                if own is not None:
                    self._named.setdefault(own, []).append(results[0])
        return self._named.get(name, [])

    def _is_made_to_be_returned(self, item: fx.Node | Scope) -> bool:
        """Whether an item is an operand of the author's `return f(x), g(x)`, in an inner module's forward."""
        line = self.body.line(item)
        is_of_a_call = isinstance(item, Scope) and item.function is not None
        return (
            line is not None
            and not line.outer
            and not is_of_a_call
            and self.body.scope is not self.body.tree.root
            and isinstance(parsed_statement(line.code), ast.Return)
            and self.body.region(item) == self.body.region(self.items[-1])
        )

    def _is_of_a_loop(self, item: fx.Node | Scope, reading: fx.Node | Scope) -> bool:
        """Whether folding the item would make the lines of a loop's rounds differ.

        It would for a value that each round puts into a list, and for one that goes into the first of several
        rounds.
        """
        line = self.body.line(item)
        if line is None or line == self.body.line(reading):
            return False
        if self.body.is_of_rounds(item) or (appended_list(line.code) and self.body.is_of_members(item)):
            is_put_away = appended_list(line.code) is not None or returns_a_list(line.code)
            return is_put_away or not self._are_of_one_loop(item, reading)
        if not self.body.is_of_rounds(reading):
            return False
        return isinstance(reading, Scope) or not self._are_of_one_loop(item, reading)

    def _are_of_one_loop(self, *items: fx.Node | Scope) -> bool:
        """Whether the author has these lines in the same loop, if in any."""
        lines = (self.body.line(item) for item in items)
        return len({"" if line is None else round_of(line).loop for line in lines}) == 1

    def _is_of_a_sum(self, item: fx.Node | Scope, reading: fx.Node | Scope) -> bool:
        """Whether both are additions of the author's `sum(f(x) for ..)`, each a round of what is a loop."""
        line = self.body.line(item)
        if line is None or line != self.body.line(reading) or not self.body.is_of_rounds(item):
            return False
        return sums_over(line.code) and all(
            isinstance(each, fx.Node)
            and operator_name(each) == "add"
            and any(self._is_of_line(operand, line) for operand in each.all_input_nodes)
            for each in (item, reading)
        )

    def _is_of_line(self, operand: fx.Node, line: Line) -> bool:
        at = self.maker.get(operand)
        if at is None or at == self.end:
            return False
        item = self.items[at]
        is_sum = isinstance(item, fx.Node) and operator_name(item) == "add"
        return not is_sum and self.body.line(item) == line

    def begins_a_chain(self, result: fx.Node) -> bool:
        """Whether the value goes into the first of several members of a taken-apart nn.Sequential."""
        return any(self._hands_on(at) and self._is_read_by_a_member(at) for at in self.users.get(result, []))

    def _is_read_by_a_member(self, index: int) -> bool:
        return any(self._hands_on(at) for made in self.results[index] for at in self.users.get(made, []))

    def _hands_on(self, index: int) -> bool:
        """Whether an item is a member of a taken-apart nn.Sequential, and hands on what it makes."""
        made = self.results[index] if index < self.end else ()
        return any(self.body.tree.is_link(self.body.scope, result) for result in made)

    def _is_place(self, item: fx.Node | Scope) -> bool:
        return not isinstance(item, Scope) and item.op == "call_function" and place_in_mask(item) is not None
