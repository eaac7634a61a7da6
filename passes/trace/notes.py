"""Notes on a trace: where the stages differ from what a reader of the model would expect."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.export import ExportedProgram

from pd2bw_fx.model_arguments import WRAPPERS
from pd2bw_fx.program import surrounding_autocast
from pd2bw_fx.untraced_operands import NAMESPACE as UNTRACED

from .checks.watch import Change
from .program import Program
from .source_lines import line_of


def notes_of(program: Program, batch_size: int | None) -> list[str]:
    """Returns what users should know of the traced program before they train the stages."""
    flat = program.flat
    notes = [f"{what} is no tensor and was left out of the outputs" for what in program.record.left_out]
    notes += [
        f"buffer {name} gets another shape in the forward; the stages make it again in every call"
        for name in program.record.resized
    ]
    if program.record.other_losses:
        named = " and ".join(program.record.other_losses)
        notes.append(
            "the loss is the first entry of the tuple that the forward returns; what has a gradient too, "
            f"{named}, is reported and not trained: return the sum to train it"
        )
    if program.record.has_checkpoints:
        notes.append(
            "the model's own activation checkpoints (torch.utils.checkpoint) are not in the stages; "
            'split(recompute=True) or recompute="auto" computes a stage\'s activations again'
        )
        if any(map(_moves_statistics, program.model.modules())):
            notes.append(
                "running statistics move once in a step; the model's own backward moves those of a norm "
                "within an activation checkpoint a second time"
            )
    if surrounding_autocast():
        notes.append(
            "traced without the autocast around this call; enter torch.autocast in the model's forward to "
            "have it in the stages"
        )
    if program.options.as_uncompiled:
        notes.append(
            "traced as the model runs where torch.compiler.is_compiling() is false: where it is true, the "
            "model fails"
        )
    is_compiled = "_orig_mod" in program.model._modules  # the class takes a second to import
    if is_compiled or isinstance(program.model, WRAPPERS):
        inner = "_orig_mod" if is_compiled else "module"
        notes.append(
            f"the model is wrapped in {type(program.model).__name__}; split model.{inner} for stages that "
            "read as the model does, with its own names"
        )
    if not program.model.training:
        notes.append(
            "the model is in evaluation mode, and so are the stages: no dropout, no batch statistics; call "
            "model.train() before splitting to train it"
        )
    if batch_size is not None:
        batched = flat.batched(batch_size)
        for name, tensor in zip(flat.names, flat.tensors, strict=True):
            if name not in batched:
                notes.append(_unbatched(name, tuple(tensor.shape), batch_size))
    notes += _said_of(program.watch.changes)
    first, *others = program.watch.assigned_tensors or ("",)
    if first:
        more = f" and to {len(others)} more" if others else ""
        notes.append(
            f"the forward assigns a tensor to {first}{more}, which the stages do not; register it as a "
            "buffer if a later call reads it"
        )
    return notes


def _moves_statistics(module: nn.Module) -> bool:
    return isinstance(module, nn.modules.batchnorm._NormBase) and (
        module.training and module.track_running_stats
    )


def _unbatched(name: str, shape: tuple[int, ...], batch_size: int) -> str:
    note = (
        f"input {name} of shape {shape} does not have the batch size {batch_size} in dimension 0: every "
        "microbatch gets all of it"
    )
    if batch_size not in shape:
        return note
    return f"{note}; if dimension {shape.index(batch_size)} is its batch, transpose it in the forward"


def notes_on_comparisons(exported: ExportedProgram, batched: Sequence[str]) -> tuple[str, ...]:
    """Returns a note if some tensor has the batch in two dimensions, such as the similarities of all pairs.

    `batched` are the names of placeholders.
    """
    values = {node.name: node.meta["val"] for node in exported.graph.find_nodes(op="placeholder")}
    batch = {symbol for name in batched for symbol in _symbols(values[name].shape[0])}
    for node in exported.graph.nodes:
        shape = getattr(node.meta.get("val"), "shape", ()) if node.op == "call_function" else ()
        if sum(not batch.isdisjoint(_symbols(size)) for size in shape) > 1:
            return (
                "samples of a batch are compared with one another, in training only with those of their own "
                f"microbatch: {line_of(node)}",
            )
    return ()


def _symbols(size: int | torch.SymInt) -> set[Any]:
    return set(size.node.expr.free_symbols) if isinstance(size, torch.SymInt) else set()


def note_on_operator(name: str) -> str:
    namespace, _, own = name.partition("::")
    if namespace == UNTRACED:
        return f"{own} is run as it is written; under torchrun every process has to define it"
    return (
        f"operator {name} is none of torch's own: every process that runs the stages needs what registers "
        "it (a library may have another implementation; Hugging Face experts: "
        "experts_implementation='batched_mm')"
    )


def _said_of(changes: Sequence[Change]) -> list[str]:
    """Returns notes on changed attributes; of nested modules that change their mode, only the outermost."""
    modes = [change for change in changes if change.attribute == "training"]
    turned = tuple(f"{change.path}." for change in modes if change.path)
    said = []
    for change in modes:
        if not change.path.startswith(turned):
            mode = "training" if change.after else "evaluation"
            name = change.path or "the model"
            said.append(f"the forward puts {name} in {mode} mode, and so do the stages")
    others = [change for change in changes if change.attribute != "training"]
    if kept := [change for change in others if change.is_of_a_layer]:
        as_it_is = "them as they are" if len(kept) > 1 else "it as it is"
        said.append(f"{_first_of(kept)}: the stages have {as_it_is} after the forward")
    if left := [change for change in others if not change.is_of_a_layer]:
        is_or_are = "are" if len(left) > 1 else "is"
        said.append(
            f"{_first_of(left)} {is_or_are} not in the stages, and the trace is the same after other calls"
        )
    return said


def _first_of(changes: Sequence[Change]) -> str:
    return f"{changes[0]} and {len(changes) - 1} more" if len(changes) > 1 else str(changes[0])
