"""The one gate through which values become source text. Nothing is printed by its own `repr`."""

from __future__ import annotations

import builtins
import keyword
import math
import re
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

from pd2bw_fx.errors import TraceError
from pd2bw_fx.source_check import WAYS_OUT

from .limits import limit_of_a_type

MAIN = "main"  # the function that tries a stage out
NORMS = ("spectral_norm", "weight_norm")  # of torch.nn.utils.parametrizations (normed_layers.py)
# Matches a string as `quoted` writes it, in patterns that must skip strings.
STRING = r""""(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'"""
_RESERVED = frozenset(
    {
        *dir(builtins),
        *keyword.kwlist,
        *keyword.softkwlist,
        "self",
        "torch",
        "nn",
        "F",
        "Tensor",
        "OrderedDict",
        "math",
        *NORMS,
    }
)


def literal(value: Any) -> str:
    """Returns the source of a constant of an exactly known type.

    Types are compared, not tested by isinstance: a subclass may print as it likes. Raises TraceError for a
    constant of any other type.
    """
    if isinstance(value, np.generic):
        value = value.item()  # `nn.Linear(sizes[0], 8)` with numpy's sizes
    kind = type(value)
    if value is None or value is Ellipsis or kind is bool:
        return {None: "None", Ellipsis: "...", True: "True", False: "False"}[value]
    if kind is int:
        return int.__repr__(value)
    if kind is float:
        return limit_of_a_type(value) or _number(value)
    if kind is complex:
        if _is_imaginary(value):
            return f"{_number(value.imag).removesuffix('.0')}j"
        return f"complex({literal(value.real)}, {literal(value.imag)})"
    if kind is str:
        return quoted(value)
    if kind is torch.dtype:
        return str(value)
    if kind is torch.memory_format:
        return str(value)
    if kind is slice:
        return f"slice({literal(value.start)}, {literal(value.stop)}, {literal(value.step)})"
    if kind in (list, torch.Size) or isinstance(value, list):
        return f"[{', '.join(literal(item) for item in value)}]"
    if kind is tuple or isinstance(value, tuple):
        return in_tuple([literal(item) for item in value])
    raise TraceError(
        f"the model uses a constant of type {kind.__module__}.{kind.__qualname__} that cannot be written as "
        "source; make it a tensor, a number, a string or a tuple of these"
    )


def _is_imaginary(value: complex) -> bool:
    """Whether Python reads `2j` as this number; it reads `-2j` as one whose real part is -0.0."""
    signs = math.copysign(1, value.real), math.copysign(1, value.imag)
    return value.real == 0 and math.isfinite(value.imag) and signs == (1, 1)


def _number(value: float) -> str:
    """Writes a float as Python prints it, but -1e9 for -1000000000.0, and 1e-5 for 1e-05."""
    text = float.__repr__(value).replace("e+", "e").replace("e-0", "e-")
    if not math.isfinite(value):
        return f'float("{text}")'
    whole = text.removesuffix(".0")
    digits = whole.rstrip("0")
    zeros = len(whole) - len(digits)
    return f"{digits}e{zeros}" if zeros >= 6 and len(digits) <= 3 else text


def quoted(text: str) -> str:
    """Writes a string literal, with every character outside plain ASCII escaped.

    It is in double quotes, like ruff format's, unless the text has fewer single quotes than double ones.
    """
    mark = "'" if text.count('"') > text.count("'") else '"'
    out = []
    for character in text:
        if character in (mark, "\\"):
            out.append("\\" + character)
        elif " " <= character <= "~":
            out.append(character)
        else:
            code = ord(character)
            out.append(
                f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}" if code < 65536 else f"\\U{code:08x}"
            )
    return f"{mark}{''.join(out)}{mark}"


def in_tuple(items: list[str]) -> str:
    return f"({items[0]},)" if len(items) == 1 else f"({', '.join(items)})"


def plain(text: str) -> str:
    """Returns text for a comment or docstring: one line, printable, without quotes or backslashes."""
    return "".join(c if " " <= c <= "~" and c not in "\"'\\" else "?" for c in text)


def is_plain_name(name: str) -> bool:
    """Whether an attribute can be written as `module.name` without surprise."""
    return name.isascii() and name.isidentifier() and not keyword.iskeyword(name) and not is_guarded(name)


def is_guarded(name: str) -> bool:
    """Whether no stage may have an attribute of this name.

    Such names are Python's own, and those that lead out of what a stage computes.
    """
    return name.startswith("__") or name in WAYS_OUT


def is_number(name: str) -> bool:
    """Whether the name is how Python prints a whole number, unlike `01`."""
    return re.fullmatch("0|[1-9][0-9]*", name) is not None


def are_numbered(names: Iterable[str]) -> bool:
    """Whether names count up from 0, as those of a list's members do."""
    return all(name == str(place) for place, name in enumerate(names))


def identifier(text: str, *, fallback: str = "value") -> str:
    """Returns a safe local name: ASCII, no keyword, no builtin, no name that the file imports.

    An underscore at the end stays, which tells the author's `x_` from `x`.
    """
    word = re.sub(r"\W+", "_", text, flags=re.ASCII)
    name = word.strip("_")
    if not name:
        return fallback
    if not name[0].isalpha():
        name = f"{fallback}_{name}"
    return f"{name}_" if name in _RESERVED or text.endswith("_") else name
