"""What builds a module or tensor, with its constants still open: `nn.Linear(in_features, out_features)`.

Where a class occurs with several sizes, the constants that differ become arguments of its constructor.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .literals import literal

NO_DEFAULT = inspect.Parameter.empty


@dataclass(frozen=True, slots=True)
class Leaf:
    """A constant, and the name that it has where it stands, if any."""

    name: str
    value: Any


@dataclass(frozen=True, slots=True)
class Fixed:
    """Source that stays as it is."""

    text: str


@dataclass(frozen=True, slots=True)
class ClassOf:
    """The generated class of the module at a path, with the arguments that this one needs."""

    path: str


@dataclass(frozen=True, slots=True)
class Part:
    """An argument. It is left out where it has its default, and written by name after one left out."""

    value: Template
    name: str = ""
    default: Any = NO_DEFAULT
    by_name: bool = False


@dataclass(frozen=True, slots=True)
class Call:
    function: str
    parts: tuple[Part, ...] = ()


Template = Leaf | Fixed | ClassOf | Call


def outline(template: Template, class_of: Mapping[str, int]) -> str:
    """Returns the template without its constants; it is equal for what one line with arguments can build."""
    match template:
        case Leaf():
            return "?"
        case Fixed(text):
            return text
        case ClassOf(path):
            return f"<{class_of[path]}>"
        case Call(function, parts):
            return f"{function}({', '.join(f'{p.name}={outline(p.value, class_of)}' for p in parts)})"


def leaves(template: Template, inner: Callable[[str], Sequence[Leaf]]) -> Iterator[Leaf]:
    """Yields the constants from left to right; `inner` gives all the constants that a class holds."""
    match template:
        case Leaf():
            yield template
        case ClassOf(path):
            yield from inner(path)
        case Call(_, parts):
            for part in parts:
                yield from leaves(part.value, inner)
        case Fixed():
            pass


def spelled(
    template: Template, words: Iterator[str | None], construct: Callable[[str, Iterator[str | None]], str]
) -> str:
    """Writes the source.

    `words` gives for each constant, from left to right, the argument that stands for it, or None. `construct`
    spells a class, and takes as many words as the class holds constants.
    """
    match template:
        case Leaf(_, value):
            return next(words) or literal(value)
        case Fixed(text):
            return text
        case ClassOf(path):
            return construct(path, words)
        case Call(function, parts):
            return f"{function}({', '.join(_arguments(parts, words, construct))})"


def _arguments(
    parts: Sequence[Part],
    words: Iterator[str | None],
    construct: Callable[[str, Iterator[str | None]], str],
) -> Iterator[str]:
    positional = True
    for part in parts:
        if isinstance(part.value, Leaf):
            value, word = part.value.value, next(words)
            if word is None and _is_default(value, part.default):
                positional = False
                continue
            positional = positional and not isinstance(value, bool)
            text = word or literal(value)
        else:
            text = spelled(part.value, words, construct)
        yield f"{part.name}={text}" if part.by_name or (part.name and not positional) else text


def _is_default(value: Any, default: Any) -> bool:
    return default is not NO_DEFAULT and type(value) is type(default) and bool(value == default)
