"""The lines of a model that stop torch.export, and why, as torch's draft mode finds them."""

from __future__ import annotations

import io
import linecache
import logging
import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch._logging._internal import LazyTraceHandler
from torch._logging.structured import INTERN_TABLE
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import draft_export
from torch.fx.experimental import sym_node

from pd2bw_fx.contraction import keep_contractions_symbolic
from pd2bw_fx.process_settings import leave_other_flags_alone
from pd2bw_fx.program import training_context

from .eager_run import keep_program, keep_state
from .exported import open_sizes
from .patches.conditions import ChoiceError, Conditions
from .patches.numbers_of_sizes import keep_sizes_symbolic
from .program import Program
from .size_guards import is_for_many_sizes

_TORCH, _TRACER = (Path(file).resolve().parent for file in (torch.__file__, __file__))
_MOST = 3
_TORCHS_OWN = ("aten.", "prims.")
_THE_BATCH, _VALUES = "the batch size, and fixes it", "the values of a tensor"


def draft_findings(program: Program, batch_size: int | None, *, values: bool) -> tuple[str, ...]:
    """Returns the first few lines that stop a trace, each with its cause; nothing where the draft fails too.

    Lines that depend on `values` are left out where another front end has passed them. The draft runs the
    model on the example inputs. Buffers and random generators are restored afterwards.
    """
    tensors = [*program.parameters(), *program.buffers(), *program.flat.tensors]
    if batch_size is None or any(isinstance(tensor, FakeTensor) or tensor.is_meta for tensor in tensors):
        return ()
    shapes = {"tensors": open_sizes(program.flat, batch_size, {})}
    try:
        with (
            keep_state(program),
            keep_program(program),
            patch.object(program.options, "conditions", Conditions()),  # a draft finds them by itself
            _hide_report(),
            _log_no_more_than_is_told(),
            keep_contractions_symbolic(),
            keep_sizes_symbolic(program.model, program.loss_fn),
            training_context(),
            leave_other_flags_alone(),
            warnings.catch_warnings(),
        ):
            warnings.simplefilter("ignore")
            draft = draft_export(program, program.flat.tensors, strict=False, dynamic_shapes=shapes)
    except Exception:  # a diagnosis is optional: users still get the front ends' own reasons
        return ()
    report: Any = getattr(draft, "_report", None)
    found = () if report is None else dict.fromkeys(_said(report, batch_size, values=values))
    return tuple(found)[:_MOST]


def lines_of_choices(error: ChoiceError) -> tuple[str, ...]:
    """Returns what a draft would say of choices that another front end has met."""
    found = dict.fromkeys(f"{place.model} depends on {_VALUES}: {place.line}" for place in error.places)
    return tuple(found)[:_MOST]


@contextmanager
def _hide_report() -> Iterator[None]:
    """Hides the draft's own report, and the program that it prints where it fails.

    The report is made from what torch logs, so that logging itself must stay on.
    """
    names = ("torch.fx.experimental.symbolic_shapes", "torch.export._draft_export")
    loggers = [logging.getLogger(name) for name in names]
    try:
        for logger in loggers:
            logger.addFilter(_nothing)
        with redirect_stderr(io.StringIO()):
            yield
    finally:
        for logger in loggers:
            logger.removeFilter(_nothing)


@contextmanager
def _log_no_more_than_is_told() -> Iterator[None]:
    """Leaves out what takes most of a draft's time and is not told here.

    These are a record of each size that is computed, with the stack of calls above it, and a file of all
    records, which torch would leave in the folder for temporary files.
    """
    with (
        patch.object(sym_node, "dtrace_structured", _unlogged),
        patch.object(LazyTraceHandler, "emit", _keep_no_file),
    ):
        yield


def _unlogged(name: str, *args: Any, **kwargs: Any) -> None: ...


class _NoFile(io.StringIO):
    name = "no file"


def _keep_no_file(handler: LazyTraceHandler, record: logging.LogRecord) -> None:
    if handler.stream is None:
        handler.stream = _NoFile()  # the report names it


def _nothing(record: logging.LogRecord) -> bool:
    return False


def _said(report: Any, batch_size: int, *, values: bool) -> Iterator[str]:
    # The report names only the files that it met first: torch numbers each file once in a process.
    files = {number: name for name, number in INTERN_TABLE.items()} | report.str_to_filename
    for failure in report.failures:
        kind, data = failure.failure_type.name, failure.data
        if kind == "MISSING_FAKE_KERNEL":
            yield f"operator {data['op']} has no fake kernel; register one with torch.library.register_fake"
        elif kind == "MISMATCHED_FAKE_KERNEL":
            if data["op"].startswith(_TORCHS_OWN):
                continue
            yield f"the fake kernel of operator {data['op']} is wrong: {data['reason']}"
        elif (line := _line(data["user_stack"], files)) is not None:
            on_sizes = kind == "GUARD_ADDED" and not re.search(r"\bz?u[f]?\d", data["expr"])
            if on_sizes and (_is_the_drafts(data, files) or is_for_many_sizes(data["expr"], batch_size)):
                continue
            if on_sizes or values:
                yield f"{line[0]} depends on {_THE_BATCH if on_sizes else _VALUES}: {line[1]}"


def _is_the_drafts(data: Mapping[str, Any], files: Mapping[int, str]) -> bool:
    """Whether the draft itself asked, where it compares an operator's fake results with real ones."""
    names = (files.get(frame["filename"], "") for frame in data.get("stack", ()))
    return any(Path(name).parts[-2:] == ("_subclasses", "fake_utils.py") for name in names)


def _line(stack: list[Mapping[str, Any]], files: Mapping[int, str]) -> tuple[str, str] | None:
    """Returns the place and text of the innermost line of the model on the stack."""
    for frame in reversed(stack):
        name = files.get(frame["filename"])
        folders = set() if name is None else {*Path(name).resolve().parents}
        if name is None or _TORCH in folders:
            continue
        if _TRACER in folders:
            return None
        text = linecache.getline(name, frame["line"]).strip() or str(frame.get("loc", ""))
        return f"{Path(name).name}:{frame['line']}", text
    return None
