"""Models that take another branch while they are compiled, and fail there.

if attention_mask is None and not is_torchdynamo_compiling():    under torch.compile it is expected from the
    attention_mask = torch.ones(batch, length)                   caller: a trace would fail on None
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

import torch

_TORCH = str(Path(torch.__file__).resolve().parent) + os.sep  # not torchvision's


@contextmanager
def answer_is_compiling(answer: bool) -> Iterator[list[str]]:
    """Makes torch.compiler.is_compiling() return `answer` while torch traces, except to torch itself.

    Yields a list that gets the file of every caller.
    """
    asked: list[str] = []
    of_torch = torch.compiler.is_compiling

    def is_compiling() -> bool:
        file = sys._getframe(1).f_code.co_filename
        if _is_of_torch(file) or not of_torch():
            return of_torch()
        asked.append(file)
        return answer

    torch.compiler.is_compiling = is_compiling
    try:
        yield asked
    finally:
        torch.compiler.is_compiling = of_torch


def is_raised_by_the_model(error: BaseException) -> bool:
    """Whether the error was raised outside of torch: then the model itself fails, not its trace."""
    innermost: TracebackType | None = error.__traceback__
    while innermost is not None and innermost.tb_next is not None:
        innermost = innermost.tb_next
    return innermost is not None and not _is_of_torch(innermost.tb_frame.f_code.co_filename)


def _is_of_torch(file: str) -> bool:
    return file.startswith(_TORCH)
