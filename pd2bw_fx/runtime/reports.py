"""What an engine tells about an update, to a progress bar, a log file or TensorBoard.

def write(report):
    if report.rank == 0:
        with open("losses.jsonl", "a") as file:
            print(json.dumps({"update": report.update, "loss": report.loss}), file=file)

engine = pipe.engine(optimizer=..., on_report=write)
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from pd2bw_fx.errors import WorkerError
from pd2bw_fx.runtime.loss import Loss

_UNDER_WAY = 4  # losses that have not arrived: at least so many, so that no rank waits for one


@dataclass(frozen=True, slots=True)
class UpdateReport:
    """What `on_report` is given for an update.

    Every rank is given one: a log that should have each update once is written where `rank` is 0.

    `loss` is the mean over the update's microbatches, `seconds` the time since the call of the update before,
    or of an evaluation after that. `numbers` holds the model's other outputs that are one number, such as the
    terms of the loss: means as well, by name.
    """

    rank: int
    update: int
    loss: float
    seconds: float
    microbatches_per_s: float
    learning_rates: tuple[float, ...]  # of the optimizer's groups, also on a rank without parameters
    numbers: Mapping[str, float]
    gradient_norm: float | None = None  # of the whole model, before it is clipped to max_gradient_norm


class LossLog:
    """Keeps losses until they have arrived, and then reports them: on all ranks alike, some updates late.

    `source` names the rank that computes a microbatch's loss. No loss is waited for to which the first of
    `num_ranks` has still to contribute gradients: after as many updates it has contributed to all.
    """

    def __init__(
        self,
        on_report: Callable[[UpdateReport], None] | None,
        *,
        rank: int,
        num_ranks: int,
        stop_at_nan: bool,
        source: Callable[[int], str],
        microbatches_per_update: int,
        learning_rates: Callable[[int], tuple[float, ...]],
        gradient_norm: Callable[[int], float | None],
    ) -> None:
        self._on_report = on_report
        self._rank = rank
        self._lateness = max(_UNDER_WAY, num_ranks)
        self._stop_at_nan = stop_at_nan
        self._source = source
        self._microbatches_per_update = microbatches_per_update
        self._learning_rates = learning_rates
        self._gradient_norm = gradient_norm
        self._under_way: deque[tuple[Loss, float]] = deque()  # losses, and the seconds of their calls
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
        """Raises WorkerError, on every rank, for a loss that is not finite; else reports it."""
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
        self._on_report(
            UpdateReport(
                rank=self._rank,
                update=loss.update,
                loss=loss.item(),
                seconds=seconds,
                microbatches_per_s=self._microbatches_per_update / seconds,
                learning_rates=self._learning_rates(loss.update),
                numbers=loss.numbers,
                gradient_norm=self._gradient_norm(loss.update),
            )
        )
