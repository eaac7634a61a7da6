"""The gradients of the tied and replicated parameters of one rank: which are added up, and from when on.

The first update asks all ranks which of these parameters have a gradient at all. Until the answer is there,
with the step of that update, everything is added up; from the third update on, only what has gradients.
Where that differs from update to update, every sum tells by itself.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from pd2bw_fx.runtime.gradient_sums import GradientSums, TiedParameter, UseQuestion, in_buckets
from pd2bw_fx.runtime.slots import Slots


class TiedGradients:
    """Offers gradients to the sums of the coming update as they are completed.

    `like[name]` has a gradient's size and type. `uses_vary`: a parameter may have a gradient in one update
    and none in another. `allowed` is the version up to which sums may start.
    """

    def __init__(
        self,
        slots: Slots,
        ties: Sequence[TiedParameter],
        like: Mapping[str, Tensor],
        *,
        uses_vary: bool,
        allowed: float,
        device: torch.device,
    ) -> None:
        self.allowed = allowed
        self.is_completing = False  # the backward at work is the last of its stage for the coming update
        self._slots = slots
        self._ties = tuple(tied for tied in ties if tied.name in like)
        self._like = like
        self._uses_vary = uses_vary
        self._device = device
        self._question: UseQuestion | None = None  # asked with the first update
        self._used: frozenset[str] | None = None  # the answer
        self._buckets = in_buckets(self._ties, like)
        self._sums: GradientSums | None = None  # for the coming update; None: none may start before it
        self._watch()

    def close(self, version: int, gradients: Mapping[str, Tensor]) -> tuple[GradientSums, UseQuestion | None]:
        """Takes the gradients for W(version) as complete, and makes the sums for the next one.

        Returns their sums, and the question which of them there are on any rank.
        """
        is_first = self._question is None and not self._uses_vary
        if is_first:
            self._question = UseQuestion(self._ties, gradients, self._device)
        if self._sums is None and (is_first or self._uses_vary):
            self._sums = self._new_sums(is_held=True)  # they start behind the question
        if self._used is not None:
            late = sorted(t.name for t in self._ties if t.name in gradients.keys() - self._used)
            assert not late, f"{late[0]} has a gradient in W{version} for the first time: it is not added up"
        assert self._sums is not None, "the first update is made before the third is given"
        closed = self._sums
        closed.close(gradients, self._empty)
        # On all ranks, the second update adds up all ties too: some may not have the answer by then.
        is_known = is_first or self._uses_vary or self._used is not None
        self._sums = self._new_sums(is_held=version + 1 > self.allowed) if is_known else None
        return closed, self._question

    def start(self) -> None:
        """Starts the sums of the coming update, as far as its gradients are complete."""
        if self._sums is not None:
            self._sums.start()

    def follow(self, used: frozenset[str], coming: int) -> None:
        """Learns with the first update which parameters have gradients; `coming` is the version whose
        gradients are computed now."""
        if self._used is not None or self._uses_vary:
            return
        self._used = used
        self._buckets = in_buckets([tied for tied in self._ties if tied.name in used], self._like)
        if self._sums is None:
            self._sums = self._new_sums(is_held=coming > self.allowed)

    def _watch(self) -> None:
        """Registers hooks that start the sum of a gradient when the last backward has completed it.

        Where several stages of the rank use the parameter, its sum starts with the update.
        """
        for tied in self._ties:
            for slot in self._slots:
                uses = slot.parameters[tied.name]
                if len(uses) == 1:
                    uses[0].register_post_accumulate_grad_hook(  # type: ignore[no-untyped-call]
                        _offering(weakref.ref(self), tied.name)
                    )

    def _offer(self, name: str, parameter: Tensor) -> None:
        if self._sums is None or not self.is_completing or parameter.grad is None or parameter.grad.is_sparse:
            return
        elsewhere = (slot.parameters[name][0] for slot in self._slots)
        if all(use is parameter or use.grad is None for use in elsewhere):
            self._sums.offer(name, parameter.grad)

    def _new_sums(self, *, is_held: bool) -> GradientSums:
        return GradientSums(self._buckets, self._like, counted=self._uses_vary, is_held=is_held)

    def _empty(self, name: str) -> Tensor:
        return torch.zeros_like(self._like[name], memory_format=torch.contiguous_format)


def _offering(ties: weakref.ref[TiedGradients], name: str) -> Callable[[Tensor], None]:
    """Returns a hook that holds its owner weakly: Python cannot collect a cycle through autograd's hooks."""

    def offer(parameter: Tensor) -> None:
        if (alive := ties()) is not None:
            alive._offer(name, parameter)

    return offer
