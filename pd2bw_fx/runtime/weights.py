"""The weights of one rank in the versions that its method keeps, and the update that makes the next one.

    2bw, two slots     W(0) . . W(2) . .      version v lives in slot v % 2
                       . W(1) . . W(3) .

An update copies the newest version to the next slot and steps the optimizer there. Microbatches in flight
keep the version that they began with: their saved tensors are views of a slot that nobody writes until their
backward is done. Methods without versions write their only slot while microbatches are in flight, on purpose.

An update to which other ranks contribute (tied or replicated parameters, the norm of the whole gradient) is
pending until its version is needed; gradients that are computed meanwhile belong to the next update. Two
updates may be pending: with 2BW and much slack, the last stage ends its step of update u before the first
stage has contributed to update u - 1, and the user's program may synchronize all ranks in between.

An nccl all-reduce occupies a GPU until all its ranks have come to it, and many CUDA calls wait until the GPU
is idle. Over nccl, a sum therefore starts in the engine call in which its last rank comes to it, not before.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from pd2bw_fx.errors import InputError
from pd2bw_fx.graph import ParameterSpec
from pd2bw_fx.grouped_products import compile_products_of_all_types
from pd2bw_fx.runtime.checkpoint import Checkpoint, RankState, random_state
from pd2bw_fx.runtime.corrections import Corrector
from pd2bw_fx.runtime.gradient_sums import TiedParameter
from pd2bw_fx.runtime.optimizing import (
    OptimizerFactory,
    ParameterOptions,
    RankOptimizer,
    SchedulerFactory,
)
from pd2bw_fx.runtime.slots import Slots
from pd2bw_fx.runtime.tied_gradients import TiedGradients
from pd2bw_fx.runtime.update import Clipping, GradientNorm, LossScale, PendingUpdate, Step
from pd2bw_fx.runtime.weight_average import WeightAverage
from pd2bw_fx.stage import StageProgram

_MOST_PENDING = 2  # updates; each keeps its gradients
_RATES_KEPT = 1024  # learning rates and norms of so many updates: a loss is reported fewer updates late


class WeightStore:
    """Holds the versions W(v) of the parameters of a rank's stages, `num_versions` of them alive at a time.

    `keeps_versions`: no version is overwritten while a microbatch that began on it is in flight. `uses_vary`:
    a tied parameter may have a gradient in one update and none in another. `sums_allowed` is the version up
    to which sums over ranks may start.
    """

    def __init__(
        self,
        programs: Sequence[StageProgram],
        tensors: Mapping[str, Tensor],
        *,
        trainable: Iterable[str],
        num_versions: int,
        device: torch.device,
        keeps_versions: bool = True,
        ties: Sequence[TiedParameter] = (),
        uses_vary: bool = False,
        sums_allowed: float = math.inf,
        clipping: Clipping | None = None,
        loss_scale: LossScale | None = None,
        corrector: Corrector | None = None,
        average_decay: float | None = None,
    ) -> None:
        self.newest = 0
        self.num_versions = num_versions
        self._device = device
        self._keeps_versions = keeps_versions
        self._slots = Slots(programs, tensors, trainable=set(trainable), count=num_versions, device=device)
        self._spans = self._slots.spans
        self._clipping = clipping
        self._loss_scale = loss_scale
        self._corrector = corrector
        if corrector is not None:
            corrector.watch(self._slots[0].flat, self._spans)
        self._pending: deque[PendingUpdate] = deque()
        self._steps: deque[Step] = deque(maxlen=_MOST_PENDING + 1)
        self._rates: dict[int, tuple[float, ...]] = {}  # learning rates of the last versions
        self._norms: dict[int, GradientNorm] = {}  # of their gradients, where those are clipped
        stepped = [slot.flat if corrector is None else corrector.newest for slot in self._slots]
        self._stepped = [{name: p.view(flat) for name, p in self._spans.items()} for flat in stepped]
        # The optimizer's parameters: stepped in the slot that is being made.
        self._aliases = {name: nn.Parameter(view) for name, view in self._stepped[0].items()}
        self._average = None if average_decay is None else WeightAverage(average_decay, self._stepped[0])
        self._users = [0] * num_versions
        self._ran_on = 0  # the version of the last backward
        self._held_elsewhere = [tie.name for tie in ties]
        self._ties = TiedGradients(
            self._slots, ties, self._aliases, uses_vary=uses_vary, allowed=sums_allowed, device=device
        )
        self._optimizer = RankOptimizer({}, (), torch.optim.SGD)

    def optimize_with(
        self,
        optimizer: OptimizerFactory,
        scheduler: SchedulerFactory | None = None,
        parameter_options: ParameterOptions | None = None,
        *,
        everywhere: Iterable[ParameterSpec] = (),
    ) -> None:
        """Makes the optimizer of this rank's trainable parameters, in the order of the graph.

        `everywhere` are the trainable parameters of the whole model: `parameter_options` is called for each.
        """
        self._optimizer = RankOptimizer(self._aliases, everywhere, optimizer, scheduler, parameter_options)
        if self._corrector is not None and self._optimizer.optimizer is not None:
            self._corrector.check(self._optimizer.optimizer)

    def compile(self, options: Mapping[str, Any]) -> None:
        """Has torch.compile compile the stages' modules, each in its first calls."""
        compile_products_of_all_types()
        for slot in self._slots:
            for module in slot.modules.values():
                module.compile(**options)

    @property
    def _coming(self) -> int:
        """The version whose gradients are computed now."""
        return self.newest + len(self._pending) + 1

    def learning_rates(self, update: int) -> tuple[float, ...]:
        """Returns the rates of the optimizer's groups in one of the last updates, else in the coming one."""
        return self._rates.get(update + 1, self._optimizer.learning_rates)

    def gradient_norm(self, update: int) -> float | None:
        """Returns the norm of the whole model's gradient in one of the last updates.

        None where gradients are not clipped.
        """
        norm = self._norms.get(update + 1)
        return None if norm is None else norm.item()

    def module(self, stage: int, version: int) -> nn.Module:
        """Returns a stage's module with the weights of a version that is alive."""
        while self._pending and self._pending[0].version <= version:
            self._finish_first()
        assert self.newest - self.num_versions < version <= self.newest, f"W{version} is not alive"
        return self._slots[version % self.num_versions].modules[stage]

    def begin_forward(self, stage: int, version: int, *, in_flight: bool) -> nn.Module:
        """Returns the module for a forward. `in_flight`: a backward will follow."""
        module = self.module(stage, version)
        if in_flight and self._keeps_versions:
            self._users[version % self.num_versions] += 1
        if self._corrector is not None and in_flight:
            self._corrector.show_forward(self._optimizer.optimizer)
        return module

    def begin_backward(self, stage: int, version: int) -> nn.Module:
        """Returns the module for a backward, whose weights autograd and recomputation will read."""
        module = self.module(stage, version)
        if self._corrector is not None:
            self._corrector.show_backward()
        return module

    def begin_action(self, *, completes_gradients: bool) -> None:
        """`completes_gradients`: it is the last backward of its stage for the coming update, and the sums of
        tied gradients start as soon as those are computed."""
        self._ties.is_completing = completes_gradients

    def end_backward(self, version: int) -> None:
        """Notes that the whole backward of a microbatch on this version is done."""
        self._ran_on = version
        if self._keeps_versions:
            self._users[version % self.num_versions] -= 1

    def loss_scale(self, version: int) -> float:
        """Returns what the loss of a microbatch on this version is multiplied by for its backward."""
        return 1.0 if self._loss_scale is None else self._loss_scale.of(version)

    def update(self, version: int) -> None:
        """Takes the gradients that the backwards have left for W(version), which is made once needed."""
        while self._pending and (self._pending[0].has_arrived or len(self._pending) == _MOST_PENDING):
            self._finish_first()
        assert version == self._coming, f"W{version} made after W{self.newest}"
        gradients = self._taken_gradients()
        sums, question = self._ties.close(version, gradients)
        pending = PendingUpdate(
            version,
            gradients,
            sums,
            question,
            self._clipping,
            self._device,
            self.loss_scale(self._ran_on),
            may_overflow=self._loss_scale is not None,
        )
        self._pending.append(pending)
        self.progress()
        while self._pending and not self._pending[0].can_wait:
            self._finish_first()

    def progress(self, *, needed: int | None = None) -> None:
        """Lets pending updates go on.

        It waits for other ranks only where they may wait for the version `needed`.
        """
        if not self._pending:
            return
        may = self._ties.allowed if needed is None else max(self._ties.allowed, needed)
        going = [pending for pending in self._pending if pending.version <= may]
        for pending in going:
            pending.start()
        for pending in going:
            pending.progress(must=needed is not None and pending.version <= needed)
            if not pending.is_squaring:
                break  # all ranks start the sums of squares in the same order

    def allow_sums(self, version: int) -> None:
        """Allows sums up to this version: all ranks come to them in the current call at the latest."""
        self._ties.allowed = version
        self.progress()
        if self._coming <= version:
            self._ties.start()

    def complete_sums(self, version: int, *, finish: bool) -> None:
        """Completes the sums up to this version at the end of the call in which all ranks have come to them.

        Otherwise a rank could wait for another one's next call. `finish`: makes the versions too.
        """
        self._ties.allowed = version
        self.progress(needed=version)
        while finish and self._pending and self._pending[0].version <= version:
            self._finish_first()

    def finish_update(self) -> None:
        """Makes the versions that are pending, if any are."""
        while self._pending:
            self._finish_first()

    def _finish_first(self) -> None:
        pending = self._pending.popleft()
        began_s = time.perf_counter()
        gradients = pending.finish()
        added_s = time.perf_counter()
        self._ties.follow(pending.used, self._coming + 1)  # the pending one has been taken out
        source, target = self.newest % self.num_versions, pending.version % self.num_versions
        assert self._users[target] == 0, f"W{pending.version} overwrites weights that a microbatch needs"
        if source != target:
            for dtype, flat in self._slots[target].flat.items():
                flat.copy_(self._slots[source].flat[dtype])
        if self._loss_scale is not None:
            self._loss_scale.follow(pending.version, overflow=gradients is None)
        self._rates[pending.version] = self._optimizer.learning_rates
        if pending.norm is not None:
            self._norms[pending.version] = pending.norm
        for told in (self._rates, self._norms):
            told.pop(pending.version - _RATES_KEPT, None)
        if gradients is not None:
            self._step(target, gradients)
            if self._average is not None:
                self._average.follow(self._stepped[target])
        self.newest = pending.version
        self._steps.append(Step(pending.version, began_s, added_s, time.perf_counter()))

    def take_steps(self) -> list[Step]:
        """Returns the updates that were made since the last call of this method, three at most."""
        taken = list(self._steps)
        self._steps.clear()
        return taken

    def tensors(self) -> dict[str, Tensor]:
        """Returns the parameters of the newest version, buffers and constants, by name in the graph."""
        self.finish_update()
        self._show_newest()
        held = {**self._slots.parameters(self.newest % self.num_versions), **self._slots.buffers()}
        return {name: tensor.detach() for name, tensor in held.items()}

    def averages(self) -> dict[str, Tensor] | None:
        """Returns the averages of the trainable parameters by name; None where none are kept."""
        self.finish_update()
        return None if self._average is None else self._average.tensors()

    def state(self) -> RankState:
        """Returns all state from which training can go on. No microbatch may be in flight."""
        self.finish_update()
        self._show_newest()
        assert not any(self._users), "microbatches are in flight"
        tensors: dict[str, Tensor] = {}
        for age in range(self.num_versions):
            for name, parameter in self._slots.parameters((self.newest - age) % self.num_versions).items():
                tensors[f"weights_{age}/{name}"] = parameter
        for name, buffer in self._slots.buffers().items():
            tensors[f"buffer/{name}"] = buffer
        if self._average is not None:
            tensors |= {f"average/{name}": average for name, average in self._average.state().items()}
        of_optimizer, plain = self._optimizer.state()
        tensors |= of_optimizer
        if self._corrector is not None:
            for key, tensor in self._corrector.state().items():
                tensors[f"correction/{key}"] = tensor
        return RankState(
            tensors,
            **plain,
            loss_scale=None if self._loss_scale is None else self._loss_scale.state(),
            random=random_state(self._device),
        )

    def first_not_finite(self) -> str | None:
        """Returns the name of a parameter whose newest values are not all finite, or None."""
        found, parameters = self.tensors(), self._slots.parameters(0)
        return next((name for name in parameters if not found[name].isfinite().all()), None)

    def load(self, checkpoint: Checkpoint) -> None:
        """Loads what `state` returned, on this rank or on the ranks that held its parameters then."""
        updates = checkpoint.header.updates
        parameters, buffers = self._slots.parameters(0), self._slots.buffers()
        needed = [f"weights_{age}/{name}" for age in range(self.num_versions) for name in parameters]
        wanted = [f"buffer/{name}" for name in buffers] + [f"optimizer/{name}" for name in self._aliases]
        averaged = [f"average/{name}" for name in self._aliases] if self._average is not None else []
        found = checkpoint.tensors([*needed, *wanted, *averaged, "correction"])
        missing = [key for key in needed if key not in found]
        if missing:
            raise InputError(
                f"{checkpoint.path} has no {missing[0]!r}: it was written by {checkpoint.header.method} on "
                f"{checkpoint.header.num_stages} stages, which keeps fewer weight versions than the "
                f"{self.num_versions} that are needed here; begin from the weights alone"
            )
        with torch.no_grad():
            for age in range(self.num_versions):
                kept = self._slots.parameters((updates - age) % self.num_versions)
                for name, parameter in kept.items():
                    parameter.copy_(found[f"weights_{age}/{name}"])
            for name, buffer in buffers.items():
                saved = found.get(f"buffer/{name}", buffer)
                if saved.shape == buffer.shape:  # another shape: a constant of another trace
                    buffer.copy_(saved)
        self.newest = updates
        self._optimizer.load(checkpoint, found)
        if self._loss_scale is not None and checkpoint.loss_scale is not None:
            self._loss_scale.load(checkpoint.loss_scale, updates)
        elif self._loss_scale is not None:
            self._loss_scale.begin_at(updates)
        self._rates.clear()
        self._norms.clear()
        if self._corrector is not None:
            changes = {k.partition("/")[2]: v for k, v in found.items() if k.startswith("correction/")}
            self._corrector.load(changes, updates)
        if self._average is not None:
            averages = {k.partition("/")[2]: v for k, v in found.items() if k.startswith("average/")}
            self._average.load(averages, self._stepped[updates % self.num_versions])

    def train(self, *, on: bool) -> None:
        self._show_newest()
        self._slots.train(on=on)

    def _show_newest(self) -> None:
        if self._corrector is not None:
            self._corrector.show_newest()

    def _step(self, target: int, gradients: Mapping[str, Tensor]) -> None:
        optimizer = self._optimizer.optimizer
        if optimizer is None:
            self._optimizer.step_scheduler()  # its rates are reported
            return
        stepped = self._stepped[target]
        for name, alias in self._aliases.items():
            alias.data = stepped[name]
            # No gradient is not a zero gradient: AdamW decays the weight for the one, and not for the other.
            alias.grad = gradients.get(name)
        if self._corrector is None:
            self._step_in_place(target)
        else:
            self._corrector.step(optimizer, lambda: self._step_in_place(target))
        for alias in self._aliases.values():
            alias.grad = None
        self._optimizer.step_scheduler()

    def _step_in_place(self, target: int) -> None:
        """Steps the optimizer, and copies back what it has put into other memory.

        An optimizer may do `p.data = p.data - lr * p.grad`.
        """
        self._optimizer.step(held_elsewhere=self._held_elsewhere)
        for name, view in self._stepped[target].items():
            alias = self._aliases[name]
            if alias.data_ptr() != view.data_ptr():
                view.copy_(alias.detach())

    def _taken_gradients(self) -> dict[str, Tensor]:
        """Returns the gradients of all slots. With one version an update, as in 2BW, one slot has all."""
        taken: dict[str, Tensor] = {}
        for slot in self._slots:
            for name, gradient in slot.take_gradients().items():
                # Stashing with several microbatches an update: they may have begun on different versions.
                taken[name] = taken[name] + gradient if name in taken else gradient
        return taken
