"""An engine's options, which are checked in the user's own process and call."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, Self, TypedDict

import torch
from torch import nn

from pd2bw_fx.arguments import (
    make_plain,
    require_choice,
    require_function,
    require_kind,
    require_known_options,
    require_positive,
    require_share,
    require_whole_number,
)
from pd2bw_fx.errors import InputError
from pd2bw_fx.runtime.corrections import Correction
from pd2bw_fx.runtime.groups import Backend
from pd2bw_fx.runtime.optimizer_checks import expected_instead_of
from pd2bw_fx.runtime.optimizing import OptimizerFactory, ParameterOptions, SchedulerFactory
from pd2bw_fx.runtime.reports import UpdateReport

Precision = Literal["bf16", "fp16"]


class TrainingOptions(TypedDict, total=False):
    """Options that every way to train takes, for editors and type checkers (see `Engine.from_pipeline`)."""

    slack: float | Literal["auto"]
    replicas: int | tuple[int, ...] | None
    vertical_sync: bool
    lr_scheduler: SchedulerFactory | None
    parameter_options: ParameterOptions | None
    max_gradient_norm: float | None
    precision: Precision | None
    corrections: Sequence[Correction] | None
    weight_average: float | None
    compile: bool | Mapping[str, Any]
    on_report: Callable[[UpdateReport], None] | None
    stop_at_nan: bool
    device: torch.device | str | None
    backend: Backend
    seed: int | None
    record: int
    timeout_s: float


class RankOptions(TrainingOptions, total=False):
    """The options of a rank's own engine."""

    silence_s: float


class LocalOptions(TrainingOptions, total=False):
    """The options of a run with local processes (`train_local`)."""

    on_update: Callable[[int, float], bool | None] | None
    threads_per_worker: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineOptions:
    """The options that `Engine.from_pipeline` describes; a local run takes them too."""

    optimizer: OptimizerFactory
    lr_scheduler: SchedulerFactory | None = None
    parameter_options: ParameterOptions | None = None
    max_gradient_norm: float | None = None
    precision: Precision | None = None
    corrections: Sequence[Correction] | None = None
    weight_average: float | None = None
    compile: bool | Mapping[str, Any] = False
    on_report: Callable[[UpdateReport], None] | None = None
    stop_at_nan: bool = True
    device: torch.device | str | None = None
    backend: Backend = "auto"
    seed: int | None = None
    record: int = 0
    timeout_s: float = 600.0

    def __post_init__(self) -> None:
        make_plain(self, "max_gradient_norm", "weight_average", "seed", "record", "timeout_s")
        if not callable(self.optimizer):
            raise InputError(
                f"optimizer is of type {type(self.optimizer).__name__}; {expected_instead_of(self.optimizer)}"
            )
        for name, (expected, num_arguments) in _FUNCTIONS.items():
            if (value := getattr(self, name)) is not None:
                require_function(name, value, expected, num_arguments=num_arguments)
        if self.max_gradient_norm is not None:
            require_positive("max_gradient_norm", self.max_gradient_norm)
        require_choice("precision", self.precision, None, "bf16", "fp16")
        require_choice("backend", self.backend, "auto", "gloo", "nccl")
        if self.corrections is not None:
            require_kind("corrections", self.corrections, Sequence, "a sequence of corrections, or None,")
        if self.weight_average is not None:
            require_share("weight_average", self.weight_average, "a decay from 0 to below 1, such as 0.999,")
        require_kind("compile", self.compile, (bool, Mapping), "True, False or torch.compile's own options")
        if self.compile:
            self._check_compile()
        if self.seed is not None:
            require_kind("seed", self.seed, int, "a whole number or None")
            if not -(2**63) <= self.seed < 2**64:
                raise InputError(f"seed is {self.seed}; torch's generators take up to 64 bits")
        require_whole_number("record", self.record, least=0)
        require_positive("timeout_s", self.timeout_s)

    @property
    def compile_options(self) -> Mapping[str, Any] | None:
        """What torch.compile is called with; None: stages are not compiled."""
        if isinstance(self.compile, Mapping):
            return self.compile
        return {} if self.compile else None

    def _check_compile(self) -> None:
        options = self.compile_options or {}
        try:
            torch.compile(nn.Identity(), **options)
        except Exception as error:  # a TypeError, a RuntimeError or one of a backend's own
            raise InputError(f"torch.compile does not take compile={self.compile!r}: {error}") from error
        from torch._inductor import list_mode_options  # takes seconds to import, with torch._dynamo

        of_mode = list_mode_options(options["mode"]) if options.get("mode") else {}
        chosen = {**of_mode, **(options.get("options") or {})}
        if chosen.get("triton.cudagraphs") or options.get("backend") == "cudagraphs":
            raise InputError(
                f"compile={self.compile!r} makes CUDA graphs, which write over what their last run gave out, "
                'and here it is still in flight; try {"mode": "max-autotune-no-cudagraphs"}'
            )

    def alike(self) -> dict[str, str]:
        """Returns in words what all ranks must have been given alike: functions only by whether there are."""
        told = {name: repr(getattr(self, name)) for name in _ALIKE}
        given = {name: getattr(self, name) is not None for name in ("lr_scheduler", "parameter_options")}
        return told | {name: "a function" if is_given else "None" for name, is_given in given.items()}

    @classmethod
    def of(cls, options: Mapping[str, Any], *others: str) -> Self:
        """Raises InputError for a name that is no option; `others` are names that the caller takes too."""
        known = [*(field.name for field in fields(cls)), *_OF_THE_METHOD, *others]
        require_known_options("training", options, known, _ELSEWHERE)
        return cls(**options)


_ALIKE = (
    "max_gradient_norm",
    "precision",
    "corrections",
    "weight_average",
    "stop_at_nan",
    "backend",
    "record",
)
_OF_THE_METHOD = ("microbatches_per_update", "method", "slack", "replicas", "vertical_sync")
_OF_THE_OPTIMIZER = (
    "the optimizer has it: optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-4)"
)
_OF_THE_BATCHES = "batches are gone through once: give those of all epochs, as itertools.chain does"
_ELSEWHERE = {
    **dict.fromkeys(("scaler", "grad_scaler", "amp"), 'precision="fp16" scales the loss, "bf16" is autocast'),
    **dict.fromkeys(("loss_fn", "criterion"), "it is traced with the model: split(model, .., loss_fn=..)"),
    **dict.fromkeys(
        ("gradient_accumulation_steps", "accumulate_grad_batches"),
        "microbatches_per_update is the number of parts that each batch is cut into",
    ),
    **dict.fromkeys(
        ("max_grad_norm", "clip_grad_norm", "gradient_clip_val"), "did you mean max_gradient_norm?"
    ),
    **dict.fromkeys(("ema", "ema_decay"), "weight_average=0.999, say, is the decay of a moving average"),
    **dict.fromkeys(("lr", "learning_rate", "weight_decay", "momentum"), _OF_THE_OPTIMIZER),
    **dict.fromkeys(("epochs", "num_epochs", "max_epochs"), _OF_THE_BATCHES),
}
_FUNCTIONS = {
    "lr_scheduler": ("a function that makes a scheduler of the optimizer it is given", 1),
    "parameter_options": ("a function of a parameter's name and the parameter", 2),
    "on_report": ("a function that takes an UpdateReport", 1),
}
