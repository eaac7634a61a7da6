"""Expressions with their binding strength, and the scene in which operands are spelled."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from .limits import Limit
from .literals import in_tuple, literal

# Binding strength, as in Python's grammar; larger binds looser.
ATOM, POWER, UNARY, TIMES, PLUS, SHIFT, AND, XOR, OR, COMPARE = range(10)


@dataclass(frozen=True, slots=True)
class Source:
    """An expression and how tightly it binds."""

    text: str
    strength: int = ATOM

    def within(self, strength: int) -> str:
        """The text, in parentheses if it binds more loosely than its place allows."""
        return self.text if self.strength <= strength else f"({self.text})"


class Scene:
    """What spelling an operator needs from its surroundings."""

    def __init__(
        self,
        expression: Callable[[fx.Node], Source],
        device: Callable[[], str],
        *,
        is_training: bool = True,
        lists: Mapping[tuple[Any, ...], str] | None = None,
    ) -> None:
        self.expression = expression
        self.device = device  # source for the device of a tensor at hand
        self._is_training = is_training  # whether the traced model was in training mode
        self._lists = {} if lists is None else lists  # lists that have a name, by all their entries

    def always(self) -> Scene:
        """Returns the scene of an operator that does the same in evaluation as in training."""
        return Scene(self.expression, self.device, is_training=False, lists=self._lists)

    def mode(self, value: Any) -> str:
        """Writes an operator's training flag: False, or self.training.

        It is True instead of self.training where evaluation does the same as training.
        """
        return "False" if value is not True else "self.training" if self._is_training else "True"

    def text(self, value: Any) -> str:
        """Writes an operand or a constant as an argument."""
        if isinstance(value, fx.Node):
            return self.expression(value).text
        if isinstance(value, list | tuple) and _holds_nodes(value):
            if all(isinstance(item, fx.Node) for item in value) and tuple(value) in self._lists:
                return self._lists[tuple(value)]
            items = [self.text(item) for item in value]
            return in_tuple(items) if isinstance(value, tuple) else f"[{', '.join(items)}]"
        if isinstance(value, slice) and _holds_nodes((value.start, value.stop, value.step)):
            return f"slice({self.text(value.start)}, {self.text(value.stop)}, {self.text(value.step)})"
        if isinstance(value, torch.device):
            return self.device()
        if isinstance(value, Limit):
            return f"torch.finfo({self.receiver(value.operand)}.dtype).{value.name}"
        return literal(value)

    def source(self, value: Any) -> Source:
        if isinstance(value, fx.Node):
            return self.expression(value)
        text = self.text(value)
        return Source(text, UNARY if text.startswith("-") else ATOM)

    def receiver(self, value: Any) -> str:
        """Writes a value as what stands before a dot or a bracket."""
        return self.source(value).within(ATOM)


def _holds_nodes(items: Sequence[Any]) -> bool:
    return any(
        isinstance(item, fx.Node) or (isinstance(item, list | tuple) and _holds_nodes(item)) for item in items
    )


INFIX: dict[str, tuple[str, int]] = {
    "add": ("+", PLUS), "sub": ("-", PLUS), "mul": ("*", TIMES), "div": ("/", TIMES),
    "matmul": ("@", TIMES), "mm": ("@", TIMES), "floordiv": ("//", TIMES), "mod": ("%", TIMES),
    "floor_divide": ("//", TIMES),
    "__and__": ("&", AND), "__or__": ("|", OR), "__xor__": ("^", XOR), "truediv": ("/", TIMES),
    "and_": ("&", AND), "or_": ("|", OR), "xor": ("^", XOR),
    "bitwise_and": ("&", AND), "bitwise_or": ("|", OR), "bitwise_xor": ("^", XOR), "remainder": ("%", TIMES),
    "eq": ("==", COMPARE), "ne": ("!=", COMPARE), "lt": ("<", COMPARE), "le": ("<=", COMPARE),
    "gt": (">", COMPARE), "ge": (">=", COMPARE), "lshift": ("<<", SHIFT), "rshift": (">>", SHIFT),
    "__lshift__": ("<<", SHIFT), "__rshift__": (">>", SHIFT),
    "bitwise_left_shift": ("<<", SHIFT), "bitwise_right_shift": (">>", SHIFT),
}  # fmt: skip


def infix(name: str, left: Any, right: Any, scene: Scene) -> Source:
    sign, strength = INFIX[name]
    a, b = scene.source(left), scene.source(right)
    # Comparisons do not chain, and the right operand of a left-associative sign keeps its own grouping.
    left_limit = strength - 1 if strength == COMPARE else strength
    return Source(f"{a.within(left_limit)} {sign} {b.within(strength - 1)}", strength)


def power(base: Any, exponent: Any, scene: Scene) -> Source:
    """Writes a power, with spaces around the sign unless both sides are plain, as ruff format does."""
    texts = [scene.receiver(base), scene.source(exponent).within(UNARY)]
    sign = "**" if all(map(_PLAIN.fullmatch, texts)) else " ** "
    return Source(sign.join(texts), POWER)


_PLAIN = re.compile(r"\(?[-+~]*(?:[A-Za-z_][\w.]*|\d[\w.]*(?:e[-+]?\d+)?)\)?")


def arguments(args: Sequence[Any], kwargs: Mapping[str, Any], scene: Scene) -> str:
    texts = [scene.text(value) for value in args]
    texts += [f"{name}={scene.text(value)}" for name, value in kwargs.items()]
    return ", ".join(texts)


def call(function: str, scene: Scene, *args: Any, **kwargs: Any) -> Source:
    return Source(f"{function}({arguments(args, kwargs, scene)})")


def given(values: Mapping[str, Any], *names: str, **renamed: str) -> dict[str, Any]:
    """Selects the named operands that were given, under their public names."""
    chosen = {name: values[name] for name in names if name in values}
    return chosen | {public: values[name] for public, name in renamed.items() if name in values}


def subscript(item: Any, scene: Scene) -> str:
    if not isinstance(item, slice):
        return scene.text(item)
    bounds = [("" if bound is None else scene.text(bound)) for bound in (item.start, item.stop)]
    step = "" if item.step is None else f":{scene.text(item.step)}"
    return f"{bounds[0]}:{bounds[1]}{step}"


Special = Callable[[Mapping[str, Any], Scene], Source | None]
"""Spells an operator from its operands by the schema's names; None leaves it to the rule."""
