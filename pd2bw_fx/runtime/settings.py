"""What a script has set for its whole process and results depend on; local workers compute as it does."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch


@dataclass(frozen=True, slots=True)
class ProcessSettings:
    default_dtype: torch.dtype
    matmul_precision: str
    deterministic: bool
    deterministic_warns: bool

    @classmethod
    def of_this_process(cls) -> Self:
        return cls(
            torch.get_default_dtype(),
            torch.get_float32_matmul_precision(),
            torch.are_deterministic_algorithms_enabled(),
            torch.is_deterministic_algorithms_warn_only_enabled(),
        )

    def take_over(self) -> None:
        torch.set_default_dtype(self.default_dtype)
        torch.set_float32_matmul_precision(self.matmul_precision)
        torch.use_deterministic_algorithms(self.deterministic, warn_only=self.deterministic_warns)
