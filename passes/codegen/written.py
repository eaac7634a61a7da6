"""A forward as it is written: its arguments, and the lines of its body."""

from __future__ import annotations

from dataclasses import dataclass, replace

from .body import NO_REGION, Region
from .loops.author_loops import NO_COUNTER, NO_ROUND, Counter, Round

LONGEST_FOLDED = 88  # characters of a line that still reads well with its parts folded in


@dataclass(frozen=True, slots=True)
class Statement:
    """A line of a body; `text` has module references in their unresolved form (see `reference`).

    `place` is the author's line, and `shape` the result's shape where it differs from the operand's. `named`
    is the author's name for the result, `counter` the counter of the author's loop around the line, and
    `listed` the list that the line fills or joins. `round` is the line's place in that loop. `is_pure` says
    whether running the line once more would do no harm.
    """

    text: str
    place: str = ""
    shape: tuple[int | str, ...] = ()
    region: Region = NO_REGION
    named: str = ""
    counter: Counter = NO_COUNTER
    listed: str = ""
    together: tuple[str, ...] = ()
    round: Round = NO_ROUND
    is_pure: bool = False

    @property
    def comment(self) -> str:
        shape = f"({', '.join(str(size) for size in self.shape)})" if self.shape else ""
        return f"{self.place} {shape}".strip()


@dataclass(frozen=True, slots=True)
class Method:
    """A written forward: its arguments in call order, and its body.

    `passed_through` is the argument that it returns in evaluation, without doing anything else.
    """

    arguments: tuple[str, ...]
    annotations: tuple[str, ...]
    body: tuple[Statement, ...]
    passed_through: str | None = None

    def common_with(self, other: Method) -> Method | None:
        """Returns the method that both are, but for the sizes in comments: `?` stands where these differ.

        Returns None for methods that do not do the same.
        """
        if replace(self, body=_without_shapes(self)) != replace(other, body=_without_shapes(other)):
            return None
        shapes = (_common_shape(a.shape, b.shape) for a, b in zip(self.body, other.body, strict=True))
        return replace(self, body=tuple(map(_with_shape, self.body, shapes)))


def _without_shapes(method: Method) -> tuple[Statement, ...]:
    return tuple(_with_shape(statement, ()) for statement in method.body)


def _with_shape(statement: Statement, shape: tuple[int | str, ...]) -> Statement:
    return replace(statement, shape=shape)


def _common_shape(a: tuple[int | str, ...], b: tuple[int | str, ...]) -> tuple[int | str, ...]:
    if len(a) != len(b):
        return ()
    return tuple(size if size == other else "?" for size, other in zip(a, b, strict=True))


def reference(path: str) -> str:
    """Marks a module or parameter by its path from `self`; it is spelled once the attribute tree is known."""
    return f"\ue000{path}\ue001"
