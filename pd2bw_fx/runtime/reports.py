"""What an engine tells about an update, to a progress bar, a log file or TensorBoard.

writer = SummaryWriter()
engine = pipe.engine(
    optimizer=..., on_report=lambda report: writer.add_scalar("loss", report.loss, report.update)
)
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from pd2bw_fx.errors import WorkerError
from pd2bw_fx.runtime.loss import Loss

_UNDER_WAY = 4  # so many losses at least, that none is waited for


@dataclass(frozen=True, slots=True)
class UpdateReport:
    """`loss` is the mean over the update's microbatches, `seconds` the time since the call of the update
    before, or of the evaluation after it. `numbers` are what the model returns beside its loss that is one
    number, the terms of the loss for example: means as well, by name."""

    update: int
    loss: float
    seconds: float
    microbatches_per_s: float
    learning_rates: tuple[float, ...]  # of the optimizer's groups, on a rank without parameters too
    numbers: Mapping[str, float]
    gradient_norm: float | None = None  # of the whole model's, before it is clipped to max_gradient_norm


class LossLog:
    """Losses on their way, and what happens when they have arrived: the same on all ranks, some updates late.

    `source` names the rank that computes a microbatch's. A loss waits for no update that the first of
    `num_ranks` has still to give its gradients to: so many updates late they have all gone in.
    """

    def __init__(
        self,
        on_report: Callable[[UpdateReport], None] | None,
        *,
        num_ranks: int,
        stop_at_nan: bool,
        source: Callable[[int], str],
        microbatches_per_update: int,
        learning_rates: Callable[[int], tuple[float, ...]],
        gradient_norm: Callable[[int], float | None],
    ) -> None:
        self._on_report = on_report
        self._lateness = max(_UNDER_WAY, num_ranks)
        self._stop_at_nan = stop_at_nan
        self._source = source
        self._microbatches_per_update = microbatches_per_update
        self._learning_rates = learning_rates
        self._gradient_norm = gradient_norm
        self._under_way: deque[tuple[Loss, float]] = deque()  # and the seconds of its call
        self._added_s = time.perf_counter()

    def add(self, loss: Loss) -> None:
        now_s = time.perf_counter()
        self._under_way.append((loss, now_s - self._added_s))
        self._added_s = now_s
        while len(self._under_way) > self._lateness:
            self._retire(*self._under_way.popleft())

    def finish(self) -> None:
        while self._under_way:
            self._retire(*self._under_way.popleft())

    def _retire(self, loss: Loss, seconds: float) -> None:
        """Raises WorkerError, on every rank, for a loss that is no number."""
        loss.wait()
        if self._stop_at_nan and loss.is_of_training and not math.isfinite(loss.item()):
            microbatch = loss.broken_microbatch()
            which = "" if microbatch is None else f" (microbatch {microbatch}, {self._source(microbatch)})"
            raise WorkerError(
                f"the loss of update {loss.update}{which} is {loss.item()}; try a lower learning rate, a "
                "warm-up or max_gradient_norm, or go on regardless with stop_at_nan=False"
            )
        if self._on_report is None or not loss.is_of_training:
            return
        rate = self._microbatches_per_update / seconds
        rates, norm = self._learning_rates(loss.update), self._gradient_norm(loss.update)
        self._on_report(
            UpdateReport(loss.update, loss.item(), seconds, rate, rates, loss.numbers, gradient_norm=norm)
        )
