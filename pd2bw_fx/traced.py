"""A traced program as a front end returns it, and the report of how it was made."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn
from torch.export import ExportedProgram

from pd2bw_fx.size_range import ANY_SIZE, SizeRange

# Front ends that are tried after another one, and cannot be asked for.
_SHOWN = {"export-static": "export at the example's sizes"}


@dataclass(frozen=True, slots=True)
class Attempt:
    """A front end that could not trace the model, and its reason in one line."""

    tracer: str
    reason: str

    def __str__(self) -> str:
        return f"{_SHOWN.get(self.tracer, self.tracer)}: {self.reason}"


@dataclass(frozen=True, slots=True)
class TraceReport:
    """Which front end traced the model, why others could not, and what a user should know of the result.

    `tracer` is one of

    - "export": sizes follow the batch;
    - "export-sequence": the lengths of sequences may vary too;
    - "export-static": one batch size only;
    - "export-as-example": branches on values are taken as on the example inputs;
    - "fx": torch.fx;
    - "given": the program was the user's own.

    `evaluation` says how the stages differ from the model in evaluation mode, where a check found that they
    do: a trace has only one branch of `if self.training`. `training_writes` are tensors that the model writes
    in training only; the stages' are restored after each forward of an evaluation.
    """

    tracer: str
    attempts: tuple[Attempt, ...] = ()
    notes: tuple[str, ...] = ()
    duration_s: float = 0.0
    evaluation: str = ""
    training_writes: tuple[str, ...] = ()

    def __str__(self) -> str:
        lines = [f"traced by {_SHOWN.get(self.tracer, self.tracer)} in {self.duration_s:.1f} s"]
        lines += [f"  not by {attempt}" for attempt in self.attempts]
        lines += [f"  note: {note}" for note in self.notes]
        lines += [f"  not for evaluation: {self.evaluation}"] if self.evaluation else []
        return "\n".join(lines)

    def to_json(self) -> dict[str, Any]:
        """Returns what JSON can hold, for `from_json`."""
        return {
            "tracer": self.tracer,
            "attempts": [[attempt.tracer, attempt.reason] for attempt in self.attempts],
            "notes": list(self.notes),
            "duration_s": self.duration_s,
            "evaluation": self.evaluation,
            "training_writes": list(self.training_writes),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> TraceReport:
        """Returns the report that `to_json` wrote. Raises KeyError where an entry is missing."""
        return cls(
            tracer=data["tracer"],
            attempts=tuple(Attempt(tracer, reason) for tracer, reason in data["attempts"]),
            notes=tuple(data["notes"]),
            duration_s=data["duration_s"],
            evaluation=data["evaluation"],
            training_writes=tuple(data.get("training_writes", ())),
        )


@dataclass(frozen=True, slots=True)
class Traced:
    """A front end's program with the names that the model's author gave its inputs and outputs.

    `inputs` names the program's tensor placeholders in order, `outputs` its flat results; `loss` is one of
    `outputs`. Modules of the program have `prefix` before the path they have in `model`. `examples` are the
    tensors that it was traced with, by input name; empty if there were none. `call` runs the live model
    itself, eagerly: tensors by input name to results by output name.
    """

    program: ExportedProgram | fx.GraphModule
    model: nn.Module
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    loss: str | None
    report: TraceReport
    output_places: tuple[int, ...] | None = None  # among the leaves of what the program returns; None: all
    prefix: str = ""
    batch_size: int | None = None
    batched_inputs: frozenset[str] = frozenset()  # dimension 0 is the batch
    dynamic_batch: bool = False
    batch_sizes: SizeRange = ANY_SIZE  # the sizes that a dynamic batch may have
    lengths: Mapping[str, str] = field(default_factory=dict)  # by input: what its open dimension 1 is called
    changing: tuple[nn.Module, ...] = ()  # modules whose attributes the forward sets
    examples: Mapping[str, torch.Tensor] = field(default_factory=dict)
    call: Callable[[Mapping[str, torch.Tensor]], Mapping[str, torch.Tensor]] | None = field(
        default=None, compare=False, repr=False
    )

    @property
    def model_name(self) -> str:
        """The name of the model's class; for a program that the user exported, that of the exported model."""
        if self.report.tracer == "given" and isinstance(self.program, ExportedProgram):
            stacks = (node.meta.get("nn_module_stack") or {} for node in self.program.graph.nodes)
            for path, kind in itertools.chain.from_iterable(stack.values() for stack in stacks):
                if not path:
                    return str(kind.rpartition(".")[2] if isinstance(kind, str) else kind.__name__)
        return type(self.model).__name__


def name_beside(model: nn.Module, target: str) -> str:
    """Returns the graph's name for a part of the loss_fn: another one than a model's own "loss_fn"."""
    return f"_{target}" if hasattr(model, target.partition(".")[0]) else target
