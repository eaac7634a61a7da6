"""Modules, hooks and modes that no stage could reproduce: refused before or during a trace."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import is_lazy

from pd2bw_fx.errors import InputError
from pd2bw_fx.passes.trace.source_lines import source_line

_QUANTIZED = ("torch.ao.nn.quantized", "torch.ao.nn.intrinsic.quantized")


def require_traceable_modules(model: nn.Module) -> None:
    """Raises InputError for modules whose code is missing, that have backward hooks, or that tracers miss."""
    for path, module in model.named_modules():
        what = f"module {path!r}" if path else "the model"
        if isinstance(module, torch.jit.ScriptModule):
            raise InputError(
                f"{what} was compiled by torch.jit, and its layers are no more; split the model with the "
                "module that it was compiled from"
            )
        if type(module).__module__.startswith(_QUANTIZED):
            raise InputError(
                f"{what} is a quantized {type(module).__name__}, whose packed weights are in no trace; split "
                "the model that it was made from, and quantize what is exported"
            )
        hidden = next((name for name in module._modules if hasattr(nn.Module, name)), None)
        if hidden is not None:
            raise InputError(
                f"{what} has a submodule called {hidden!r}, which is a method of every module: torch's "
                "tracers find that in its place; give the submodule another name"
            )
        if module._backward_hooks or module._backward_pre_hooks:
            raise InputError(_hook_message(what))
        if _counts_its_batches(module):
            raise InputError(
                f"{what} is a {type(module).__name__} with momentum=None: how far it moves its averages "
                "depends on a count that it reads from a buffer as a number, which no stage can; give it a "
                "momentum (torch's own is 0.1)"
            )
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if _is_sharded(tensor):
            raise InputError(
                f"{name!r} is sharded over processes (a DTensor), and a stage holds its parameters whole; "
                "split the model before fully_shard or parallelize_module"
            )
        if tensor._backward_hooks or getattr(tensor, "_post_accumulate_grad_hooks", None):
            raise InputError(_hook_message(f"parameter {name!r}"))
        if is_lazy(tensor):
            raise InputError(
                f"{name!r} of a lazy module has no size yet; run the model once on a batch, then split it"
            )


def _is_sharded(tensor: Tensor) -> bool:
    dtensor = sys.modules.get("torch.distributed.tensor")  # takes a second to import; no DTensor without it
    return dtensor is not None and isinstance(tensor, dtensor.DTensor)


def _counts_its_batches(module: nn.Module) -> bool:
    if not isinstance(module, _BatchNorm):
        return False
    return module.momentum is None and module.training and module.track_running_stats


def require_data(model: nn.Module, names: Sequence[str], tensors: Sequence[Tensor]) -> None:
    """Raises InputError where the weights have no data and the inputs do."""
    weights = dict(model.named_parameters()) | dict(model.named_buffers())
    empty = [name for name, weight in weights.items() if weight.is_meta]
    if not empty:
        return
    full = next((name for name, weight in weights.items() if not weight.is_meta), None)
    if full is not None:
        raise InputError(
            f"{empty[0]!r} is on the meta device, and {full!r} on {weights[full].device}; put all of the "
            "model there, model.to('meta'), and give the pipeline the values by load_state_dict"
        )
    for name, tensor in zip(names, tensors, strict=False):
        if not tensor.is_meta:
            raise InputError(
                f"the model's weights are on the meta device, and input {name!r} is on {tensor.device}; make "
                "the example inputs on meta too (torch.device('meta')), or give the model its weights"
            )


@contextlib.contextmanager
def refuse_tensor_hooks() -> Iterator[None]:
    """Raises InputError where the forward registers a hook on a tensor: export would leave it out."""
    own = Tensor.register_hook

    def refuse(tensor: Tensor, hook: Callable[..., Any]) -> Any:
        raise _TensorHook

    Tensor.register_hook = refuse  # type: ignore[method-assign]
    try:
        yield
    except _TensorHook as error:
        raise InputError(_hook_message(f"a tensor of the forward ({source_line(error)})")) from None
    finally:
        Tensor.register_hook = own  # type: ignore[method-assign]


@contextlib.contextmanager
def refuse_inference_mode(model: nn.Module) -> Iterator[None]:
    """Raises InputError where the forward of a trainable model enters inference mode: no trace sees that."""
    own = torch.inference_mode.__enter__

    def refuse(mode: Any) -> Any:
        if mode.mode:
            raise _InferenceMode
        return own(mode)

    if any(parameter.requires_grad for parameter in model.parameters()):
        torch.inference_mode.__enter__ = refuse  # type: ignore[method-assign]
    try:
        yield
    except _InferenceMode as error:
        place = source_line(error)  # None for a decorated forward
        raise InputError(
            f"the forward computes under torch.inference_mode{f' ({place})' if place else ''}, which a trace "
            "does not have: stages would have gradients there; use torch.no_grad()"
        ) from None
    finally:
        torch.inference_mode.__enter__ = own  # type: ignore[method-assign]


class _InferenceMode(Exception):
    pass


class _TensorHook(Exception):
    pass


def _hook_message(whose: str) -> str:
    return (
        f"{whose} has a backward hook, which no stage would call: a trace has what the forward computes. "
        "Remove it, and do the same in the optimizer or in a custom autograd function"
    )
