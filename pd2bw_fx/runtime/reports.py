"""What an engine tells about an update, to a progress bar, a log file or TensorBoard.

writer = SummaryWriter()
engine = pipe.engine(
    optimizer=..., on_update=lambda report: writer.add_scalar("loss", report.loss, report.update)
)
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class UpdateReport:
    """`loss` is the mean over the update's microbatches, `seconds` the time since the report before."""

    update: int
    loss: float
    seconds: float
    microbatches_per_s: float
    learning_rates: tuple[float, ...]  # of the optimizer's groups, as they are now
