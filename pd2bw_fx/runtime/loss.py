"""The loss of one update: known on one rank, on its way to the others."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor


class Loss:
    """Behaves as the float that it is; reading it waits until the last stage has it.

    On all but the rank of the loss, a read right after `step` stands still until the update's last
    microbatch has gone through the whole pipeline. Read the loss of the step before, or every tenth one,
    and no rank waits.
    """

    __slots__ = ("_value", "_wait", "update")

    def __init__(self, update: int, value: Tensor, wait: Callable[[], None] | None = None) -> None:
        self.update = update
        self._value = value
        self._wait = wait

    def wait(self) -> None:
        if self._wait is not None:
            self._wait()
            self._wait = None

    def item(self) -> float:
        self.wait()
        return float(self._value)

    def __float__(self) -> float:
        return self.item()

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec)

    def __repr__(self) -> str:
        return repr(self.item())
