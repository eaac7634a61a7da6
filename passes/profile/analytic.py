"""Times without a clock: operations and bytes over a device's rates, on tensors without values."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from pd2bw_fx.cluster import Device
from pd2bw_fx.costs import OperatorCost, Work

from .tape import differentiable, gradients, leaves
from .walk import Call

LAUNCH_S = 5e-6  # what calling any operator costs


def _attention_flops(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    """Scores, and values weighted by them; query: (batch, heads, time, width)."""
    return 2 * math.prod(query.shape[:-1]) * key.shape[-2] * (query.shape[-1] + value.shape[-1])


def _attention_backward_flops(
    _: Tensor, query: Tensor, key: Tensor, value: Tensor, *__: Any, **___: Any
) -> int:
    """The scores once more, then the gradients of query, key, value and of the scores."""
    widths = 3 * query.shape[-1] + 2 * value.shape[-1]
    return 2 * math.prod(query.shape[:-1]) * key.shape[-2] * widths


def _recurrent_flops(steps: Tensor, of_input: Tensor, of_hidden: Tensor, *_: Any, **__: Any) -> int:
    """Two matrix products a step; steps: (time, batch, inputs)."""
    return 2 * math.prod(steps.shape[:2]) * (of_input.numel() + of_hidden.numel())


def _recurrent_backward_flops(*args: Any, **kwargs: Any) -> int:
    return 2 * _recurrent_flops(*args, **kwargs)


# torch's own formulas, and those of what a CPU runs, which it would count as nothing.
_FORMULAS: Mapping[Any, Callable[..., int]] = {
    **flop_registry,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward_flops,
    torch.ops.aten.mkldnn_rnn_layer: _recurrent_flops,
    torch.ops.aten.mkldnn_rnn_layer_backward: _recurrent_backward_flops,
}


class _FlopCounter(TorchDispatchMode):
    """torch's own counter hooks every module call, which `torch.autograd.grad` does not survive."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        formula = _FORMULAS.get(func.overloadpacket)
        if formula is not None:
            self.flops += formula(*args, **(kwargs or {}), out_val=result)
        return result


class Estimator:
    """The roofline: an operator takes as long as its arithmetic or its memory traffic, whichever is longer.

    Arithmetic is counted by running forward and backward, on tensors without values unless `on_values`; the
    backward reads and writes twice what the forward does.
    """

    def __init__(self, device: Device, *, on_values: bool = False) -> None:
        self._device = device
        self._mode = None if on_values else FakeTensorMode(allow_non_fake_inputs=True)
        self._stack = ExitStack()
        self._work: dict[Hashable, tuple[Work, Work | None]] = {}
        self._is_done = False

    def __enter__(self) -> Estimator:
        if self._mode is not None:
            self._stack.enter_context(self._mode)
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.close()

    @property
    def device(self) -> None:
        """Nothing is computed, so it does not matter."""

    def convert(self, tensor: Tensor) -> Tensor:
        if self._mode is None:
            return tensor
        if not isinstance(tensor, FakeTensor):
            return self._mode.from_tensor(tensor, static_shapes=True)
        if tensor.fake_mode is self._mode:
            return tensor
        made = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
        return made.requires_grad_(tensor.requires_grad)

    def expect(self, keys: Collection[Hashable]) -> None:
        """Each is run once, whatever they are."""

    def wants_more(self) -> bool:
        return not self._is_done

    def end_pass(self) -> None:
        self._is_done = True

    def timed(self, key: Hashable, cost: OperatorCost) -> OperatorCost:
        forward, backward = self._work[key]
        return replace(
            cost,
            forward_s=self._roofline_s(forward),
            backward_s=0.0 if backward is None else self._roofline_s(backward),
            forward_work=forward,
            backward_work=backward,
        )

    def run(self, key: Hashable, call: Call) -> Any:
        if key in self._work:
            return call.run()
        with _FlopCounter() as counter:
            result = call.run()
            forward_flops = counter.flops
            outputs = differentiable(result)
            wanted = leaves(outputs)
            # Of bags there is nothing to count, and torch's own kernel for sizes alone fails for sparse ones.
            if wanted and "embedding_bag" not in call.target:
                seeds = [torch.ones_like(output) for output in outputs]
                gradients(outputs, wanted, seeds)
        made = [value for value in _flat(result) if isinstance(value, Tensor)]
        parameter_bytes = _num_bytes(call.parameters)
        moved_bytes = _num_bytes((*made, *call.operands))
        # Looking up rows leaves the rest of the table unread; the table's gradient is written in full.
        read_bytes = moved_bytes if "embedding" in call.target else moved_bytes + parameter_bytes
        backward = counter.flops - forward_flops, 2 * moved_bytes + 2 * parameter_bytes
        self._work[key] = (forward_flops, read_bytes), backward if wanted else None
        return result

    def _roofline_s(self, work: Work) -> float:
        return LAUNCH_S + self._device.roof_s(*work)


def _num_bytes(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.numel() * tensor.dtype.itemsize for tensor in tensors)


def _flat(value: Any) -> list[Any]:
    return [item for entry in value for item in _flat(entry)] if isinstance(value, list | tuple) else [value]
