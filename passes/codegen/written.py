"""A forward as it is written: its arguments, and the lines of its body."""

from __future__ import annotations

from dataclasses import dataclass

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


def reference(path: str) -> str:
    """Marks a module or parameter by its path from `self`; it is spelled once the attribute tree is known."""
    return f"\ue000{path}\ue001"
