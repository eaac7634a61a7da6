"""Sizes in a method's body: read off a tensor that is at hand, or by a name where they are read often.

query = query.view(query.shape[0], 9, 4, 8)           batch = hidden.shape[0]
key = key.view(key.shape[0], 9, 4, 8)           ->    query = query.view(batch, 9, 4, 8)
value = value.view(value.shape[0], 9, 4, 8)           key = key.view(batch, 9, 4, 8)
                                                      value = value.view(batch, 9, 4, 8)

The name is that in the shapes of comments and of the stage's head.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence, Set

from torch import fx

from .body import Body
from .cut import divisors, times_size
from .expression import TIMES, Source
from .folding import Folding
from .literals import identifier
from .local_names import LocalNames

_OFTEN = 3  # a size that is written so often gets a name
_OF_A_TRACER = re.compile(r"\b[su]\d+\b")  # a tracer's own word for a size says nothing


def said_of(size: int | str) -> int | str:
    """Returns a size as comments have it: "?" for one that depends on values."""
    return "?" if isinstance(size, str) and _OF_A_TRACER.search(size) else size


class Sizes:
    """Spells the sizes of one draft of a body, and counts how often each is read off a tensor.

    `lost` has the tensors whose sizes are read where their names may stand for something else already.
    """

    def __init__(self, body: Body, folding: Folding, names: LocalNames) -> None:
        self._body = body
        self._folding = folding
        self._names = names
        self._read: list[tuple[str, int]] = []  # a size, and the place of the statement that reads it
        self.lost: set[tuple[fx.Node, int]] = set()

    def spelled(self, symbol: int | str, place: int) -> Source:
        """Spells a size for the item at this place."""
        if isinstance(symbol, int):
            return Source(str(symbol))
        if symbol in self._body.symbols or symbol in self._names.sizes:
            return Source(identifier(symbol))
        bearers = [node for node in self._names.bound if symbol in self._body.tree.shape(node)]
        if not bearers and (product := times_size(symbol)) is not None:
            number, size = product
            return Source(f"{number} * {self.spelled(size, place).text}", TIMES)
        emitted = self._folding.emitted_at(place)
        standing = [node for node in bearers if self._folding.last_use(node) >= emitted]
        if not standing:  # its name may be reused by then: write again, with the tensor kept
            standing = [node for node in bearers if node in self._body.reads]
            assert standing, f"no tensor of {self._body.scope.path!r} has the size {symbol}"
            self.lost.add((standing[0], place))
        item = self._body.items[place] if place < self._folding.end else None
        own = (
            [node for node in self._folding.operands_of(item) if node in standing] if item is not None else []
        )
        self._read.append((symbol, emitted))
        return Source(self._read_off((own or standing)[0], symbol))

    def multiple(self, number: int, symbol: str, place: int) -> Source | None:
        """Spells `number * symbol` where no tensor that the body is given has the size itself, else None.

        It is read off a tensor that has it, or is so many times the size of flattened samples.
        """
        given = [size for node in self._body.reads for size in self._body.tree.shape(node)]
        multiples = divisors(number, symbol, given)
        if symbol in self._body.symbols or symbol in given or not multiples:
            return None
        exact, emitted = f"{number}*{symbol}", self._folding.emitted_at(place)
        for node in self._names.bound:
            if exact in self._body.tree.shape(node) and self._folding.last_use(node) >= emitted:
                return Source(self._read_off(node, exact))
        times, size = min(multiples)
        found = self.spelled(size, place)
        return found if times == 1 else Source(f"{times} * {found.text}", TIMES)

    def definitions(self) -> Sequence[str]:
        """Returns the statements that give sizes their names: `batch = x.shape[0]`."""
        bearers = {size: self._bearer(size) for size in sorted(self._names.sizes)}
        return [
            f"{size} = {self._read_off(node, size)}" for size, node in bearers.items() if node is not None
        ]

    def read_often(self, texts: Mapping[int, str]) -> Set[str]:
        """Returns the sizes that deserve a name, given the statements by place.

        Statements that differ in numbers alone may be rounds of a loop, so they count once.
        """
        rounds: dict[str, int] = {}
        for place, text in texts.items():
            rounds.setdefault(re.sub(r"_?\d+", "", text), place)
        counted = Counter(size for size, place in self._read if place in rounds.values())
        return {size for size, times in counted.items() if times >= _OFTEN and self._may_be_named(size)}

    def _may_be_named(self, size: str) -> bool:
        is_word = size.isidentifier() and _OF_A_TRACER.fullmatch(size) is None
        return is_word and not self._names.has_given(size) and self._bearer(size) is not None

    def _bearer(self, size: str) -> fx.Node | None:
        return next((node for node in self._body.reads if size in self._body.tree.shape(node)), None)

    def _read_off(self, node: fx.Node, size: str) -> str:
        return f"{self._names.bound[node]}.shape[{self._body.tree.shape(node).index(size)}]"
