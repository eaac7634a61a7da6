"""The names of one body's values, and how long each name stands for which value."""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set

from torch import fx

from .argument_names import argument_name
from .body import Body
from .cut import is_number
from .folding import Folding
from .naming import hands_on, name_within, outer_names, result_name, state_name
from .put_away import name_in_list
from .scopes import Scope
from .second_names import SecondName, second_name
from .statements import calls_one


class LocalNames:
    """Names the values of one body in program order; `bound` has the name of each value so far.

    `sizes` are sizes that have a name, which no value may have.
    """

    def __init__(self, body: Body, folding: Folding, sizes: Set[str]) -> None:
        self._body = body
        self._folding = folding
        self.sizes = sizes
        self.bound: dict[fx.Node, str] = {}
        helpers = (body.tree.helper_names.get(id(item)) for item in body.items)
        self._called = {*body.tree.function_names, *filter(None, helpers)}
        self._bearers: dict[str, list[fx.Node]] = {}  # name -> the values that have had it

    def bind(self, node: fx.Node, name: str) -> None:
        """Gives a node a name from here on; a name that the node had before is free again.

        An entry of a list, `parts[0]`, bears the list's name.
        """
        if node in self.bound:
            self._bearers[_variable(self.bound[node])].remove(node)
        self.bound[node] = name
        self._bearers.setdefault(_variable(name), []).append(node)

    def has_given(self, name: str) -> bool:
        """Whether some value has or had this name, or a function that the body calls."""
        return name in self._bearers or name in self._called

    def _names_of_others_given(self, result: fx.Node) -> set[str]:
        names = self._body.tree.port_names
        return {
            names[other.name] for other in self._body.gives if other is not result and other.name in names
        }

    def port_name(self, node: fx.Node) -> str | None:
        """Returns the name of a value that crosses between stages; None except in a stage's own forward."""
        tree = self._body.tree
        return tree.port_names.get(node.name) if self._body.scope is tree.root else None

    def of_argument(self, node: fx.Node) -> str:
        return self.free(self.port_name(node) or self._argument_name(node), -1)

    def _argument_name(self, node: fx.Node) -> str:
        """Returns what the author calls it; of two values with one name, what the stages call it."""
        tree, scope = self._body.tree, self._body.scope
        own = argument_name(tree, scope, node)
        if node.name not in tree.port_names:
            return own
        others = (other for other in self._body.reads if other is not node)
        is_one_of_two = any(argument_name(tree, scope, other) == own for other in others)
        return tree.port_names[node.name] if is_one_of_two else own

    def of_result(self, index: int, item: fx.Node | Scope, result: fx.Node) -> str:
        """Returns a name that is free at the item's place: the author's, if that is free."""
        if isinstance(item, Scope) and item.function is not None and item.call is None:
            own = item.function  # unless it makes other things too
            if len(self._body.results(item)) > 1:
                own = name_within(self._body.tree, result, item.depth) or result_name(result, result)
            return self.free(own, index)
        if isinstance(item, Scope) and result not in self._folding.users:
            return self._unread_name(index, item, result)
        port = self.port_name(result)
        if self._body.tree.is_link(self._body.scope, result):
            own = self._link_name(index, item)
            if port is not None and own in self._names_of_others_given(result):
                own = port
            return self.free(own, index)
        state = state_name(self._body.tree, result) if self._body.is_recurrent(item) else None
        if state is not None:
            return self.free(state, index)
        wanted = None if result.name in self._body.tree.stage.model_outputs else port
        wanted = wanted or self._body.author_name(item, result) or self._inner_name(item, result)
        if port is not None and wanted in self._names_of_others_given(result):
            wanted = port
        if wanted is None and self._body.gives == [result] and self._body.scope.call is None:
            wanted = self._body.scope.function  # the result of a helper function
        wanted = wanted or self._handed_on_name(item)
        if wanted is None and port is not None and not port.startswith("output"):
            wanted = port
        further = (
            None if wanted is None or wanted == port else self._further_name(index, item, result, wanted)
        )
        if further is not None:
            return self.free(further, index)
        if wanted is not None and not self.is_live(wanted, index) and not self._was_a_tensor(wanted, result):
            return wanted
        if wanted is None and self._folding.begins_a_chain(result):
            return self.free(self._link_name(index, item), index)
        if wanted is not None and self._is_one_of_several(item, wanted):
            return self.free(wanted, index)
        results = self._body.results(item)
        if len(results) == 1:
            named = self._body.passed_name(result)
            return self.free(named or result_name(item, result), index)
        given = self._names_given(item)
        others = {given.get(other) for other in results if other is not result}
        return self.free(given.get(result) or result_name(result, result), index, others)

    def _is_one_of_several(self, item: fx.Node | Scope, name: str) -> bool:
        """Whether the author's line takes apart what a call returns, and this is a name for a part of it."""
        line = self._body.line(item) if isinstance(item, Scope) else None
        return line is not None and name in line.assigned and len(line.assigned) > 1

    def _was_a_tensor(self, name: str, result: fx.Node) -> bool:
        """Whether the name of a tensor would stand for a number: `x.device` may still be read."""
        return is_number(result) and not all(map(is_number, self._bearers.get(name, ())))

    def _further_name(self, index: int, item: fx.Node | Scope, result: fx.Node, name: str) -> str | None:
        """Returns what else the author calls a value, where another one is called x while this is needed.

        That is the `skip` of `skips.append(x)`, or the `kept` of `kept = f(x)`, whose `return x` gives it.
        """
        line = self._body.line(item)
        if line is None or line.assigned != (name,):
            return None
        needed = range(index + 1, min(self._folding.last_use(result), self._folding.end))
        later = ((at, made) for at in needed for made in self._body.results(self._body.items[at]))
        if all(self._body.author_name(self._body.items[at], made) != name for at, made in later):
            return None
        if (listed := name_in_list(line, name)) is not None:
            return listed
        outer = outer_names(result, self._body.scope.depth)
        return next((other for other in outer if other != name and not self.is_live(other, index)), None)

    def of_inline(self, result: fx.Node) -> str:
        """Returns "cos" for what `cos.to(dtype)` makes in `return cos.to(dtype), sin.to(dtype)`."""
        item = self._body.items[self._folding.maker[result]]
        return self._handed_on_name(item) or result_name(item, result)

    def of_what_they_become(self, elements: Mapping[int, fx.Node | None]) -> dict[fx.Node, str]:
        """Returns the author's names for what each element alone is made into, if they all differ.

        For `q, k = (cut(t) for t in x.chunk(2))` these are "q" and "k".
        """
        wanted = [element for element in elements.values() if element is not None]
        names = [self._of_what_it_becomes(element) for element in wanted]
        if None in names or len(set(names)) < len(names):
            return {}
        return {element: name for element, name in zip(wanted, names, strict=True) if name is not None}

    def _of_what_it_becomes(self, node: fx.Node) -> str | None:
        while True:
            readers = self._folding.users.get(node, [])
            if len(readers) != 1 or readers[0] == self._folding.end:
                return None
            item = self._body.items[readers[0]]
            results = self._body.results(item)
            if len(results) != 1 or self._body.operands_of(item) != [node]:
                return None
            name = self._body.author_name(item, results[0])
            if name is not None or results[0] not in self._folding.folded:
                return name
            node = results[0]

    def _unread_name(self, index: int, item: Scope, result: fx.Node) -> str:
        """Returns the author's name for a result that nobody reads (nor, perhaps, the author), else "_"."""
        line = self._body.line(item)
        is_named = line is not None and len(line.assigned) > 1
        name = self._inner_name(item, result) if is_named else None
        return "_" if name is None or self.is_live(name, index) else name

    def _link_name(self, index: int, item: fx.Node | Scope) -> str:
        """Returns the x of `x = block(x)` in a chain if nothing reads the old x any more, else "hidden"."""
        before = [node for node in self._body.operands_of(item) if node in self.bound]
        is_over = len(before) == 1 and self._folding.last_use(before[0]) <= index
        return self.bound[before[0]] if is_over else "hidden"

    def _handed_on_name(self, item: fx.Node | Scope) -> str | None:
        source = hands_on(item)
        return None if source is None else self.bound.get(source)

    def _inner_name(self, item: fx.Node | Scope, result: fx.Node) -> str | None:
        """Returns the author's name for a result of a call: `hidden, balance = block(hidden)`.

        The names are found by place in what the block returns. Otherwise the block's own names for its
        results are taken, and the one that is left over by elimination.
        """
        if not isinstance(item, Scope) or item.is_of_a_map:
            return None
        line = self._body.line(item)
        targets = line.assigned if line is not None else ()
        if item.returns:
            return targets[item.returns.index(result)] if len(targets) == len(item.returns) else None
        if item.call is not None:  # the names of its line are for what is made of the result, if it has none
            return name_within(self._body.tree, result, item.depth)
        place = item.result(result).place
        if line is not None and calls_one(line.code, item.path) and place < len(targets) > 1:
            return targets[int(place)] if targets[int(place)] != "_" else None
        results = self._body.results(item)
        given = self._names_given(item) if len(results) > 1 else {}
        inner = {r: given.get(r) or name_within(self._body.tree, r, item.depth) for r in results}
        if len(targets) == len(results) and inner[result] not in targets:
            left = [name for name in targets if name not in inner.values()]
            unnamed = [r for r in results if inner[r] not in targets]
            if len(left) == 1 and unnamed == [result] and left[0] != "_":
                return left[0]
        return inner[result]

    def _names_given(self, item: fx.Node | Scope) -> dict[fx.Node, str]:
        """Returns the names of a call's results in its own forward, if that is written already."""
        return self._body.tree.names_given.get(id(item), {})

    def is_live(self, name: str, index: int) -> bool:
        """Whether the name stands for something that is still read after the statement at `index`."""
        if name in self._body.symbols or name in self._called or name in self.sizes:
            return True
        return any(self._folding.last_use(node) > index for node in self._bearers.get(name, ()))

    def free(self, name: str, index: int, others: Set[str | None] = frozenset()) -> str:
        """Returns the name, with a number if needed, that is not live at `index` nor among `others`.

        The number takes the place of what keeps `sum_` from being a builtin.
        """
        candidate, count = name, 1
        while (
            (index < 0 and candidate in self._bearers)
            or self.is_live(candidate, index)
            or candidate in others
        ):
            count += 1
            candidate = f"{name.removesuffix('_')}_{count}"
        return candidate

    def second_name(
        self, index: int, item: fx.Node | Scope, results: Sequence[fx.Node]
    ) -> tuple[fx.Node, SecondName] | None:
        """Finds the author's second name for the value whose name the item's result takes.

        Returns the value's node and its second name, if the value is read again after the item.
        """
        line = self._body.line(item)
        name = self._body.author_name(item, results[0]) if len(results) == 1 else None
        if line is None or name is None or self.port_name(results[0]) is not None:
            return None
        live = [node for node in self._bearers.get(name, ()) if self._folding.last_use(node) > index]
        if len(live) != 1 or self._folding.is_pending(index):
            return None
        maker = self._folding.maker.get(live[0])
        made = None if maker is None else self._body.line(self._body.items[maker])
        ran = self._body.lines_between(-1 if maker is None else maker, index)
        second = second_name(line, name, made, ran)
        if second is None or self.is_live(second.name, index - 1):  # the item itself may read its last value
            return None
        return live[0], second


def _variable(name: str) -> str:
    return name.partition("[")[0]
