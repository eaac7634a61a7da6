"""The line that a long search writes to stderr."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TextIO

from pd2bw_fx.plan import Progress

_PATIENCE_S = 2.0  # shorter searches say nothing
_EVERY_S = 1.0


class ProgressLine:
    """Writes incumbent, bound and gap at most once a second; on a terminal each replaces the last.

    `text` formats them, by default in seconds. Ctrl-C ends the search with the best plan so far.
    """

    def __init__(self, stream: TextIO | None = None, *, text: Callable[[Progress], str] = str) -> None:
        self._stream = sys.stderr if stream is None else stream
        self._text = text
        self._told_s = float("-inf")
        self._is_open = False

    def __call__(self, progress: Progress) -> None:
        now = time.perf_counter()
        if progress.elapsed_s < _PATIENCE_S or now < self._told_s + _EVERY_S:
            return
        self._told_s = now
        line = f"{self._text(progress)} (Ctrl-C: take it)"
        if self._stream.isatty():
            print(f"\r\x1b[K{line}", end="", file=self._stream, flush=True)
            self._is_open = True
        else:
            print(line, file=self._stream, flush=True)

    def close(self) -> None:
        """Ends the line, so that what is printed next begins a line of its own."""
        if self._is_open:
            print(file=self._stream, flush=True)
            self._is_open = False


def in_workload_units(progress: Progress) -> str:
    return (
        f"{progress.elapsed_s:.1f} s: objective {progress.incumbent_s:.6g}, bound {progress.bound_s:.6g}, "
        f"gap {progress.gap:.2%}"
    )
