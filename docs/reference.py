"""The reference: every public name with its signature and docstring, as one Markdown page.

python docs/reference.py > docs/REFERENCE.md       (make reference)
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import pd2bw_fx


def reference() -> str:
    """In the order of `pd2bw_fx.__all__`."""
    parts = [f"# Reference of pd2bw_fx {pd2bw_fx.__version__}\n"]
    for name in pd2bw_fx.__all__:
        found = getattr(pd2bw_fx, name)
        parts += _entry(f"## {name}", f"pd2bw_fx.{name}", found)
        if inspect.isclass(found) and not issubclass(found, Exception):
            for member, value in _members(found):
                parts += _entry(f"### {name}.{member}", member, value)
    return "\n".join(parts)


def _members(owner: type) -> Iterator[tuple[str, object]]:
    """The public methods and properties that the class itself has, in the order of its source."""
    for name, value in vars(owner).items():
        if name.startswith("_"):
            continue
        function = value.__func__ if isinstance(value, classmethod | staticmethod) else value
        if inspect.isfunction(function) or isinstance(value, property):
            yield name, function


def _entry(head: str, name: str, found: object) -> Iterator[str]:
    yield f"{head}\n"
    if callable(found) and not (inspect.isclass(found) and issubclass(found, Exception)):
        yield f"```\n{name}{_signature(found)}\n```\n"
    yield f"{inspect.getdoc(found) or ''}\n"


def _signature(found: object) -> str:
    """One line where it is short, an argument a line where it is not."""
    assert callable(found)
    signature = _bare(inspect.signature(found))
    text = str(signature)
    if len(text) < 90:
        return text
    lines = []
    kinds = [parameter.kind for parameter in signature.parameters.values()]
    for index, parameter in enumerate(signature.parameters.values()):
        if parameter.kind is parameter.KEYWORD_ONLY and parameter.KEYWORD_ONLY not in kinds[:index]:
            lines.append("    *,")
        lines.append(f"    {parameter},")
    returned = text.rpartition(" -> ")
    return "(\n" + "\n".join(lines) + "\n)" + (f" -> {returned[2]}" if returned[1] else "")


def _bare(signature: inspect.Signature) -> inspect.Signature:
    """With annotations as they are written, not as texts in quotes."""
    parameters = [p.replace(annotation=_written(p.annotation)) for p in signature.parameters.values()]
    returned = _written(signature.return_annotation)
    return signature.replace(parameters=parameters, return_annotation=returned)


def _written(annotation: object) -> object:
    return _Words(annotation) if isinstance(annotation, str) else annotation


class _Words(str):
    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)


if __name__ == "__main__":
    print(reference(), end="")
