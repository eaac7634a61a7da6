"""Times without a clock: operations and bytes over a device's rates, on tensors without values."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from pd2bw_fx.cluster import Device

from .walk import Call

_LAUNCH_S = 5e-6  # what calling any operator costs


class Estimator:
    """The roofline: an operator takes as long as its arithmetic or its memory traffic, whichever is longer.

    The backward of an operator has its forward's arithmetic once for each operand that needs a gradient, and
    reads and writes twice as much.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._mode = FakeTensorMode(allow_non_fake_inputs=True)
        self._stack = ExitStack()

    def __enter__(self) -> Estimator:
        self._stack.enter_context(self._mode)
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.close()

    def convert(self, tensor: Tensor) -> Tensor:
        return (
            tensor if isinstance(tensor, FakeTensor) else self._mode.from_tensor(tensor, static_shapes=True)
        )

    def measure(self, call: Call) -> tuple[float, float]:
        with FlopCounterMode(display=False) as counter:
            result = call.run()
        outputs = [value for value in _flat(result) if isinstance(value, Tensor)]
        moved = sum(t.numel() * t.dtype.itemsize for t in (*outputs, *call.operands))
        forward_s = self._roofline_s(counter.get_total_flops(), moved)
        if call.is_mutable or not any(output.requires_grad for output in outputs):
            return forward_s, 0.0
        needing = sum(operand.requires_grad for operand in call.operands) + self._parameters(outputs)
        return forward_s, self._roofline_s(counter.get_total_flops() * needing, 2 * moved)

    def _roofline_s(self, flops: float, num_bytes: float) -> float:
        return _LAUNCH_S + max(flops / self._device.flops_per_s, num_bytes / self._device.memory_bytes_per_s)

    @staticmethod
    def _parameters(outputs: list[Tensor]) -> int:
        """How many weights, not biases, these outputs' gradients flow to."""
        found: set[int] = set()
        todo, seen = [output.grad_fn for output in outputs], set()
        while todo:
            node = todo.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            variable = getattr(node, "variable", None)
            if isinstance(variable, nn.Parameter) and variable.dim() > 1:
                found.add(id(variable))
            todo += [following for following, _ in node.next_functions]
        return len(found)


def _flat(value: Any) -> list[Any]:
    return [item for entry in value for item in _flat(entry)] if isinstance(value, list | tuple) else [value]
