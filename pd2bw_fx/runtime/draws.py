"""Random numbers that depend on the seed, the microbatch and the operator, and on nothing else.

    F 5 on stage 1                generator seeded with
      ... F.dropout(x, 0.1) ...   (seed, microbatch 5, operator 118 of the model)
      ... F.dropout(y, 0.1) ...   (seed, microbatch 5, operator 131)

So dropout differs from microbatch to microbatch, and a run is the same whatever its number of stages,
replicas and restarts. A forward that is run again for its backward draws the same numbers again.
"""

from __future__ import annotations

import contextlib
import hashlib
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from pd2bw_fx.drawing import RECURRENT, call_draws
from pd2bw_fx.process_settings import cudnn_off

_WHOLE_MODEL = -1


class Draws:
    """Seeds torch's generators during a stage's forwards, and restores them afterwards.

    `operators` are the numbers of the stage's drawing operators in the whole graph, in their order. Further
    draws (of an operator that was added to the code by hand) are numbered by the stage.
    """

    def __init__(self, stage: int, operators: Sequence[int], device: torch.device) -> None:
        self.seed = 0
        self._stage = stage
        self._operators = operators
        self._devices = [device] if device.type == "cuda" else []

    @contextlib.contextmanager
    def of(self, microbatch: int) -> Iterator[None]:
        """Seeds what is drawn for this microbatch, which is the same whenever it is run again."""
        drawn = 0

        def begin() -> None:
            nonlocal drawn
            if drawn < len(self._operators):
                self._start(microbatch, _WHOLE_MODEL, self._operators[drawn])
            else:
                self._start(microbatch, self._stage, drawn)
            drawn += 1

        with torch.random.fork_rng(self._devices):
            self._start(microbatch, self._stage, -1)
            with _BeforeDrawing(begin) if self._operators else contextlib.nullcontext():
                yield

    def _start(self, microbatch: int, scope: int, number: int) -> None:
        told = struct.pack("<qqqq", self.seed, microbatch, scope, number)
        seed = int.from_bytes(hashlib.blake2b(told, digest_size=8).digest(), "little")
        torch.default_generator.manual_seed(seed)
        for device in self._devices:
            torch.cuda.default_generators[device.index or 0].manual_seed(seed)


class _BeforeDrawing(TorchFunctionMode):
    """Calls `begin` before every call of torch that takes numbers from a generator."""

    def __init__(self, begin: Callable[[], None]) -> None:
        super().__init__()
        self._begin = begin

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = kwargs or {}
        if not call_draws(func, args, given):
            return func(*args, **given)
        self._begin()
        # cuDNN's dropout between layers has a state of its own, which no seed reaches.
        is_recurrent = getattr(func, "__name__", "").partition(".")[0] in RECURRENT
        with cudnn_off() if is_recurrent else contextlib.nullcontext():
            return func(*args, **given)
