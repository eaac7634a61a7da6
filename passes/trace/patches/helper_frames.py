"""Source lines of functions that a forward calls: torch records the lines of forwards alone.

The functions of torch's attention are included: the queries, keys and values have their names there.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import pairwise
from traceback import FrameSummary, StackSummary
from typing import Any

import torch.nn.functional as F
from torch import nn
from torch.fx.proxy import TracerBase

from pd2bw_fx.passes.trace.source_lines import is_the_authors

_RUN = os.path.join(os.path.dirname(os.path.dirname(__file__)), "program.py"), "_run"  # calls model and loss
# A forward that another calls as a function, `super().forward(x)`, is no call of a module. No line calls it
# by this name, so it is not taken for a function of the author's to write either.
_CALLED_FORWARD = "called_forward"
_OF_ATTENTION = {"multi_head_attention_forward", "_in_projection_packed", "_in_projection"}


@contextmanager
def record_helper_frames() -> Iterator[None]:
    """Keeps frames of functions in stack traces, if they come after a forward and lie beside its file.

    After the last forward, frames of its whole package are kept, and those of other folders of a repository
    that is not installed. So are those of a loss outside the model.
    """
    plain = TracerBase._filter_traceback_frames

    def filtered(tracer: TracerBase, summary: StackSummary) -> StackSummary:
        kept = plain(tracer, summary)
        wanted = {(frame.filename, frame.lineno, frame.name) for frame in kept}
        found, own, package = list[FrameSummary](), "", ""
        forwards = [at for at, f in enumerate(summary) if f.name == "forward" and is_the_authors(f.filename)]
        loss = _beginning_of_a_loss(summary)
        last = max([*forwards, loss or 0])
        called = {at for before, at in pairwise(forwards) if not _is_call_of_module(summary[before + 1 : at])}
        for at, frame in enumerate(summary):
            is_kept = (frame.filename, frame.lineno, frame.name) in wanted
            if at == loss or (is_kept and frame.name == "forward"):
                own, package = _folder_and_package(frame.filename)
            is_beside = False
            if own:
                folder = os.path.dirname(frame.filename)
                # Functions elsewhere in the package that come before another forward only wrap it.
                is_theirs = is_the_authors(frame.filename) and _package(folder) == package
                is_beside = folder == own or (at > last and is_theirs)
            is_of_attention = frame.name in _OF_ATTENTION and frame.filename == F.__file__
            if at in called:
                found.append(FrameSummary(frame.filename, frame.lineno, _CALLED_FORWARD, line=frame.line))
            elif is_kept or is_of_attention or (is_beside and not frame.name.startswith("<")):
                found.append(frame)
        return StackSummary.from_list(found)

    tracer: Any = TracerBase
    tracer._filter_traceback_frames = filtered
    try:
        yield
    finally:
        tracer._filter_traceback_frames = plain


def _is_call_of_module(between: Sequence[FrameSummary]) -> bool:
    return any(frame.filename == nn.modules.module.__file__ for frame in between)


def _beginning_of_a_loss(summary: StackSummary) -> int | None:
    """Returns the place of the frame of a function that computes the loss of what the model returns."""
    runs = [at for at, frame in enumerate(summary) if (frame.filename, frame.name) == _RUN]
    begin = runs[-1] + 1 if runs else len(summary)
    return begin if begin < len(summary) and is_the_authors(summary[begin].filename) else None


def _folder_and_package(file: str) -> tuple[str, str]:
    """Returns the folder of an author's file and the outermost one of its package; "" for other files."""
    folder = os.path.dirname(file) if is_the_authors(file) else ""
    return folder, _package(folder) if folder else ""


@functools.cache
def _package(folder: str) -> str:
    """Returns the folder that holds all of an author's code: a repository's own, or a package's.

    A repository's is the one from which Python imports it (`models/attention.py` and `utils/masking.py` lie
    in two of its folders). A package's is the outermost one with an `__init__.py`, or the folder itself.
    """
    places = [
        path for path in map(os.path.abspath, sys.path) if f"{folder}{os.sep}".startswith(path + os.sep)
    ]
    root = max(places, key=len, default="")
    if root and not _has_installed_packages(root):
        return root
    while os.path.exists(os.path.join(os.path.dirname(folder), "__init__.py")):
        folder = os.path.dirname(folder)
    return folder


def _has_installed_packages(folder: str) -> bool:
    return any(name.endswith(".dist-info") for name in os.listdir(folder))
