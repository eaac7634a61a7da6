"""What a script has set for its whole process and results depend on; local workers compute as it does."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch

_LIBRARIES = {"cuda": ("matmul",), "cudnn": ("conv", "rnn"), "mkldnn": ("matmul", "conv", "rnn")}
_PARTS = tuple(f"{library}.{part}." for library, parts in _LIBRARIES.items() for part in parts)
# Of torch.backends, the general before what it sets too.
_FLAGS = (
    *(f"{place}fp32_precision" for place in ("", "cudnn.", "mkldnn.", *_PARTS)),
    *(f"cudnn.{name}" for name in ("enabled", "benchmark", "deterministic")),
    *(f"cuda.matmul.allow_{kind}_reduced_precision_reduction" for kind in ("fp16", "bf16")),
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
            holder, _, attribute = name.rpartition(".")
            if getattr(_backend(holder), attribute) != value:
                setattr(_backend(holder), attribute, value)
        for kind, is_on in self.attentions.items():
            getattr(torch.backends.cuda, f"enable_{kind}_sdp")(is_on)


def matmul_precision() -> str | None:
    """None where torch.backends' own settings do not go with one for all."""
    try:
        return torch.get_float32_matmul_precision()
    except RuntimeError:
        return None


def flags() -> dict[str, Any]:
    """Of torch.backends, by name, those that this torch has."""
    found = {}
    for name in _FLAGS:
        holder, _, attribute = name.rpartition(".")
        value = getattr(_backend(holder), attribute, None)
        if value is not None:
            found[name] = value
    return found


def _backend(name: str) -> Any:
    return functools.reduce(getattr, name.split(".") if name else (), torch.backends)
