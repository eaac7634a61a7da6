"""Which line of the model draws random numbers of Python or numpy, for the error that refuses them."""

from __future__ import annotations

import linecache
import random
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from pd2bw_fx.passes.trace.program import Program
from pd2bw_fx.passes.trace.source_lines import is_the_authors

from .watch import random_state


def drawing_line(program: Program, run: Callable[[Program, Mapping[str, torch.Tensor]], Any]) -> str | None:
    """Returns the author's line that is the first to draw in a run on the example inputs; None if none is.

    Its calls are followed line by line, which takes a while: only an error is worth it.
    """
    follower = _Follower()
    before = sys.gettrace()
    sys.settrace(follower.on_call)
    try:
        run(program, dict(zip(program.flat.names, program.flat.tensors, strict=True)))
    except Exception:  # a model that cannot run, such as one on the meta device
        pass
    finally:
        sys.settrace(before)
    return follower.found


class _Follower:
    """Compares the generators' states at each line of the author's."""

    def __init__(self) -> None:
        self.found: str | None = None
        self._state = random_state()
        self._at: FrameType | None = None
        self._line = 0

    def on_call(self, frame: FrameType, event: str, argument: Any) -> Callable[..., Any] | None:
        return self._on_line if _is_followed(frame.f_code.co_filename) else None

    def _on_line(self, frame: FrameType, event: str, argument: Any) -> Callable[..., Any]:
        state = random_state()
        if state != self._state and self.found is None and self._at is not None:
            file = self._at.f_code.co_filename
            self.found = f"{Path(file).name}:{self._line}: {linecache.getline(file, self._line).strip()}"
        self._state = state
        # Behind a call, the line that made it goes on.
        self._at = frame.f_back if event == "return" else frame
        self._line = 0 if self._at is None else self._at.f_lineno
        return self._on_line


def _is_followed(file: str) -> bool:
    numpy: Any = sys.modules.get("numpy")
    libraries = [random.__file__, *(() if numpy is None else numpy.__path__)]
    return is_the_authors(file) and not file.startswith(tuple(libraries))
