"""Corrections for the delay of methods without weight versions.

The forwards of a stage run D updates before their backwards; D is 0 at the last stage. A correction changes
the weights that forwards or backwards run on, or the optimizer's step:

    SpikeCompensation    step by w - lr (a v + b g), a = m^D, b = (1 - m^D) / (1 - m)      (arXiv 2003.11666)
    WeightPrediction     forwards on the weights as they will be at the backward           (arXiv 2003.11666)
    PipeMare             smaller steps at first, backwards on the weights as they were     (arXiv 1910.05124)

All follow the published descriptions; tests hold them to the identities and stability limits given there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeVar

import torch
from torch import Tensor
from torch.optim import SGD, Optimizer

from pd2bw_fx.errors import InputError
from pd2bw_fx.runtime.slots import Flat, Span


@dataclass(frozen=True, slots=True)
class SpikeCompensation:
    """Adds at once the momentum that a gradient would have gathered during its delay.

    It needs torch.optim.SGD with momentum, without dampening, Nesterov and weight decay.
    """


@dataclass(frozen=True, slots=True)
class WeightPrediction:
    """Runs forwards on w - lr D v ("velocity", of SGD with momentum) or w + D (w(t) - w(t-1)) ("weights")."""

    form: Literal["velocity", "weights"] = "velocity"


@dataclass(frozen=True, slots=True)
class PipeMare:
    """The three techniques of PipeMare.

    - T1: the learning rate is lr / D^(1 - min(k/K, 1)) at update k, K = `rescale_updates`; 0 leaves it out.
    - T2: backwards run on w - D delta, delta the running mean of the weights' changes with the factor `decay`
      ^ (1/D); None leaves it out.
    - T3: the first `synchronous_updates` are those of 1f1b.
    """

    rescale_updates: int = 0
    decay: float | None = 0.135
    synchronous_updates: int = 0


Correction = SpikeCompensation | WeightPrediction | PipeMare
_T = TypeVar("_T", bound=Correction)


def corrections_of(method: str) -> tuple[Correction, ...]:
    """Returns a method's default corrections: PipeMare is its discrepancy correction."""
    return (PipeMare(),) if method == "pipemare" else ()


class Corrector:
    """Applies corrections on a rank whose forwards run `delay` updates before their backwards.

    Where a forward or backward is to run on other weights than the newest, the newest have a buffer of their
    own, `newest`, and those other weights are written to the slot that modules compute with. Otherwise both
    are one buffer.
    """

    def __init__(self, corrections: Sequence[Correction], delay: int) -> None:
        self._delay = delay
        self._prediction = _only(corrections, WeightPrediction)
        self._compensation = _only(corrections, SpikeCompensation)
        self._pipemare = _only(corrections, PipeMare)
        self._updates = 0
        self._shown = "newest"
        self.newest: Flat = {}
        self._change: Flat = {}  # the last update's, or the running mean: what is predicted or corrected by

    def watch(self, seen: Flat, spans: Mapping[str, Span]) -> None:
        """Takes the slot that modules compute with, `seen`, which is laid out in `spans`."""
        self._seen = seen
        self._spans = spans
        goes_back = self._pipemare is not None and self._pipemare.decay is not None
        if self._delay == 0 or (self._prediction is None and not goes_back):
            self.newest = seen
            return
        self.newest = {dtype: flat.clone() for dtype, flat in seen.items()}
        if goes_back or (self._prediction is not None and self._prediction.form == "weights"):
            self._change = {dtype: torch.zeros_like(flat) for dtype, flat in seen.items()}

    def check(self, optimizer: Optimizer) -> None:
        """Raises InputError for an optimizer that a correction does not support."""
        of_velocity = self._prediction is not None and self._prediction.form == "velocity"
        if self._compensation is None and not of_velocity:
            return
        who = "SpikeCompensation" if self._compensation is not None else 'WeightPrediction("velocity")'
        plain = isinstance(optimizer, SGD) and all(
            group["momentum"] > 0
            and not group["dampening"]
            and not group["nesterov"]
            and not group["maximize"]
            and (self._compensation is None or not group["weight_decay"])
            for group in optimizer.param_groups
        )
        if not plain:
            raise InputError(
                f"{who} is made for torch.optim.SGD with momentum, without dampening, Nesterov and weight "
                f"decay; found {type(optimizer).__name__}({_described(optimizer)})"
            )

    def show_forward(self, optimizer: Optimizer | None) -> None:
        if self._prediction is None or self.newest is self._seen:
            self.show_newest()
        elif self._shown != "prediction":
            self._predict(self._prediction, optimizer)
            self._shown = "prediction"

    def show_backward(self) -> None:
        goes_back = self._pipemare is not None and self._pipemare.decay is not None
        if not goes_back or self.newest is self._seen or self._begun < 0:
            self.show_newest()
        elif self._shown != "past":
            for dtype, flat in self._seen.items():
                torch.add(self.newest[dtype], self._change[dtype], alpha=-self._delay, out=flat)
            self._shown = "past"

    def show_newest(self) -> None:
        if self._shown != "newest" and self.newest is not self._seen:
            for dtype, flat in self._seen.items():
                flat.copy_(self.newest[dtype])
        self._shown = "newest"

    def step(self, optimizer: Optimizer, step: Callable[[], None]) -> None:
        """Makes the optimizer's step on `newest` by calling `step`, and corrects it."""
        for dtype in self._change:  # the slot is free until something is shown in it again
            self._seen[dtype].copy_(self.newest[dtype])
        rates = [group["lr"] for group in optimizer.param_groups]
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * self._rate_factor()
        step()
        if self._compensation is not None and self._delay:
            self._compensate(optimizer)
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        kept = self._share_kept()
        for dtype, change in self._change.items():
            moved = torch.sub(self.newest[dtype], self._seen[dtype], out=self._seen[dtype])
            change.mul_(kept).add_(moved, alpha=1 - kept)
        self._updates += 1
        self._shown = "none"  # neither what forwards see nor what backwards see is there now

    def state(self) -> dict[str, Tensor]:
        """Returns what the corrections remember, by parameter."""
        return {name: span.view(self._change) for name, span in self._spans.items() if self._change}

    def load(self, kept: Mapping[str, Tensor], updates: int) -> None:
        for name, span in self._spans.items():
            if name in kept and self._change:
                span.view(self._change).copy_(kept[name])
        self._updates = updates
        if self.newest is not self._seen:
            for dtype, flat in self._seen.items():
                self.newest[dtype].copy_(flat)
        self._shown = "newest"

    @property
    def _begun(self) -> int:
        """Updates since the synchronous ones at the beginning; negative during them."""
        return self._updates - (0 if self._pipemare is None else self._pipemare.synchronous_updates)

    def _rate_factor(self) -> float:
        pipemare = self._pipemare
        if pipemare is None or self._delay <= 1 or not pipemare.rescale_updates or self._begun < 0:
            return 1.0
        annealed = min(self._begun / pipemare.rescale_updates, 1.0)
        return float(self._delay ** -(1.0 - annealed))

    def _share_kept(self) -> float:
        if self._pipemare is None or self._pipemare.decay is None or self._delay == 0:
            return 0.0
        return float(self._pipemare.decay ** (1.0 / self._delay))

    def _predict(self, prediction: WeightPrediction, optimizer: Optimizer | None) -> None:
        if prediction.form == "weights":
            for dtype, flat in self._seen.items():
                torch.add(self.newest[dtype], self._change[dtype], alpha=self._delay, out=flat)
            return
        for dtype, flat in self._seen.items():
            flat.copy_(self.newest[dtype])
        groups = [] if optimizer is None else optimizer.param_groups
        velocities = {
            parameter.data_ptr(): (group["lr"], optimizer.state[parameter].get("momentum_buffer"))
            for group in groups
            for parameter in group["params"]
            if optimizer is not None
        }
        for span in self._spans.values():
            lr, velocity = velocities.get(span.view(self.newest).data_ptr(), (0.0, None))
            if velocity is not None:
                span.view(self._seen).add_(velocity, alpha=-lr * self._delay)

    def _compensate(self, optimizer: Optimizer) -> None:
        """Turns w - lr v, the step that SGD has made, into w - lr (a v + b g)."""
        with torch.no_grad():
            for group in optimizer.param_groups:
                momentum, lr = group["momentum"], group["lr"]
                a, b = spike_coefficients(momentum, self._delay)
                for parameter in group["params"]:
                    velocity = optimizer.state[parameter].get("momentum_buffer")
                    if parameter.grad is not None and velocity is not None:
                        parameter.add_(velocity, alpha=lr * (1.0 - a))
                        parameter.add_(parameter.grad, alpha=-lr * b)


def spike_coefficients(momentum: float, delay: int) -> tuple[float, float]:
    """Returns a and b of spike compensation: a / (1 - m) + b = 1 / (1 - m).

    A delay of 1 is Nesterov's momentum.
    """
    return momentum**delay, (1.0 - momentum**delay) / (1.0 - momentum)


def _only(corrections: Sequence[Correction], kind: type[_T]) -> _T | None:
    found = [correction for correction in corrections if isinstance(correction, kind)]
    if len(found) > 1:
        raise InputError(f"{kind.__name__} is given {len(found)} times; once is enough")
    return found[0] if found else None


def _described(optimizer: Optimizer) -> str:
    wanted = ("momentum", "dampening", "nesterov", "weight_decay")
    group = optimizer.param_groups[0]
    return ", ".join(f"{key}={group[key]}" for key in wanted if key in group)
