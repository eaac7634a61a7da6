"""Finds what varies from run to run in a stage, which no file can then be compared with, and why."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from pd2bw_fx.graph import Operator
from pd2bw_fx.stage import StageProgram, held_tensors

from .original import Original
from .run import run_modules


def changed_value(first: Mapping[str, Tensor], again: Mapping[str, Tensor]) -> str | None:
    """Returns a value that differs between two runs on the same inputs, or None."""
    return next((n for n, v in first.items() if not torch.equal(v.nan_to_num(), again[n].nan_to_num())), None)


def written_by(
    programs: Sequence[StageProgram], modules: Sequence[nn.Module], fed: Mapping[str, Tensor]
) -> str | None:
    """Returns a buffer or parameter that one more run of the stages changes, or None."""
    pairs = list(zip(programs, modules, strict=True))
    before = [{name: held.clone() for name, held in held_tensors(*pair).items()} for pair in pairs]
    run_modules(programs, modules, fed)
    both = zip(before, (held_tensors(*pair) for pair in pairs), strict=True)
    return next((n for old, new in both for n, held in old.items() if not torch.equal(held, new[n])), None)


def why_it_varies(value: str, written: str | None, original: Original | None, *, training: bool) -> str:
    """Returns why the value varies, and what to do about it."""
    operators = () if original is None else original.graph.operators.values()
    if training:
        draws = original is None or any(operator.is_random for operator in operators)
        kept = next(
            (name for o in operators for name in o.writes_buffers if _is_read_again(operators, name)), None
        )
        if draws or kept is None:
            why = "set the model's dropout to 0"
        else:
            why = f"split `model.eval()`: in training the forward computes with {kept}, which it writes"
        return (
            f"{value} differs between two runs on the same inputs in training mode, so that no file could be "
            f"compared with it; export with training=False, or {why}"
        )
    told = f"{value} differs between two runs on the same inputs in evaluation mode too"
    drawing = [o for o in operators if o.is_random and not _is_off_in_evaluation(o)]
    places = [f"{o.module_path or 'the model'} ({o.module_type}, {o.source_line})" for o in drawing]
    if written is None and original is not None:  # a running average may have settled by then
        parameters = original.graph.parameters
        written = next((n for o in operators for n in o.writes_buffers if n in parameters), None)
    if written is not None and not places:
        return (
            f"{told}: the forward writes {written}, and a file keeps nothing from one run to the next. Split "
            "the part of the model that does not write, or let it write `if self.training` alone and split "
            "`model.eval()`"
        )
    return (
        f"{told}: random numbers are drawn{f' by {places[0]}' if places else ''}. Code that asks "
        "`if self.training` is traced in the mode that the model is in when it is split: split "
        "`model.eval()`, and export that"
    )


def _is_off_in_evaluation(operator: Operator) -> bool:
    return any(word in operator.target for word in ("dropout", "attention"))


def _is_read_again(operators: Iterable[Operator], buffer: str) -> bool:
    """Whether an operator that does not write the buffer reads it: batch statistics are only written."""
    return any(buffer in o.buffers and buffer not in o.writes_buffers for o in operators)
