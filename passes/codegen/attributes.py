"""The attributes of a class: what its __init__ builds, and how its methods refer to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from torch import nn

from .literals import are_numbered, is_guarded, is_number, is_plain_name, quoted
from .template import Fixed, Template

Spell = Callable[[str, Template], str]


@dataclass(slots=True)
class Attribute:
    """A module, parameter or buffer (`template` builds it), or a holder of further ones (`children`)."""

    template: Template | None = None
    kind: str = "module"  # or "parameter", "buffer"
    children: dict[str, Attribute] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Container:
    """A list or dict of modules or parameters.

    `keys` are in the model's order; `keeps_order` says whether the stage goes through them in that order too.
    """

    path: str
    is_list: bool
    keys: Sequence[str]
    keeps_order: bool


class Attributes:
    """The attribute tree of one class, filled in path by path, then written.

    A container of the model whose members have no plain names is a container in the stage too; with
    `is_sequence` it is an nn.Sequential, whose forward is its own. `class_at` gives the attributes of modules
    that have a class themselves: what is inside one is built, and spelled, by its own class.
    """

    def __init__(
        self,
        path: str,
        module_at: Callable[[str], nn.Module | None],
        class_at: Callable[[str], Attributes | None],
        *,
        is_sequence: bool = False,
    ) -> None:
        self.path = path
        self.module_at = module_at
        self.class_at = class_at
        self.is_sequence = is_sequence
        self.root = Attribute()

    @property
    def base(self) -> str:
        """The class that this one inherits from."""
        if self.is_sequence:
            return "nn.Sequential"
        if not self._is_container:
            return "nn.Module"
        return "nn.ModuleList" if self._is_list("", self.root) else "nn.ModuleDict"

    @property
    def _is_container(self) -> bool:
        names = self.root.children
        return (
            self._family("", self.root) == "Module"
            and not all(is_plain_name(name) for name in names)
            and not any(hasattr(nn.ModuleDict, name) for name in names)
        )

    def given_to_base(self, spell: Spell) -> str:
        """Returns what __init__ passes to the __init__ of the base class."""
        if self.is_sequence:
            members = {
                name: spell(name, member.template)
                for name, member in self.root.children.items()
                if member.template is not None
            }
            if are_numbered(members):
                return ", ".join(members.values())
            return f"OrderedDict({', '.join(f'{name}={text}' for name, text in members.items())})"
        return self._held("", self.root, spell)[1] if self._is_container else ""

    def add(self, relative: str, template: Template, kind: str = "module") -> None:
        node = self.root
        for part in relative.split("."):
            node = node.children.setdefault(part, Attribute())
        if node.template is None:
            node.template, node.kind = template, kind

    def holds(self, relative: str) -> bool:
        """Whether something with a template of its own is built at this path or above it."""
        node = self.root
        for part in relative.split("."):
            if part not in node.children:
                return False
            node = node.children[part]
            if node.template is not None:
                return True
        return False

    def templates(self) -> Iterator[tuple[str, Template]]:
        """Yields each path that has a template, with the template, in the order of __init__."""
        yield from self._templates("", self.root)

    def _templates(self, path: str, node: Attribute) -> Iterator[tuple[str, Template]]:
        if node.template is not None:
            yield path, node.template
            return
        for name in sorted(node.children, key=lambda name: self._position(_join(path, name))):
            yield from self._templates(_join(path, name), node.children[name])

    def statements(self, spell: Spell) -> list[str]:
        """Returns the lines of __init__, one statement each; `spell` gives the source of each template."""
        if self.base == "nn.Module":
            return list(self._statements("self", "", self.root, spell))
        return list(self._mixed_elements("self", "", self.root, spell))

    def _statements(self, owner: str, path: str, node: Attribute, spell: Spell) -> Iterator[str]:
        for name in sorted(node.children, key=lambda name: self._position(_join(path, name))):
            child, below = node.children[name], _join(path, name)
            if child.template is not None and child.kind == "buffer":
                yield f"{owner}.register_buffer({quoted(name)}, {spell(below, child.template)})"
            elif child.template is not None:
                yield _assignment(owner, name, spell(below, child.template), child.kind)
            elif self._is_indexed(below, child):
                yield _assignment(owner, name, self._container(below, child, spell), "module")
                yield from self._mixed_elements(_attribute(owner, name), below, child, spell)
            else:
                yield _assignment(owner, name, "nn.Module()", "module")
                yield from self._statements(_attribute(owner, name), below, child, spell)

    def _mixed_elements(self, owner: str, path: str, node: Attribute, spell: Spell) -> Iterator[str]:
        """Yields what no expression builds: the tensors and modules of an element that holds both."""
        for name, child in node.children.items():
            if child.template is not None:
                continue
            below = _join(path, name)
            key = name if self._is_list(path, node) else quoted(name)
            inner = self._mixed_elements if self._is_keyed(below, child) else self._statements
            yield from inner(f"{owner}[{key}]", below, child, spell)

    def _is_keyed(self, relative: str, node: Attribute) -> bool:
        """Whether a module inside a container is built as a container itself, of all that it holds."""
        kinds = {child.kind for child in node.children.values()}
        return self._is_indexed(relative, node) or kinds in ({"module"}, {"parameter"})

    @property
    def _has_items(self) -> bool:
        """Whether members of `self` are reached by number or key."""
        return are_numbered(self.root.children) if self.is_sequence else self._is_container

    def _position(self, relative: str) -> tuple[int, str]:
        """Orders members: parameters, buffers, then modules, each in the order of the original module."""
        holder, _, name = _join(self.path, relative).rpartition(".")
        parent = self.module_at(holder)
        names = [] if parent is None else [*parent._parameters, *parent._buffers, *parent._modules]
        return (names.index(name) if name in names else len(names), name)

    def _is_indexed(self, relative: str, node: Attribute) -> bool:
        """Whether members are reached by number or key: those of lists, dicts and sequences."""
        return self._family(relative, node) is not None

    def _family(self, relative: str, node: Attribute) -> str | None:
        """Returns what the kinds of list and dict of a container are called by, "Module" or "Parameter".

        The result is None for what is no container.
        """
        module = self.module_at(_join(self.path, relative))
        kinds = {child.kind for child in node.children.values()}
        if isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential) and kinds <= {"module"}:
            return "Module"
        if isinstance(module, nn.ParameterList | nn.ParameterDict) and kinds == {"parameter"}:
            return "Parameter"
        return None

    def _is_list(self, relative: str, node: Attribute) -> bool:
        module = self.module_at(_join(self.path, relative))
        whole = node.children.keys() == {str(number) for number in range(len(node.children))}
        return isinstance(module, nn.ModuleList | nn.Sequential | nn.ParameterList) and whole

    def _keys(self, relative: str, node: Attribute) -> list[str]:
        """Returns the names of a container's members: by number in a list, else in the model's order."""
        if self._is_list(relative, node):
            return [str(number) for number in range(len(node.children))]
        return sorted(node.children, key=lambda key: self._position(_join(relative, key)))

    def _container(self, relative: str, node: Attribute, spell: Spell) -> str:
        kind, members = self._held(relative, node, spell)
        return f"nn.{kind}({members})"

    def _held(self, relative: str, node: Attribute, spell: Spell) -> tuple[str, str]:
        """Returns the kind of a container, and the source of its members."""
        keys = self._keys(relative, node)
        texts = [self._element(_join(relative, key), node.children[key], spell) for key in keys]
        family = self._family(relative, node)
        if self._is_list(relative, node):
            runs = [(text, len(members)) for text, members in _runs(keys, texts)]
            if len(runs) == 1 and len(keys) > 1:
                return f"{family}List", _repeated(texts[0], len(keys))
            parts = [f"*({_repeated(text, count)})" if count > 1 else text for text, count in runs]
            return f"{family}List", f"[{', '.join(parts)}]"
        parts = []
        for text, members in _runs(keys, texts):
            if len(members) == 1:
                parts.append(f"{quoted(members[0])}: {text}")
                continue
            stem, first = _numbered(members[0])
            span = f"{first}, {first + len(members)}" if first else f"{len(members)}"
            key = f'f"{stem}{{i}}"' if stem else "str(i)"
            parts.append(f"**{{{key}: {text} for i in range({span})}}")
        if len(parts) == 1 and len(keys) > 1:
            return f"{family}Dict", parts[0].removeprefix("**")
        return f"{family}Dict", f"{{{', '.join(parts)}}}"

    def _element(self, relative: str, node: Attribute, spell: Spell) -> str:
        if node.template is not None:
            return spell(relative, node.template)
        if self._is_indexed(relative, node):
            return self._container(relative, node, spell)
        if not self._is_keyed(relative, node):
            return "nn.Module()"
        pairs = (
            f"{quoted(name)}: {self._element(_join(relative, name), child, spell)}"
            for name, child in sorted(
                node.children.items(), key=lambda pair: self._position(_join(relative, pair[0]))
            )
        )
        kinds = {child.kind for child in node.children.values()}
        kind = "Parameter" if kinds == {"parameter"} else "Module"
        return f"nn.{kind}Dict({{{', '.join(pairs)}}})"

    def refer(self, relative: str, owner: str = "self") -> str:
        """Returns the expression for what is built at a path: self.blocks[3], self.blocks["7"].norm.weight.

        `owner` is the expression for the module itself.
        """
        if not relative:
            return owner
        text, node, walked = owner, self.root, ""
        is_element = False  # of a container
        is_inside = False  # of something that one expression builds, with all that it has in the model
        parts = relative.split(".")
        for count, part in enumerate(parts, start=1):
            indexed = self._is_indexed(walked, node) if walked else self._has_items
            is_inside = is_inside or node.template is not None
            is_element = not is_inside and (indexed or (is_element and self._is_keyed(walked, node)))
            if (
                self._is_numbered_sequence(walked)
                if is_inside
                else is_element and self._is_list(walked, node)
            ):
                text = f"{text}[{part}]"
            elif is_element:
                text = f"{text}[{quoted(part)}]"
            else:
                text = _attribute(text, part, node.children.get(part, Attribute()).kind)
            node = node.children.get(part, Attribute(Fixed("")))
            walked = _join(walked, part)
            inner = self.class_at(_join(self.path, walked))
            if inner is not None:
                return inner.refer(".".join(parts[count:]), text)
        return text

    def _is_numbered_sequence(self, relative: str) -> bool:
        module = self.module_at(_join(self.path, relative))
        return type(module) is nn.Sequential and are_numbered(dict(module.named_children()))

    def container(self, relative: str) -> Container | None:
        """Returns the list or dict that a module or parameter is a direct member of, or None."""
        holder, _, last = relative.rpartition(".")
        node, walked = self.root, ""
        for part in holder.split(".") if holder else []:
            if part not in node.children:
                return None
            node, walked = node.children[part], _join(walked, part)
            inner = self.class_at(_join(self.path, walked))
            if inner is not None:
                rest = holder[len(walked) + 1 :]
                found = inner.container(_join(rest, last))
                return None if found is None else replace(found, path=_join(walked, found.path))
            if node.template is not None:
                return None  # a sequence that one expression builds
        is_container = self._is_indexed(holder, node) if holder else self._is_container
        if not is_container:
            return None
        is_list, keys = self._is_list(holder, node), self._keys(holder, node)
        # torch puts what a ParameterDict is built of in alphabetical order.
        keeps_order = is_list or self._family(holder, node) == "Module" or keys == sorted(keys)
        return Container(holder, is_list, keys, keeps_order)


def _runs(keys: Sequence[str], texts: Sequence[str]) -> list[tuple[str, list[str]]]:
    """Joins neighbours that are built alike and are numbered one after another: (source, keys)."""
    runs: list[tuple[str, list[str]]] = []
    for key, text in zip(keys, texts, strict=True):
        stem, number = _numbered(runs[-1][1][-1] if runs else "")
        if runs and runs[-1][0] == text and number >= 0 and _numbered(key) == (stem, number + 1):
            runs[-1][1].append(key)
        else:
            runs.append((text, [key]))
    return runs


def _numbered(key: str) -> tuple[str, int]:
    """Splits "layer_3" into "layer_" and 3; the number is -1 for a key without one."""
    stem = key.rstrip("0123456789")
    number = key[len(stem) :]
    is_one = is_number(number) and (not stem or is_plain_name(stem))
    return (stem, int(number)) if is_one else (key, -1)


def _repeated(text: str, count: int) -> str:
    return f"{text} for _ in range({count})"


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path and name else path or name


def _attribute(owner: str, name: str, kind: str = "module") -> str:
    """Returns `owner.name`, or a call that takes any name where this one is not plain."""
    if is_plain_name(name):
        return f"{owner}.{name}"
    if not is_guarded(name):
        return f"getattr({owner}, {quoted(name)})"
    # Reached in any other way, a guarded name would be something else.
    return f"{owner}.get_{'submodule' if kind == 'module' else kind}({quoted(name)})"


def _assignment(owner: str, name: str, text: str, kind: str) -> str:
    if is_plain_name(name):
        return f"{owner}.{name} = {text}"
    register = "register_parameter" if kind == "parameter" else "add_module"
    return f"{owner}.{register}({quoted(name)}, {text})"
