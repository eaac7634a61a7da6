"""Recurrent operators on tensors that hold no data, in the time of one step.

Torch runs all steps to know the sizes of the results, several times in a trace and in an export to ONNX. One
step has the results of all, but for the length of the first.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch._decomp import decomposition_table
from torch._subclasses.fake_tensor import FakeTensor
from torch.export import _patches
from torch.fx.experimental.proxy_tensor import get_proxy_mode

_KINDS = [getattr(torch.ops.aten, name) for name in ("lstm", "gru", "rnn_tanh", "rnn_relu")]
ON_SEQUENCES = frozenset(kind.input for kind in _KINDS)
ON_PACKED_SEQUENCES = frozenset(kind.data for kind in _KINDS)


@contextmanager
def run_one_step() -> Iterator[None]:
    """Has torch run one step of a recurrent operator where it only asks for sizes, as a trace does.

    Torch finds the operator's steps in three places; the last is for its exporter to ONNX.
    """
    with ExitStack() as stack:
        for operator in ON_SEQUENCES:
            kernels = {key: of_one_step(kernel) for key, kernel in operator.py_kernels.items()}
            stack.enter_context(patch.dict(operator.py_kernels, kernels))
            decomposed = of_one_step(decomposition_table[operator])
            stack.enter_context(patch.dict(decomposition_table, {operator: decomposed}))
            operator._dispatch_cache.clear()
            stack.callback(operator._dispatch_cache.clear)
        for name in ("lstm_while_loop_impl", "gru_while_loop_impl"):
            stack.enter_context(patch.object(_patches, name, of_one_step(getattr(_patches, name))))
        yield


def of_one_step(kernel: Callable[..., Any]) -> Callable[..., Any]:
    """Returns an operator that runs a single step where the sequence holds no data and nobody records them.

    sequence: (steps, batch, features), or (batch, steps, features) if the last argument is true.
    """

    @functools.wraps(kernel)
    def run(sequence: Any, *given: Any, **named: Any) -> Any:
        is_asked_for_sizes = isinstance(sequence, FakeTensor) and get_proxy_mode() is None
        place = 1 if given and given[-1] else 0
        steps = sequence.shape[place]
        if named or not is_asked_for_sizes or type(steps) is not int or steps < 2:
            return kernel(sequence, *given, **named)
        output, *states = kernel(sequence.narrow(place, 0, 1), *given)
        step = output.transpose(0, place)  # the steps are the outer dimension in memory
        output = step.expand(steps, *step.shape[1:]).clone(memory_format=torch.contiguous_format)
        return (output.transpose(0, place), *states)

    return run
