"""Settings that a script makes for its whole process, and that local workers take over.

Results depend on them.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, Self
from unittest.mock import patch

import torch

_LIBRARIES = {"cuda": ("matmul",), "cudnn": ("conv", "rnn"), "mkldnn": ("matmul", "conv", "rnn")}
_PARTS = tuple(f"{library}.{part}." for library, parts in _LIBRARIES.items() for part in parts)
_REDUCED = "_reduced_precision_reduction"
# Flags of torch.backends: a general one before those that it sets too, older switches before newer ones.
_FLAGS = (
    *(f"{library}.allow_tf32" for library in ("cudnn", "mkldnn")),
    *(f"{place}fp32_precision" for place in ("", "cudnn.", "mkldnn.", *_PARTS)),
    *(f"cudnn.{name}" for name in ("enabled", "benchmark", "benchmark_limit", "deterministic")),
    *(f"mkldnn.{name}" for name in ("enabled", "deterministic")),
    *(f"cuda.matmul.allow_{name}" for name in (f"fp16{_REDUCED}", f"bf16{_REDUCED}", "fp16_accumulation")),
)
_ATTENTIONS = ("flash", "mem_efficient", "math", "cudnn")


@dataclass(frozen=True, slots=True)
class ProcessSettings:
    default_dtype: torch.dtype
    matmul_precision: str | None  # None: by `flags` alone
    deterministic: bool
    deterministic_warns: bool
    flags: Mapping[str, Any]
    attentions: Mapping[str, bool]

    @classmethod
    def of_this_process(cls) -> Self:
        return cls(
            torch.get_default_dtype(),
            matmul_precision(),
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
            flags(),
            {kind: getattr(torch.backends.cuda, f"{kind}_sdp_enabled")() for kind in _ATTENTIONS},
        )

    def take_over(self) -> None:
        torch.set_default_dtype(self.default_dtype)
        if self.matmul_precision is not None:
            torch.set_float32_matmul_precision(self.matmul_precision)
        torch.use_deterministic_algorithms(self.deterministic, warn_only=self.deterministic_warns)
        for name, value in self.flags.items():
            if _flag(name) != value:
                holder, _, attribute = name.rpartition(".")
                setattr(_backend(holder), attribute, value)
        for kind, is_on in self.attentions.items():
            getattr(torch.backends.cuda, f"enable_{kind}_sdp")(is_on)


def matmul_precision() -> str | None:
    """Returns torch's float32 matmul precision, or None where torch.backends' settings have no one name."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return None


def flags() -> dict[str, Any]:
    """Returns the flags of torch.backends by name, as far as this torch has them and can tell them."""
    found = {name: _flag(name) for name in _FLAGS}
    return {name: value for name, value in found.items() if value is not None}


def _flag(name: str) -> Any:
    holder, _, attribute = name.rpartition(".")
    try:
        value = getattr(_backend(holder), attribute, None)
        if value is not None and attribute.endswith(_REDUCED):  # a setting in two parts
            return value, getattr(_backend(holder), f"{attribute}_split_k", True)
        return value
    except RuntimeError:  # an older switch that cannot express what the newer ones are set to
        return None


def _backend(name: str) -> Any:
    return functools.reduce(getattr, name.split(".") if name else (), torch.backends)


@contextmanager
def cudnn_off() -> Iterator[None]:
    """Switches cuDNN off, without touching its other flags.

    torch.backends.cudnn.flags(enabled=False) reads and sets them all, and raises where the older switch for
    TF32 cannot express what the newer ones are set to.
    """
    (before,) = _switched(torch.backends.cudnn, enabled=False)
    try:
        yield
    finally:
        _switched(torch.backends.cudnn, enabled=before)


@contextmanager
def leave_other_flags_alone() -> Iterator[None]:
    """Lets torch.export, which turns libraries off and on again, do so without touching their other flags."""
    with ExitStack() as places:
        for library in (torch.backends.cudnn, torch.backends.mkldnn):
            switched = functools.partial(_switched, library)
            places.enter_context(patch.object(library, "set_flags", switched))
        yield


def _switched(library: Any, enabled: bool) -> tuple[bool]:
    before = (library.enabled,)
    # torch.testing's tools freeze the flags, except for what switches them back.
    with torch.backends.__allow_nonbracketed_mutation():
        library.enabled = enabled
    return before
