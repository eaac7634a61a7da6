"""Writes the drafts of classes; those that differ in constants alone become one class with arguments."""

from __future__ import annotations

import inspect
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from pd2bw_fx.names import free_name

from .attributes import Attributes
from .layout import laid_out, signature_lines, written
from .literals import STRING, identifier, is_plain_name, literal
from .loops.rolled_up import rolled_up
from .template import ClassOf, Leaf, Template, leaves, outline, spelled
from .written import Method, Statement

# A class with more arguments is harder to read than two classes.
_MOST_ARGUMENTS = 8
_MOST_POSITIONAL = 2
_PLAIN = "super().__init__()"
# A number in a body, but not in a module's path, a string, a name, the index of a shape or a permutation.
_TOKEN = re.compile(
    f"(?P<other>\ue000[^\ue001]*\ue001|{STRING}|\\.shape\\[\\d+\\]|\\.permute\\([-\\d, ]+\\)|[A-Za-z_]\\w*)"
    "|(?P<number>\\d+(?:\\.\\d+)?(?:e-?\\d+)?)"
)


@dataclass(frozen=True, slots=True)
class Draft:
    """The class of the module at `path`: what its __init__ builds, and its methods by name.

    `base` is the name that it should have. `endings` are the last lines of its __init__. Each method comes
    with the annotation of what it returns.
    """

    path: str
    base: str
    whole: bool
    origin: str
    attributes: Attributes
    methods: tuple[tuple[str, Method, str], ...]
    endings: tuple[str, ...] = ()


@dataclass(slots=True)
class ClassText:
    """A class without its docstring, which names all the modules that the class stands for."""

    name: str
    base: str
    lines: tuple[str, ...]
    paths: list[str]
    whole: bool
    origin: str


@dataclass(slots=True)
class _Family:
    """Drafts that are equal except for constants, with the constants of each in one common order.

    `arguments` maps each argument of the constructor to the first constant that it stands for. `words` has,
    for each constant, the argument that stands for it, if any.
    """

    number: int
    members: list[Draft] = field(default_factory=list)
    constants: list[tuple[Leaf, ...]] = field(default_factory=list)
    name: str = ""
    arguments: dict[str, int] = field(default_factory=dict)  # name -> column
    words: list[str | None] = field(default_factory=list)

    def values(self, column: int) -> list[Any]:
        return [constants[column].value for constants in self.constants]

    def columns(self) -> dict[tuple[str, ...], list[int]]:
        """Groups the constants that differ between members; those with the same values are together."""
        found: dict[tuple[str, ...], list[int]] = defaultdict(list)
        for column in range(len(self.constants[0])):
            texts = tuple(literal(value) for value in self.values(column))
            if len(set(texts)) > 1:
                found[texts].append(column)
        return found


def class_texts(
    drafts: Sequence[Draft], modules: Mapping[str, nn.Module], taken: Set[str]
) -> list[ClassText]:
    """Returns the classes in order of definition, each distinct one once, with names that are not `taken`.

    `drafts` have inner classes first.
    """
    apart: set[str] = set()  # outlines whose drafts differ in too many constants to be one class
    while True:
        families, family_of = _families(drafts, apart)
        crowded = {
            outline
            for outline, family in families.items()
            if len(family.columns()) > _MOST_ARGUMENTS and outline not in apart
        }
        if not crowded:
            break
        apart |= crowded
    writer = _Writer(list(families.values()), family_of, modules, taken)
    return [writer.text(family) for family in families.values()]


def _families(
    drafts: Sequence[Draft], apart: set[str]
) -> tuple[dict[str, _Family], dict[str, tuple[_Family, int]]]:
    """Returns the families by outline, and for each path its family and its place in it."""
    families: dict[str, _Family] = {}
    family_of: dict[str, tuple[_Family, int]] = {}
    for draft in drafts:
        numbers = {path: family.number for path, (family, _) in family_of.items()}
        constants = tuple(_constants(draft, family_of))
        text = _outline(draft, numbers)
        if text in apart:
            text += "".join(f"\n{literal(leaf.value)}" for leaf in constants)
        family = families.setdefault(text, _Family(len(families)))
        family_of[draft.path] = family, len(family.members)
        family.members.append(draft)
        family.constants.append(constants)
    return families, family_of


def _outline(draft: Draft, numbers: Mapping[str, int]) -> str:
    # The stage itself shares its class with no module.
    lines = [draft.base if draft.path else "", draft.attributes.base]
    lines.append(draft.attributes.given_to_base(lambda _, template: outline(template, numbers)))
    lines += draft.attributes.statements(lambda _, template: outline(template, numbers))
    lines += draft.endings
    for name, method, returned in draft.methods:
        lines.append(f"{name} {method.arguments} {method.annotations} {method.passed_through} {returned}")
        lines += [f"{_without_numbers(s.text)} {s.region}" for s in method.body]
    return "\n".join(lines)


def _constants(draft: Draft, family_of: Mapping[str, tuple[_Family, int]]) -> Iterator[Leaf]:
    """Yields all that may be an argument: first the constants of __init__, then those of the bodies."""

    def inner(path: str) -> tuple[Leaf, ...]:
        family, place = family_of[path]
        return family.constants[place]

    for _, template in draft.attributes.templates():
        yield from leaves(template, inner)
    for _, method, _ in draft.methods:
        for statement in method.body:
            yield from (Leaf("", value) for value in _numbers(statement.text))


def _numbers(text: str) -> list[int | float]:
    found = [match["number"] for match in _TOKEN.finditer(text) if match["number"] is not None]
    return [int(number) if number.isdigit() else float(number) for number in found]


def _without_numbers(text: str) -> str:
    return _TOKEN.sub(lambda match: match["other"] or "?", text)


class _Writer:
    """Names the arguments of every family, inner ones first, and writes their classes."""

    def __init__(
        self,
        families: Sequence[_Family],
        family_of: Mapping[str, tuple[_Family, int]],
        modules: Mapping[str, nn.Module],
        taken_already: Set[str],
    ) -> None:
        self.family_of = family_of
        self.modules = modules
        taken = {draft.base for family in families for draft in family.members if not draft.path}
        taken |= taken_already
        for family in families:
            family.name = free_name(family.members[0].base, taken if family.members[0].path else (), joint="")
            taken.add(family.name)
            self._name_arguments(family, taken)

    # Arguments.

    def _name_arguments(self, family: _Family, names_of_classes: Set[str]) -> None:
        """Names the arguments after an attribute of the model that has these values, or as the layers do."""
        hints = list(self._hints(family.members[0]))
        modules = [self.modules[draft.path] for draft in family.members]
        family.words = [None] * len(family.constants[0])
        taken = {*family.members[0].attributes.root.children, *dir(nn.Module), *names_of_classes}
        for columns in family.columns().values():
            attribute, hint = next((hints[c] for c in columns if c < len(hints) and hints[c][1]), ("", ""))
            values = family.values(columns[0])
            own = _own_name(modules, values, hint, taken)
            wanted = own or identifier(hint or _plain_name(values, taken), fallback="size")
            if wanted in taken and attribute:
                wanted = identifier(f"{attribute}_{hint}", fallback="size")
            name = free_name(wanted, taken)
            taken.add(name)
            family.arguments[name] = columns[0]
            for column in columns:
                family.words[column] = name

    def _hints(self, draft: Draft) -> Iterator[tuple[str, str]]:
        """Yields, for each constant of __init__, the attribute that it builds and the name it has there."""
        for path, template in draft.attributes.templates():
            name = path.rpartition(".")[2]
            name = name if is_plain_name(name) else ""
            yield from ((name, hint) for hint in self._called(template))

    def _called(self, template: Template) -> Iterator[str]:
        if isinstance(template, ClassOf):
            yield from (word or "" for word in self.family_of[template.path][0].words)
        elif isinstance(template, Leaf):
            yield template.name
        else:
            for part in getattr(template, "parts", ()):
                yield from self._called(part.value)

    # Lines.

    def text(self, family: _Family) -> ClassText:
        first = family.members[0]
        lines: list[str] = []
        statements = [*self._init(family), *first.endings]
        if statements != [_PLAIN]:
            signature = ["self", *self._annotated(family)]
            lines += signature_lines("__init__", signature, "None", 4)
            for statement in statements:
                lines += laid_out(statement, 8)
        words = iter(family.words[len(list(self._hints(first))) :])
        for place, (name, method, returned) in enumerate(first.methods):
            if lines:
                lines.append("")
            arguments = [f"{a}: {kind}" for a, kind in zip(method.arguments, method.annotations, strict=True)]
            lines += signature_lines(name, ["self", *arguments], returned, 4)
            if method.passed_through is not None:
                lines += ["        if not self.training:", f"            return {method.passed_through}"]
            bodies = [draft.methods[place][1].body for draft in family.members]
            body = [
                _common([body[line] for body in bodies], words, family) for line in range(len(method.body))
            ]
            entries = rolled_up(body, first.attributes, method.arguments)
            lines += written(entries, first.attributes, 8)
        paths = [draft.path for draft in family.members]
        return ClassText(family.name, first.attributes.base, tuple(lines), paths, first.whole, first.origin)

    def _init(self, family: _Family) -> Iterator[str]:
        first = family.members[0]
        words = iter(family.words)
        texts = {path: self._spelled(template, words) for path, template in first.attributes.templates()}
        in_bodies = set(words)
        yield f"super().__init__({first.attributes.given_to_base(lambda path, _: texts[path])})"
        yield from (f"self.{name} = {name}" for name in family.arguments if name in in_bodies)
        yield from first.attributes.statements(lambda path, _: texts[path])

    def _spelled(self, template: Template, words: Iterator[str | None]) -> str:
        return spelled(template, words, self._construct)

    def _construct(self, path: str, words: Iterator[str | None]) -> str:
        """Returns `Block(768, 3072)`, with the arguments by name where there are many."""
        family, place = self.family_of[path]
        constants = family.constants[place]
        given = [next(words) for _ in constants]
        texts = {
            name: given[column] or literal(constants[column].value)
            for name, column in family.arguments.items()
        }
        if len(texts) <= _MOST_POSITIONAL:
            return f"{family.name}({', '.join(texts.values())})"
        return f"{family.name}({', '.join(f'{name}={text}' for name, text in texts.items())})"

    def _annotated(self, family: _Family) -> Iterator[str]:
        for name, column in family.arguments.items():
            kinds = dict.fromkeys(_annotation(value) for value in family.values(column))
            yield f"{name}: {' | '.join(sorted(kinds, key=lambda kind: kind == 'None'))}"


def _common(statements: Sequence[Statement], words: Iterator[str | None], family: _Family) -> Statement:
    """Makes one line for all members: `self.name` where they differ, and what their comments share."""
    first = statements[0]

    def word(match: re.Match[str]) -> str:
        if match["number"] is None:
            return match[0]
        name = next(words)
        return match[0] if name is None else f"self.{name}"

    text = _TOKEN.sub(word, first.text)
    if len(statements) == 1:
        return replace(first, text=text)
    place = first.place if len({s.place for s in statements}) == 1 else ""
    shape: tuple[int | str, ...] = ()
    if len({len(s.shape) for s in statements}) == 1:
        shape = tuple(
            _common_size(sizes, family) for sizes in zip(*(s.shape for s in statements), strict=True)
        )
    return replace(first, text=text, place=place, shape=shape)


def _common_size(sizes: Sequence[int | str], family: _Family) -> int | str:
    if len(set(sizes)) == 1:
        return sizes[0]
    named = (name for name, column in family.arguments.items() if family.values(column) == list(sizes))
    return next(named, "?")


def _own_name(modules: Sequence[nn.Module], values: Sequence[Any], hint: str, taken: Set[str]) -> str | None:
    """Finds an attribute of the model that has these values; those its constructor takes come first."""
    parameters = list(inspect.signature(type(modules[0]).__init__).parameters)
    names = [hint, *parameters, *vars(modules[0])]
    for name in names:
        if not name or name in taken or name != identifier(name):
            continue
        found = [vars(module).get(name) for module in modules]
        if all(type(a) is type(b) and a == b for a, b in zip(found, values, strict=True)):
            return name
    return None


def _plain_name(values: Sequence[Any], taken: Set[str]) -> str:
    """Returns what a number of a body is called where nothing says what it is."""
    if not any(type(value) is float for value in values):
        return "size"
    return "factor" if "scale" in taken else "scale"


def _annotation(value: Any) -> str:
    kind = type(value)
    if value is None or kind in (bool, int, float, str):
        return "None" if value is None else kind.__name__
    if kind in (tuple, list) and all(type(item) is int for item in value):
        return "tuple[int, ...]" if kind is tuple else "list[int]"
    return "object"
