"""The loss of one update as scripts read it, and the means of numbers that it is one of."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from pd2bw_fx.errors import InputError

Part = tuple[Sequence[int], Tensor]


def _of_float(name: str) -> Callable[..., Any]:
    """Returns the operator of that name, as floats have it."""
    operator = getattr(float, name)

    def method(*operands: Any) -> Any:
        return operator(*(each.item() if isinstance(each, Loss) else each for each in operands))

    return method


class Means:
    """The means over an update's microbatches of the numbers that a stage returns, once they have arrived.

    `parts` holds, for each of the stage's ranks, the numbers of its microbatches, and a tensor with a row for
    each of them and a column for each of `names`. `wait` returns when all parts are here and this rank's own
    have left it. `is_known_here`: this rank has computed all of them.
    """

    __slots__ = ("_wait", "is_known_here", "names", "parts")

    def __init__(
        self, names: tuple[str, ...], parts: Sequence[Part], wait: Callable[[], None], *, is_known_here: bool
    ) -> None:
        self.names = names
        self.parts = parts
        self.is_known_here = is_known_here
        self._wait: Callable[[], None] | None = wait

    def wait(self) -> None:
        if self._wait is not None:
            self._wait()
            self._wait = None

    def values(self) -> list[float]:
        """Returns the means in the order of the names."""
        rows = [row for _, tensor in self.parts for row in tensor.tolist()]
        return [sum(column) / len(rows) for column in zip(*rows, strict=True)]

    def first_broken(self) -> int | None:
        """Returns the first microbatch whose first number is not finite."""
        broken = (
            number
            for numbers, tensor in self.parts
            for number, row in zip(numbers, tensor.tolist(), strict=True)
            if not math.isfinite(row[0])
        )
        return min(broken, default=None)

    def as_read(self) -> Means:
        """Returns the means for a reader on this rank, who need not wait for what was computed here."""
        return Means(self.names, self.parts, _nothing, is_known_here=True) if self.is_known_here else self


def _nothing() -> None:
    """Waits for nothing."""


class _LikeATensor:
    """Methods of tensors that scripts call on a loss before they read it."""

    __slots__ = ()

    def detach(self, *_: Any, **__: Any) -> Self:
        return self

    cpu = cuda = to = float = double = clone = mean = __copy__ = __deepcopy__ = detach
    data = property(detach)

    def backward(self, *_: Any, **__: Any) -> None:
        """Raises InputError: the engine does the backward."""
        raise InputError(
            "engine.step(batch) has done the forward, and does the backward and the optimizer's step; leave "
            "loss.backward(), optimizer.step() and optimizer.zero_grad() out"
        )


class Loss(_LikeATensor):
    """The loss of an update. It behaves like a float, also to numpy, and like a tensor to torch's functions.

    Reading it waits until the last stage has computed it. What scripts do with a loss that is a tensor
    without reading it (`detach()`, `cpu()`, `float()`) returns the loss itself. pickle and torch.save write a
    tensor of its value. Where only a float will do (json.dumps, torch.tensor, statistics.mean), pass
    float(loss).

    On all ranks but that of the loss, a read right after `step` waits until the update's last microbatch has
    gone through the whole pipeline. Read the loss of the step before, or every tenth one, and no rank waits.
    With pipedream, pb and pipemare, tied parameters or `max_gradient_norm` make the last stage wait for
    gradients that come some steps later: a read before that raises InputError.
    """

    __slots__ = ("_means", "is_of_training", "update")

    def __init__(self, update: int, means: Sequence[Means], *, is_of_training: bool = True) -> None:
        """Takes the means of each stage that returns numbers; the first of the first ones is the loss."""
        self.update = update
        self.is_of_training = is_of_training
        self._means = means

    def wait(self) -> None:
        """Returns once the value is on this rank."""
        for means in self._means:
            means.wait()

    def as_read(self) -> Loss:
        """Returns the loss for a reader on this rank, who need not wait for what was computed here."""
        return Loss(
            self.update, [means.as_read() for means in self._means], is_of_training=self.is_of_training
        )

    def item(self) -> float:
        """Returns the value, once it is on this rank."""
        self._means[0].wait()
        return self._means[0].values()[0]

    def tolist(self) -> Any:
        """Returns `item()`, like a tensor's."""
        return self.item()

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        given = pytree.tree_map_only(Loss, Loss._as_tensor, (args, kwargs or {}))
        return function(*given[0], **given[1])

    def _as_tensor(self) -> Tensor:
        return torch.tensor(self.item(), device="cpu")

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickles the loss as a tensor: it waits for this process's links, and torch.load refuses our
        classes.
        """
        return torch.tensor(self.item(), dtype=torch.float64, device="cpu").__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    @property
    def numbers(self) -> dict[str, float]:
        """The model's other outputs that are numbers, by name: means over the microbatches, like the loss.

        The mean of a count is the count in a microbatch, that of a bool the share in which it is true.
        """
        self.wait()
        arrived: dict[str, float] = {}
        for means in self._means:
            arrived |= zip(means.names, means.values(), strict=True)
        del arrived[self._means[0].names[0]]
        return arrived

    def broken_microbatch(self) -> int | None:
        """Returns the first microbatch whose loss is not finite."""
        self._means[0].wait()
        return self._means[0].first_broken()

    def __float__(self) -> float:
        return self.item()

    def __int__(self) -> int:
        return int(self.item())

    def __format__(self, spec: str) -> str:
        return format(self.item(), spec)

    def __repr__(self) -> str:
        return repr(self.item())

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return np.asarray(self.item(), dtype=dtype)

    __add__ = _of_float("__add__")
    __radd__ = _of_float("__radd__")
    __sub__ = _of_float("__sub__")
    __rsub__ = _of_float("__rsub__")
    __mul__ = _of_float("__mul__")
    __rmul__ = _of_float("__rmul__")
    __truediv__ = _of_float("__truediv__")
    __rtruediv__ = _of_float("__rtruediv__")
    __floordiv__ = _of_float("__floordiv__")
    __rfloordiv__ = _of_float("__rfloordiv__")
    __mod__ = _of_float("__mod__")
    __rmod__ = _of_float("__rmod__")
    __divmod__ = _of_float("__divmod__")
    __rdivmod__ = _of_float("__rdivmod__")
    __pow__ = _of_float("__pow__")
    __rpow__ = _of_float("__rpow__")
    __neg__ = _of_float("__neg__")
    __abs__ = _of_float("__abs__")
    __round__ = _of_float("__round__")
    __bool__ = _of_float("__bool__")
    __lt__ = _of_float("__lt__")
    __le__ = _of_float("__le__")
    __gt__ = _of_float("__gt__")
    __ge__ = _of_float("__ge__")
    __eq__ = _of_float("__eq__")
    __hash__ = _of_float("__hash__")
