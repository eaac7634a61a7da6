"""An update between its last gradient and its step: what other stages add to it travels meanwhile.

U          gradients complete here; start to add tied ones over their holders
progress   those have arrived: start the sum of squares over all stages, if the norm is to be clipped
finish     before the first forward that needs the new version: wait for both, scale, step
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor

from pd2bw_fx.runtime.ties import TiedParameter, start_adding, start_asking, wait_for


@dataclass(frozen=True, slots=True)
class Clipping:
    """Scale the gradient of the whole model down to `max_norm`, as torch.nn.utils.clip_grad_norm_ does.

    The norm is that of one update's mean gradient over all stages, tied parameters counted once. `group` is
    used for nothing else; `holders[name]` is how many stages have a tied parameter.
    """

    max_norm: float
    group: dist.ProcessGroup
    holders: Mapping[str, int]


@dataclass(slots=True)
class PendingUpdate:
    """`gradients` are the flat buffers, `view(name)` a tied parameter's part of them."""

    version: int
    num_microbatches: int
    gradients: Mapping[torch.dtype, Tensor]
    view: Callable[[str], Tensor]
    ties: Sequence[TiedParameter]
    clipping: Clipping | None
    device: torch.device
    _adding: list[dist.Work] = field(default_factory=list)
    _asking: dict[str, tuple[Tensor, dist.Work]] = field(default_factory=dict)
    _squares: Tensor | None = None
    _squaring: dist.Work | None = None

    def start(self, used_here: frozenset[str], *, ask: bool) -> None:
        """`ask`: also find out which tied parameters have a gradient anywhere."""
        self._adding = [start_adding(tied, self.view(tied.name)) for tied in self.ties]
        if ask:
            self._asking = {t.name: start_asking(t, t.name in used_here, self.device) for t in self.ties}
        self.progress()

    @property
    def can_wait(self) -> bool:
        """Something is under way, so that the step is better put off."""
        return bool(self._adding) or self._squaring is not None

    def progress(self, *, must: bool = False) -> None:
        """Start what can be started; `must`: even if that means to wait for other holders first."""
        if self.clipping is None or self._squares is not None:
            return
        if must or all(work.is_completed() for work in self._adding):
            for work in self._adding:
                wait_for(work)
            self._start_squares(self.clipping)

    def _start_squares(self, clipping: Clipping) -> None:
        squares = torch.zeros(1, dtype=torch.float64, device=self.device)
        for flat in self.gradients.values():
            squares += flat.double().square().sum()
        for tied in self.ties:
            share = 1.0 - 1.0 / clipping.holders[tied.name]
            squares -= share * self.view(tied.name).double().square().sum()
        self._squares = squares
        self._squaring = start_adding(clipping, squares)

    def finish(self) -> frozenset[str]:
        """Mean gradients, clipped; gives the tied parameters that have a gradient somewhere."""
        self.progress(must=True)
        for work in self._adding:
            wait_for(work)
        scale: float | Tensor = 1.0 / self.num_microbatches
        if self.clipping is not None:
            assert self._squares is not None
            assert self._squaring is not None
            wait_for(self._squaring)
            norm = self._squares.sqrt() / self.num_microbatches
            scale = scale * (self.clipping.max_norm / (norm + 1e-6)).clamp(max=1.0)
        for flat in self.gradients.values():
            if isinstance(scale, Tensor):
                flat.mul_(scale.to(flat.dtype))
            else:
                flat.div_(self.num_microbatches)
        for _, work in self._asking.values():
            wait_for(work)
        return frozenset(name for name, (answer, _) in self._asking.items() if bool(answer.item()))
