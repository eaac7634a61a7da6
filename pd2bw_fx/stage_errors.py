"""Where an error inside a stage comes from: the call in the generated code, and the author's line behind it.

    IndexError: Target 7 is out of bounds.
    in F.cross_entropy(z, y), line 29 of stage_1.py; from /home/me/model.py:13: return F.cross_entropy(z, y)

Everything is read off the error's traceback once there is one: a run without errors pays nothing.
"""

from __future__ import annotations

import ast
import functools
import linecache
import re
import traceback
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import nn

from pd2bw_fx.graph import OperatorGraph
from pd2bw_fx.module import SOURCE_NAME

_LOCATION = re.compile(r"#.*?(\S+\.py:\d+)")
# A notebook's frame may lack the text.
_FRAME = re.compile(r'File "([^"]+)", line (\d+), in [^\n]*(?:\n    +([^\n]*))?')
_LONGEST = 60  # characters of a call; a longer one is named by its beginning


@dataclass(frozen=True, slots=True)
class Place:
    """The innermost call of generated code that an error came through."""

    file: str  # "stage_1.py"
    line: int
    call: str  # "F.cross_entropy(z, y)"
    comment: str | None  # the author's line as the generated code names it: "model.py:13"
    layer: str  # the path of the module that the call stands in; "" is the stage itself

    @property
    def described(self) -> str:
        return f"{self.call} of {self.layer}" if self.layer else self.call

    @property
    def origin(self) -> str:
        """The author's line, or where the generated code names none its own."""
        return self.comment or f"{self.file}:{self.line}"

    def __str__(self) -> str:
        """Returns the place in a few words: `F.cross_entropy(z, y), model.py:13`."""
        return f"{self.described}, {self.origin}"


def place_of(error: BaseException) -> Place | None:
    """Returns where in a stage an error began; None for one that did not."""
    walked = zip(
        traceback.walk_tb(error.__traceback__), traceback.extract_tb(error.__traceback__), strict=True
    )
    inside = [(frame, at) for (frame, _), at in walked if SOURCE_NAME.fullmatch(at.filename)]
    if not inside or isinstance(error, torch.AcceleratorError):  # a GPU's errors are met at a later call
        return None
    stage, (frame, at) = inside[0][0].f_locals.get("self"), inside[-1]
    layers = stage.named_modules() if isinstance(stage, nn.Module) else ()
    own = frame.f_locals.get("self")
    return Place(
        file=SOURCE_NAME.sub(r"\1", at.filename),
        line=at.lineno or 1,
        call=_call(at),
        comment=origins("".join(linecache.getlines(at.filename))).get(at.lineno or 1),
        layer=next((path for path, layer in layers if layer is own), ""),
    )


def place_in(stack_trace: str) -> Place | None:
    """Returns the innermost line of generated code in a traced node's stack trace; None if there is none."""
    found = list(re.finditer(rf'File "({SOURCE_NAME.pattern})", line (\d+)', stack_trace))
    if not found:
        return None
    filename, file, line = found[-1].groups()
    lines = linecache.getlines(filename)
    text = lines[int(line) - 1].partition("  #")[0].strip()
    return Place(file, int(line), text, origins("".join(lines)).get(int(line)), "")


def note_place(error: BaseException, written: Mapping[str, str]) -> None:
    """Adds to an error that came from a stage which call it was. `written` is of `authors_lines`."""
    place = place_of(error)
    if place is not None:
        origin = written.get(place.comment or "", place.comment)
        origin = f"; from {origin}" if origin else ""
        error.add_note(f"in {place.described}, line {place.line} of {place.file}{origin}")


def authors_lines(graph: OperatorGraph) -> dict[str, str]:
    """Returns, by the short form that generated code has ("model.py:13"), the whole path and the text.

    Nothing where the graph has no traced program, and for a line that files of one name in several folders
    have.
    """
    found: dict[str, set[str]] = {}
    for node in () if graph.fx is None else graph.fx.graph.nodes:
        operator = graph.operators.get(node.name)
        if operator is not None and operator.source_line:
            whole = _in_full(operator.source_line, node.meta.get("stack_trace") or "")
            if whole is not None:
                found.setdefault(operator.source_line, set()).add(whole)
    return {short: next(iter(whole)) for short, whole in found.items() if len(whole) == 1}


@functools.lru_cache(maxsize=1024)
def _in_full(short: str, stack_trace: str) -> str | None:
    for file, line, text in reversed(_FRAME.findall(stack_trace)):
        if f"/{file}:{line}".replace("\\", "/").endswith(f"/{short}"):
            return f"{file}:{line}: {text.strip()}" if text else f"{file}:{line}"
    return None


@functools.lru_cache(maxsize=8)
def origins(source: str) -> dict[int, str]:
    """Returns, for each line of generated code, the author's line that its statement's comment names."""
    found: dict[int, str] = {}
    written = source.splitlines()
    for statement in ast.walk(ast.parse(source)):
        if not isinstance(statement, ast.Assign | ast.AugAssign | ast.Return | ast.Expr):
            continue
        lines = range(statement.lineno, (statement.end_lineno or statement.lineno) + 1)
        named = [match[1] for line in lines if (match := _LOCATION.search(written[line - 1]))]
        if named:
            found |= dict.fromkeys(lines, named[0])
    return found


def _call(at: traceback.FrameSummary) -> str:
    """Returns the text of the expression that was computed."""
    if at.lineno is None or at.end_lineno is None or at.colno is None or at.end_colno is None:
        return (at.line or "").partition("  #")[0].strip()
    written = [linecache.getline(at.filename, n).encode() for n in range(at.lineno, at.end_lineno + 1)]
    written[-1] = written[-1][: at.end_colno]  # columns count bytes
    written[0] = written[0][at.colno :]
    text = ast.unparse(ast.parse(b"(" + b"".join(written) + b")"))
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3].rstrip()} .."
