"""The public names and the classes that calls return, with signatures and docstrings, as one Markdown page.

python docs/reference.py > docs/REFERENCE.md       (make reference)
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import fields

import pd2bw_fx
from pd2bw_fx.explanation import Explanation
from pd2bw_fx.passes.verify import Verification
from pd2bw_fx.report.picture import Picture
from pd2bw_fx.runtime import options
from pd2bw_fx.runtime.local import train_local
from pd2bw_fx.runtime.local_run import TrainResult
from pd2bw_fx.runtime.loss import Loss
from pd2bw_fx.runtime.reports import UpdateReport
from pd2bw_fx.stage import Stage
from pd2bw_fx.sweep import Setting, Sweep
from pd2bw_fx.timeline import Timeline
from pd2bw_fx.traced import TraceReport

RETURNED = (
    Explanation, Loss, Picture, Setting, Stage, Sweep, Timeline, TraceReport, TrainResult, UpdateReport,
    Verification,
)  # fmt: skip


def reference() -> str:
    """The names in the order of `pd2bw_fx.__all__`, then the classes that their calls return."""
    parts = [f"# Reference of pd2bw_fx {pd2bw_fx.__version__}\n"]
    for name in pd2bw_fx.__all__:
        parts += _entries("##", name, f"pd2bw_fx.{name}", getattr(pd2bw_fx, name))
    parts.append("## What calls return\n")
    for made in RETURNED:
        parts += _entries("###", made.__name__, f"{made.__module__}.{made.__name__}", made)
    return "\n".join(parts)


def _entries(head: str, name: str, path: str, found: object) -> Iterator[str]:
    """A name, and the members of a class."""
    yield from _entry(f"{head} {name}", path, found)
    if inspect.isclass(found) and not issubclass(found, Exception):
        for member, value in _members(found):
            yield from _entry(f"{head}# {name}.{member}", member, value)


def _members(owner: type) -> Iterator[tuple[str, object]]:
    """The public methods and properties of a class, and those of public classes that it is built on."""
    kinds = [
        kind for kind in owner.__mro__ if kind.__module__.startswith("pd2bw_fx") and kind.__name__[0] != "_"
    ]
    for name in dict.fromkeys(name for kind in kinds for name in vars(kind)):
        value = inspect.getattr_static(owner, name)
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
    signature = _bare(_expanded(inspect.signature(found)))
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


def _expanded(signature: inspect.Signature) -> inspect.Signature:
    """With each option of `**options: Unpack[..]` by its name."""
    parameters = list(signature.parameters.values())
    if not parameters or not str(parameters[-1].annotation).startswith("Unpack["):
        return signature
    named = getattr(options, str(parameters.pop().annotation).removeprefix("Unpack[").removesuffix("]"))
    defaults = {field.name: field.default for field in fields(options.EngineOptions)}
    for function in (pd2bw_fx.Engine.from_pipeline, train_local):
        defaults |= {each.name: each.default for each in inspect.signature(function).parameters.values()}
    for name, annotation in named.__annotations__.items():
        written = getattr(annotation, "__forward_arg__", annotation)
        kind = inspect.Parameter.KEYWORD_ONLY
        parameters.append(inspect.Parameter(name, kind, default=defaults[name], annotation=written))
    return signature.replace(parameters=parameters)


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
