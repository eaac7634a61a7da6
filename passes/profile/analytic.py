"""Estimates times: operations and bytes over a device's rates, from tensors without values."""

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

from pd2bw_fx import grouped_products
from pd2bw_fx.costs import OperatorCost, Work
from pd2bw_fx.device import Device

from .tape import differentiable, gradients, leaves
from .walk import Call

LAUNCH_S = 5e-6  # the cost of calling any operator

# Operators that look rows up: of each operand they read no more bytes than they return.
_LOOKING_UP = frozenset(
    {"embedding", "embedding_bag", "Embedding", "EmbeddingBag", "index", "index_select", "gather", "take"}
    | {"take_along_dim", "getitem"}
)


def _attention_flops(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    """Counts the scores, and the values weighted by them; query: (batch, heads, time, width)."""
    return 2 * math.prod(query.shape[:-1]) * key.shape[-2] * (query.shape[-1] + value.shape[-1])


def _attention_backward_flops(
    _: Tensor, query: Tensor, key: Tensor, value: Tensor, *__: Any, **___: Any
) -> int:
    """Counts the scores once more, then the gradients of query, key, value and the scores."""
    widths = 3 * query.shape[-1] + 2 * value.shape[-1]
    return 2 * math.prod(query.shape[:-1]) * key.shape[-2] * widths


def _recurrent_flops(steps: Tensor, of_input: Tensor, of_hidden: Tensor, *_: Any, **__: Any) -> int:
    """Counts two matrix products a step; steps: (time, batch, inputs)."""
    return 2 * math.prod(steps.shape[:2]) * (of_input.numel() + of_hidden.numel())


def _recurrent_backward_flops(*args: Any, **kwargs: Any) -> int:
    return 2 * _recurrent_flops(*args, **kwargs)


def _convolution_backward_flops(
    gradient: Tensor,
    operand: Tensor,
    weight: Tensor,
    _sizes: Any,
    _stride: Any,
    _padding: Any,
    _dilation: Any,
    is_transposed: bool,
    _output_padding: Any,
    _groups: int,
    output_mask: Sequence[bool],
    **_: Any,
) -> int:
    """Counts as much for each of the two gradients as for the forward.

    weight: (out, in / groups, *window), or (in, out / groups, *window) if transposed.
    """
    moved = operand if is_transposed else gradient  # each of its positions meets each weight of a channel
    forward = 2 * moved.shape[0] * math.prod(moved.shape[2:]) * weight.numel()
    return forward * sum(output_mask[:2])


# torch's own formulas, and some for operators of a CPU, which torch counts as nothing. Torch's formula for
# the gradient of a convolution's weight leaves the groups out.
_FORMULAS: Mapping[Any, Callable[..., int]] = {
    **flop_registry,
    torch.ops.aten.convolution_backward: _convolution_backward_flops,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward_flops,
    torch.ops.aten.mkldnn_rnn_layer: _recurrent_flops,
    torch.ops.aten.mkldnn_rnn_layer_backward: _recurrent_backward_flops,
    torch.ops.aten._grouped_mm: grouped_products.operations,
}
_FORMULAS_OF_OTHERS: Mapping[str, Callable[..., int]] = {
    grouped_products.HUGGING_FACES: grouped_products.operations,
    f"{grouped_products.HUGGING_FACES}_backward": grouped_products.operations_of_gradients,
}


class _FlopCounter(TorchDispatchMode):
    """Counts operations. torch's own counter hooks every module call, which breaks `torch.autograd.grad`."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.flops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        called = func.overloadpacket
        # A formula of the user's may have been registered since.
        formula = _FORMULAS.get(called) or flop_registry.get(called)
        formula = formula or _FORMULAS_OF_OTHERS.get(called._qualified_op_name)
        if formula is not None:
            self.flops += formula(*args, **(kwargs or {}), out_val=result)
        return result


class Estimator:
    """The roofline model: an operator takes as long as its arithmetic or its memory traffic, the longer of
    both.

    Arithmetic is counted by running forward and backward, on tensors without values unless `on_values`. The
    backward moves twice the bytes of the forward, and the whole of tables that the forward looks rows up in.
    Views move nothing.
    """

    def __init__(self, device: Device, *, on_values: bool = False) -> None:
        self._device = device
        self._mode = None if on_values else FakeTensorMode(allow_non_fake_inputs=True)
        self._stack = ExitStack()
        self._work: dict[Hashable, tuple[Work | None, Work | None]] = {}

    def __enter__(self) -> Estimator:
        self._stack.enter_context(grouped_products.size_products_of_all_types())
        if self._mode is not None:
            self._stack.enter_context(self._mode)
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.close()

    @property
    def device(self) -> None:
        """None: nothing is computed, so any device will do."""

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
        """Does nothing: each call has been run, and that is enough."""

    def wants_more(self) -> bool:
        return False

    def run(self, key: Hashable, call: Call) -> Any:
        return call.run()

    def end_pass(self) -> None:
        """Does nothing."""

    def timed(self, key: Hashable, cost: OperatorCost) -> OperatorCost:
        forward, backward = self._work[key]
        return replace(
            cost,
            forward_s=self._roofline_s(forward),
            backward_s=self._roofline_s(backward),
            forward_work=forward,
            backward_work=backward,
        )

    def first(self, key: Hashable, call: Call) -> Any:
        if key in self._work:
            return call.run()
        with _FlopCounter() as counter:
            result = call.run()
            forward_flops = counter.flops
            outputs = differentiable(result)
            wanted = leaves(outputs)
            # Bags have nothing to count, and torch's kernel for tensors without values fails for sparse ones.
            if wanted and call.name not in ("embedding_bag", "EmbeddingBag"):
                seeds = [torch.ones_like(output) for output in outputs]
                # The walk knows what a call saves by its address, which must not be taken again.
                gradients(outputs, wanted, seeds, retain_graph=True)
        made = [value for value in _flat(result) if isinstance(value, Tensor)]
        if call.name == "getitem" and made and all(any(m is o for o in call.operands) for m in made):
            self._work[key] = None, None  # an element of a tuple costs nothing
            return result
        backward_flops = counter.flops - forward_flops
        held = {_storage(tensor) for tensor in (*call.operands, *call.parameters)}
        if made and all(_storage(tensor) in held for tensor in made):
            moved = (forward_flops, 0), (backward_flops, _view_backward_bytes(made, wanted))
        else:
            moved = (
                (forward_flops, _read_and_written_bytes(call, made)),
                (backward_flops, 2 * _num_bytes((*made, *call.operands, *call.parameters))),
            )
        self._work[key] = moved[0], moved[1] if wanted else None
        return result

    def _roofline_s(self, work: Work | None) -> float:
        return 0.0 if work is None else LAUNCH_S + self._device.roof_s(*work)


def _read_and_written_bytes(call: Call, made: Sequence[Tensor]) -> int:
    """Returns the bytes that a forward reads and writes if its results are not views."""
    made_bytes = _num_bytes(made)
    read = (*call.operands, *call.parameters)
    if call.name in _LOOKING_UP:
        return made_bytes + sum(min(_num_bytes([tensor]), made_bytes) for tensor in read)
    return made_bytes + _num_bytes(read)


def _view_backward_bytes(views: Sequence[Tensor], wanted: Sequence[Tensor]) -> int:
    """Returns the bytes that the backward of a view moves.

    The gradient of a view is a view as well. It is not if there are several views, or if the view is of a
    part or repeats elements: then the gradients of the views are read, and one gradient is written.
    """
    is_whole = len(views) == 1 and sum(leaf.numel() for leaf in wanted) == views[0].numel()
    return 0 if is_whole else sum(t.numel() * t.dtype.itemsize for t in (*views, *wanted))


def _num_bytes(tensors: Sequence[Tensor]) -> int:
    """Returns the bytes that an operator reads or writes; elements that share memory count once."""
    return sum(
        min(tensor.numel() * tensor.dtype.itemsize, tensor.untyped_storage().nbytes()) for tensor in tensors
    )


def _storage(tensor: Tensor) -> int:
    address: int = tensor.untyped_storage()._cdata
    return address


def _flat(value: Any) -> list[Any]:
    return [item for entry in value for item in _flat(entry)] if isinstance(value, list | tuple) else [value]
