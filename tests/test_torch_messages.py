"""Torch still says, and notes, what decides how a trace goes on (`passes/trace/torch_messages.py`)."""

from __future__ import annotations

import re
import warnings

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.distributions import Dirichlet
from torch.export import Dim

from pd2bw_fx.errors import TraceError
from pd2bw_fx.passes.trace import trace
from pd2bw_fx.passes.trace.torch_messages import (
    BATCH_NAME,
    BATCH_VIOLATED,
    NO_NUMPY,
    NO_SIZES_BY_VALUES,
    RULE_REPLACED,
    SAMPLE_DIRICHLET,
    SIZES_BY_VALUES,
    SUGGESTED_FIXES,
    TENSOR_ASSIGNED,
)
from pd2bw_fx.program import NO_GRADIENT


def exported(model: nn.Module, *inputs: Tensor) -> None:
    batch = Dim(BATCH_NAME, min=2)
    torch.export.export(model, inputs, strict=False, dynamic_shapes=tuple({0: batch} for _ in inputs))


class Bounded(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if x.shape[0] <= 8 else x


def test_an_error_about_the_batch_names_it_first_and_suggests_bounds() -> None:
    with pytest.raises(torch._dynamo.exc.UserError) as refused:
        exported(Bounded(), torch.ones(4, 3))

    assert str(refused.value).startswith(BATCH_VIOLATED)
    assert SUGGESTED_FIXES in str(refused.value)


class Choosing(nn.Module):
    def __init__(self, by_size: bool) -> None:
        super().__init__()
        self.by_size = by_size

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if (len(x[x > 0]) if self.by_size else x.sum()) > 1 else x


@pytest.mark.parametrize("by_size", [False, True])
def test_an_error_about_a_condition_names_sizes_that_depend_on_values(by_size: bool) -> None:
    with pytest.raises(RuntimeError) as refused:
        exported(Choosing(by_size), torch.ones(4, 3))

    assert SIZES_BY_VALUES in str(refused.value)
    assert (NO_SIZES_BY_VALUES in str(refused.value)) is not by_size


class Remembers(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        self.last = x * 2
        return self.last + 1


def test_a_tensor_that_a_forward_assigns_is_warned_of() -> None:
    with pytest.warns(UserWarning, match=f"^{TENSOR_ASSIGNED}"):
        exported(Remembers(), torch.ones(4, 3))


def test_a_derivative_without_gradients_is_refused() -> None:
    x = torch.ones(3, requires_grad=True)

    with torch.no_grad(), pytest.raises(RuntimeError, match=NO_GRADIENT):
        torch.autograd.grad((x * 2).sum(), x)


class Draws(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Dirichlet(x.exp(), validate_args=False).rsample()


def test_a_dirichlet_is_refused_by_the_name_of_its_operator() -> None:
    with pytest.raises(Exception, match=SAMPLE_DIRICHLET):
        exported(Draws(), torch.ones(4, 3, requires_grad=True))


class Leaves(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * torch.from_numpy(np.exp(x.detach().numpy()))


def test_a_tensor_that_numpy_asks_for_is_refused_and_torchs_functions_advised() -> None:
    with pytest.raises(Exception, match=re.escape(NO_NUMPY)):
        exported(Leaves(), torch.ones(4, 3))
    with pytest.raises(TraceError, match="Try: torch's functions in place of numpy's"):
        trace(Leaves(), (torch.ones(4, 3),), {})


def test_a_rule_in_place_of_torchs_own_is_warned_of() -> None:
    library = torch.library.Library("aten", "IMPL", "FuncTorchBatched")
    always = torch.is_warn_always_enabled()
    torch.set_warn_always(True)  # another test of this process may have been warned
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            library.impl("mv", lambda *args: args[0])
            library.impl("dot", lambda *args: args[0])
    finally:
        torch.set_warn_always(always)
        library._destroy()

    assert sum(str(warning.message).startswith(RULE_REPLACED) for warning in caught) == 2
