"""Numbers that change from round to round, expressed by the counter of a loop."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from .tokens import Token, text_of

TokenAt = tuple[int, int]  # a token of a round: its line in the round, and its place in the line

_OPERATORS = re.compile(r"[-+*/%@.]|\*\*|//")


@dataclass(frozen=True, slots=True)
class Counting:
    """How a loop counts: the values of its counter, and the tokens that stand for changing numbers.

    `values` are the counter's values round by round, as they are written. `tokens` has the token that
    replaces the changing number at each place.
    """

    values: tuple[str, ...]
    tokens: Mapping[TokenAt, Token]
    is_range: bool = True

    def header(self, name: str) -> str:
        return f"for {name} in {self.over()}:"

    def over(self) -> str:
        if not self.tokens:
            return f"range({len(self.values)})"
        if not self.is_range:
            return f"({', '.join(self.values)})"
        first, step = int(self.values[0]), int(self.values[1]) - int(self.values[0])
        stop = first + step * len(self.values)
        if step != 1:
            return f"range({first}, {stop}, {step})"
        return f"range({first}, {stop})" if first else f"range({stop})"


def counting(
    columns: Mapping[TokenAt, Sequence[str]], number: int, first: int | None = None
) -> Counting | None:
    """Finds a counter for `number` rounds that gives all of these numbers, or returns None.

    It begins with `first`, the author's first number, if any of these numbers does.
    """
    if not columns:
        return Counting(tuple(map(str, range(number))), {})
    if all(text.isdigit() for column in columns.values() for text in column):
        found = _steps({place: [int(text) for text in column] for place, column in columns.items()}, first)
        if found is not None:
            return found
    values, *others = {tuple(column) for column in columns.values()}
    if others:
        return None
    return Counting(values, {place: Token("count", "", 1) for place in columns}, is_range=False)


def _steps(columns: Mapping[TokenAt, Sequence[int]], first: int | None) -> Counting | None:
    """Expresses sequences of a constant step as multiples of the one with the smallest, plus an offset."""
    steps = {place: column[1] - column[0] for place, column in columns.items()}
    if any(b - a != steps[p] for p, c in columns.items() for a, b in itertools.pairwise(c)):
        return None
    least = min(columns, key=lambda place: (abs(steps[place]), columns[place][0] != first, columns[place][0]))
    if any(step % steps[least] for step in steps.values()):
        return None
    tokens = {}
    for place, column in columns.items():
        factor = steps[place] // steps[least]
        tokens[place] = Token("count", "", factor, column[0] - factor * columns[least][0])
    return Counting(tuple(map(str, columns[least])), tokens)


def spelled(tokens: Sequence[Token], name: str) -> str:
    """Writes the statement with the counter's name, spaced as the formatter does."""
    return "".join(_texts(tokens, name))


def _texts(tokens: Sequence[Token], name: str) -> Iterator[str]:
    for at, token in enumerate(tokens):
        if token.kind != "count":
            is_between = token.text == ":" and _is_slice(tokens, at)
            yield f"{_space(tokens, at, -1)}:{_space(tokens, at, 1)}" if is_between else token.text
            continue
        beside = text_of(tokens[max(at - 1, 0) : at]), text_of(tokens[at + 1 : at + 2])
        is_operand = any(_OPERATORS.fullmatch(text) for text in beside) or " " in beside
        text = _of_counter(token, name)
        yield f"({text})" if is_operand and not token.is_counter and not _is_item(tokens, at) else text


def _of_counter(token: Token, name: str) -> str:
    """Writes what a token counts: `t`, `t + 1`, `5 - t`, `2 * t + 1`."""
    if token.factor == -1:
        return f"{token.offset} - {name}"
    product = name if token.factor == 1 else f"{token.factor} * {name}"
    if token.offset == 0:
        return product
    return f"{product} {'+' if token.offset > 0 else '-'} {abs(token.offset)}"


def _is_item(tokens: Sequence[Token], at: int) -> bool:
    """Whether a number stands alone between commas, colons or brackets, as in `(2, 3)`."""
    before, after = text_of(tokens[:at]).rstrip(), text_of(tokens[at + 1 :]).lstrip()
    return before[-1:] in {"(", "[", ",", ":", "="} and after[:1] in {")", "]", ",", ":"}


def _is_slice(tokens: Sequence[Token], colon: int) -> bool:
    """Whether the formatter puts spaces around a colon: it does beside more than a name or a number."""
    beside = [*tokens[max(colon - 1, 0) : colon], *tokens[colon + 1 : colon + 2]]
    return any(token.kind == "count" and not token.is_counter for token in beside)


def _space(tokens: Sequence[Token], colon: int, side: int) -> str:
    """Returns the space between a slice's colon and its bound; it is empty where there is no bound."""
    beside = text_of(tokens[colon + 1 : colon + 2] if side > 0 else tokens[max(colon - 1, 0) : colon])
    found = tokens[colon + side] if 0 <= colon + side < len(tokens) else None
    if found is not None and found.kind == "count":
        return " "
    return "" if beside in {"", "[", "]", " ", ","} else " "
