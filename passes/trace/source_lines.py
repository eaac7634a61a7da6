"""Which line of the model author's code an error or a traced node comes from, and the error in one line."""

from __future__ import annotations

import functools
import linecache
import re
import traceback
from pathlib import Path

import torch
from torch import fx
from torch.nn.utils.rnn import PackedSequence

from pd2bw_fx import selected_rows

_PACKAGE = Path(__file__).resolve().parent
_BESIDE = Path(selected_rows.__file__).resolve().parent
_TORCH = Path(torch.__file__).resolve().parent
_MAX_LENGTH = 300
_CONDITION = re.compile(r"\b(if|while|assert|and|or|not)\b")
_ASSIGNMENT = re.compile(r"\s*(\w+)\s*=[^=]")
_DRAWS = re.compile(r"\b(rand|randn|randint|random|uniform_?|bernoulli_?)\b")
_LINES_BEFORE = 8
# Torch's advice to its own developers: switches, and the line of torch or of this package that met the error.
_OF_TRACERS = re.compile(
    r" (For more information, run with TORCH_LOGS=\S+"
    r"|Caused by: \([^)]*\)"  # our own message has the place, in full
    r"|consider using data-dependent friendly APIs such as \w+, \w+ and \w+\.|Suggested fixes:$)"
)
_FRAME = re.compile(r'File "([^"]*)", line (\d+), in [^\n]*\n([^\n]*)')


def one_line(error: BaseException) -> str:
    """Returns the first lines of an error that say something, without torch's advice on its own settings."""
    lines = [line.strip() for line in str(error).splitlines()]
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line) for line in lines if line]
    text = _OF_TRACERS.sub("", " ".join(lines[:3])) or type(error).__name__
    text = text if len(text) <= _MAX_LENGTH else text[: _MAX_LENGTH - 3] + "..."
    return f"{type(error).__name__}: {text}" if not text.startswith(type(error).__name__) else text


def source_line(error: BaseException) -> str | None:
    """Returns the innermost line of the model author's code that the error came through, with its text."""
    own = _authors_place(error)
    if own is None:
        return None
    file, number = own
    text = linecache.getline(file, number).strip()
    return f"{Path(file).name}:{number}" + (f": {text}" if text else "")


def chooses_at_random(error: BaseException) -> bool:
    """Whether the error came from a Python condition on a random number.

    The number is drawn in the condition, or in one of the lines before, whose names the condition uses.
    """
    own = _authors_place(error)
    if own is None:
        return False
    file, number = own
    condition = linecache.getline(file, number)
    if not _CONDITION.search(condition):
        return False
    names, read = set[str](), list[str]()
    for n in range(number, max(0, number - _LINES_BEFORE), -1):
        line = linecache.getline(file, n)
        assigned = _ASSIGNMENT.match(line)
        if n == number or (assigned and assigned[1] in names):
            names |= set(re.findall(r"\w+", line))
            read.append(line)
    return any(_DRAWS.search(line) for line in read)


def _authors_place(error: BaseException) -> tuple[str, int] | None:
    own = None
    for frame in traceback.extract_tb(error.__traceback__):
        if is_the_authors(frame.filename) and frame.filename.endswith(".py"):
            own = frame.filename, frame.lineno or 0
    return own


def met_packed_sequences(error: BaseException) -> bool:
    """Whether a function that the error came through has a packed sequence among its variables."""
    return any(
        isinstance(value, PackedSequence)
        for frame, _ in traceback.walk_tb(error.__traceback__)
        for value in frame.f_locals.values()
    )


def line_of(node: fx.Node) -> str:
    """Returns the innermost line of the model author's code that a traced node comes from, with its text."""
    own = "a line that torch has not kept"
    for file, number, text in _FRAME.findall(node.meta.get("stack_trace") or ""):
        if is_the_authors(file) and file.endswith(".py"):
            own = f"{Path(file).name}:{number}: {text.strip()}"
    return own


@functools.cache
def is_the_authors(file: str) -> bool:
    """Whether the file has code of the model, and not of torch, of this pass or of what it uses."""
    parents = Path(file).resolve().parents
    return _TORCH not in parents and _PACKAGE not in parents and parents[0] != _BESIDE
