"""An update between its last gradient and its step, while other ranks' contributions are on their way.

U          gradients are complete here; those of tied parameters go to their other holders
progress   they have arrived: start the sum of squares over all stages, if the norm is to be clipped
finish     before the first forward that needs the new version: wait for both, scale, step
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from pd2bw_fx.runtime.gradient_sums import GradientSums, UseQuestion, start_adding, wait_for

_INITIAL_SCALE = 2.0**16
_PATIENCE = 2000  # updates without an overflow, before the loss scale is doubled


@dataclass(frozen=True, slots=True)
class Clipping:
    """Scales the gradient of the whole model down to `max_norm`, as torch.nn.utils.clip_grad_norm_ does.

    The norm is that of one update's mean gradient over all stages; tied parameters count once. `group` is
    used for nothing else; `holders[name]` is how many ranks hold a parameter that several hold. An infinite
    `max_norm` clips nothing: the norm then only tells whether all gradients are finite.
    """

    max_norm: float
    group: dist.ProcessGroup
    holders: Mapping[str, int]


class LossScale:
    """The loss scale of fp16.

    The loss is multiplied by it, so that small gradients do not become zeros, and gradients are divided by it
    again. It follows the rule of torch.amp.GradScaler. When a gradient is not finite, the scale is halved and
    all ranks leave the update out; after `_PATIENCE` updates without such a gradient it is doubled. A scale
    belongs to a weight version: every stage scales what runs on W(v) by the same number. Those of the last
    `num_versions` are kept.
    """

    def __init__(self, num_versions: int) -> None:
        self._num_versions = num_versions
        self._finite = 0  # updates since the last change
        self._scales = {0: _INITIAL_SCALE}

    def of(self, version: int) -> float:
        return self._scales[version]

    def follow(self, version: int, *, overflow: bool) -> None:
        """Sets the scale of W(version). `overflow`: a gradient was not finite, and the version is a copy."""
        scale = self._scales[version - 1]
        self._finite = 0 if overflow else self._finite + 1
        if overflow:
            scale /= 2
        elif self._finite == _PATIENCE:
            scale, self._finite = scale * 2, 0
        self._scales[version] = scale
        self._scales = {v: kept for v, kept in self._scales.items() if v > version - self._num_versions}

    def begin_at(self, newest: int) -> None:
        """Goes on after updates that were made without a scale."""
        initial = max(self._scales.values())
        self._scales = dict.fromkeys(range(newest - self._num_versions + 1, newest + 1), initial)

    def state(self) -> dict[str, Any]:
        return {"scales": [self._scales[v] for v in sorted(self._scales)], "finite": self._finite}

    def load(self, state: Mapping[str, Any], newest: int) -> None:
        scales = state["scales"]
        self._scales = {newest - len(scales) + 1 + index: scale for index, scale in enumerate(scales)}
        self._finite = state["finite"]


class GradientNorm:
    """The norm of an update's whole gradient, before it is clipped.

    A GPU computes it later than it is launched, and copies it to the host meanwhile: a reader some updates
    later does not wait.
    """

    __slots__ = ("_here", "_is_there")

    def __init__(self, norm: Tensor) -> None:
        self._here, self._is_there = norm, None
        if norm.device.type == "cuda":
            self._here = torch.empty_like(norm, device="cpu", pin_memory=True)
            self._here.copy_(norm, non_blocking=True)
            self._is_there = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._is_there.record(torch.cuda.current_stream(norm.device))

    def item(self) -> float:
        if self._is_there is not None:
            self._is_there.synchronize()
        return self._here.item()


@dataclass(frozen=True, slots=True)
class Step:
    """When W(version) was made, by `time.perf_counter`; other ranks' parts were there at `added_s`."""

    version: int
    began_s: float
    added_s: float
    ended_s: float


@dataclass(slots=True)
class PendingUpdate:
    """An update that is not made yet.

    `gradients` are this rank's by parameter, as far as there are any; those in `sums` come from all holders.
    `question` asks whether any rank has them; None where the sums themselves tell. `scale` is what the loss
    was multiplied by. `may_overflow`: the update is left out if a gradient is not finite, even at a scale of
    1.
    """

    version: int
    gradients: dict[str, Tensor]
    sums: GradientSums
    question: UseQuestion | None
    clipping: Clipping | None
    device: torch.device
    scale: float = 1.0
    may_overflow: bool = False
    used: frozenset[str] = frozenset()  # the answer to `question`, once finished
    norm: GradientNorm | None = None  # once finished, if gradients are clipped
    _have_arrived: bool = False
    _squares: Tensor | None = None
    _squaring: dist.Work | None = None

    @property
    def can_wait(self) -> bool:
        """Whether something is on its way, so that the step had better wait."""
        return self.sums.is_under_way or self.clipping is not None

    @property
    def is_squaring(self) -> bool:
        return self._squaring is not None

    @property
    def has_arrived(self) -> bool:
        """Whether it can be finished without waiting."""
        if self.clipping is not None:
            return self._squaring is not None and self._squaring.is_completed()
        return self.sums.have_arrived

    def start(self) -> None:
        """Sends gradients to the other holders."""
        if self.question is not None:
            self.question.ask()
        self.sums.start()

    def progress(self, *, must: bool = False) -> None:
        """Starts what can be started; `must`: even if it has to wait for other holders first."""
        if self.clipping is None or self._squares is not None:
            return
        if must or self.sums.have_arrived:
            self._take_sums()
            self._start_squares(self.clipping)

    def finish(self) -> dict[str, Tensor] | None:
        """Returns the gradients, summed over the holders, unscaled and clipped; None if one is not finite."""
        self.start()
        self.progress(must=True)
        self._take_sums()
        if self.clipping is not None and not self._clip(self.clipping):
            return None
        return self.gradients

    def _take_sums(self) -> None:
        if self._have_arrived:
            return
        self._have_arrived = True
        sums = self.sums.wait()
        self.used = frozenset(sums) if self.question is None else self.question.answer()
        self.gradients |= {name: total for name, total in sums.items() if name in self.used}

    def _start_squares(self, clipping: Clipping) -> None:
        squares = torch.zeros(1, dtype=torch.float64, device=self.device)
        norms = torch._foreach_norm(list(self.gradients.values())) if self.gradients else ()
        for name, norm in zip(self.gradients, norms, strict=True):
            squares += norm.double().square() / clipping.holders.get(name, 1)
        self._squares = squares
        self._squaring = start_adding(clipping, squares)

    def _clip(self, clipping: Clipping) -> bool:
        """Scales the gradients to their true size and down to the norm; returns whether they are finite."""
        assert self._squares is not None
        assert self._squaring is not None
        wait_for(self._squaring)
        norm = self._squares.sqrt() / self.scale
        if math.isfinite(clipping.max_norm):
            self.norm = GradientNorm(norm)
        factor = ((clipping.max_norm / (norm + 1e-6)).clamp(max=1.0) / self.scale).squeeze(0)
        if self.may_overflow and not bool(norm.isfinite()):
            return False
        for gradient in self.gradients.values():
            gradient.mul_(factor.to(gradient.dtype))
        return True
