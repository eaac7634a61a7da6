"""Parts of a model that are written for torch.compile are called as any others.

model.layers[0] = torch.compile(model.layers[0])    the wrapper calls what `__call__` was when it was made,
                                                    of which torch's trace of module calls does not hear
@torch.compiler.nested_compile_region               an export traces the region apart, without the author's
def forward(self, x):                               lines and the calls of its layers
@torch.compiler.disable(recursive=False)            an export refuses it, as the forward of
def forward(self, x):                               DistributedDataParallel is
"""

from __future__ import annotations

import importlib
import operator
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from torch import nn

# The package has the module's operator under the module's name.
_OF_REGIONS = importlib.import_module("torch._higher_order_ops.invoke_subgraph")
# The function around one that torch.compile is to leave out, but not what that calls.
_NOT_COMPILED = "nonrecursive_disable_wrapper"


@contextmanager
def call_parts_as_written(*parts: nn.Module | Callable[..., Any] | None) -> Iterator[None]:
    """Has the wrappers among the modules of `parts` call what they wrap, and marked functions run as any."""
    modules = (part for part in parts if isinstance(part, nn.Module))
    forwards = {wrapper: vars(wrapper)["forward"] for part in modules for wrapper in _wrappers_in(part)}
    try:
        for wrapper in forwards:
            # A function here would be a frame between the call and the module, to which it would belong.
            vars(wrapper)["forward"] = partial(operator.call, wrapper.get_submodule("_orig_mod"))
        with (
            patch.object(_OF_REGIONS, "invoke_subgraph_placeholder", operator.call),
            patch.object(torch.compiler, "is_exporting", _is_exporting(torch.compiler.is_exporting)),
        ):
            yield
    finally:
        for wrapper, forward in forwards.items():
            vars(wrapper)["forward"] = forward


def _is_exporting(of_torch: Callable[[], bool]) -> Callable[[], bool]:
    def is_exporting() -> bool:
        return of_torch() and sys._getframe(1).f_code.co_name != _NOT_COMPILED

    return is_exporting


def _wrappers_in(part: nn.Module) -> Iterator[nn.Module]:
    if "torch._dynamo" not in sys.modules:  # nothing is compiled, and importing it takes a second
        return
    from torch._dynamo import OptimizedModule

    for module in part.modules():
        if isinstance(module, OptimizedModule):
            yield module
