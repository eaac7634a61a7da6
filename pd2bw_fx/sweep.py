"""Choices around a plan: the number of stages, the copies of the pipeline, and the microbatch size."""

from __future__ import annotations

from dataclasses import dataclass

from pd2bw_fx.plan import Plan
from pd2bw_fx.units import counted, format_seconds


def setting_name(num_stages: int, num_replicas: int, microbatch_size: int) -> str:
    """ "2 stages, 1 copy, microbatches of 4"."""
    copies = "1 copy" if num_replicas == 1 else f"{num_replicas} copies"
    return f"{counted(num_stages, 'stage')}, {copies}, microbatches of {microbatch_size}"


@dataclass(frozen=True, slots=True)
class Setting:
    """One way to train a batch, and the plan of one copy of the pipeline for it.

    `update_s` is the time of one update of `microbatches_per_update` microbatches in every copy, with the sum
    of the copies' gradients; no plan for this setting takes less than `bound_s`.
    """

    num_stages: int
    num_replicas: int
    microbatch_size: int
    microbatches_per_update: int
    update_s: float
    bound_s: float
    plan: Plan

    def __str__(self) -> str:
        return (
            f"{setting_name(self.num_stages, self.num_replicas, self.microbatch_size)}, "
            f"{self.microbatches_per_update} an update: {format_seconds(self.update_s)}"
        )


@dataclass(frozen=True, slots=True)
class Sweep:
    """Settings that were planned, fastest first, and those that were not, with the reason.

    No setting that was asked about takes less than `bound_s` for an update.
    """

    settings: tuple[Setting, ...]
    skipped: tuple[tuple[str, str], ...]
    bound_s: float

    @property
    def best(self) -> Setting:
        """The fastest setting."""
        return self.settings[0]

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        lines = [str(setting) for setting in self.settings]
        lines += [f"{name}: {reason}" for name, reason in self.skipped]
        return "\n".join(lines)
