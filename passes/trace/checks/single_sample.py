"""Whether a program that was traced with several samples is right for a single one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind, OutputKind

from pd2bw_fx.drawing import use_seed_of_checks
from pd2bw_fx.passes.trace.eager_run import holds_data, keep_state
from pd2bw_fx.passes.trace.patches.size_answers import SizeAnswers
from pd2bw_fx.passes.trace.program import Program

from .extreme_random import keep_random_numbers
from .second_call import results_of


def is_right_for_one(exported: ExportedProgram, program: Program, batch_size: int) -> bool:
    """Whether the program gives the model's results on the first sample alone.

    They are run only where one of the author's conditions would come out differently for one sample. A
    program that cannot be run here at all is assumed to be right.
    """
    batched = program.flat.batched(batch_size)
    if not _may_differ_for_one(exported, program.answers, batched, program) or not holds_data(program):
        return True
    given = dict(zip(program.flat.names, program.flat.tensors, strict=True))
    one = {name: tensor[:1] if name in batched else tensor for name, tensor in given.items()}
    try:
        expected = list(results_of(program, one).values())
    except Exception:  # the model does not accept a single sample
        return False
    try:
        found = _as_traced(exported, program, one)
    except Exception:  # shapes that do not fit, or an operator that only a stage can run
        return not _runs(exported, program, given)
    return len(found) == len(expected) and all(map(_is_close, found, expected))


def _may_differ_for_one(
    exported: ExportedProgram, answers: SizeAnswers, batched: Any, program: Program
) -> bool:
    """Whether one of the author's conditions comes out differently for a batch of one sample."""
    values = {node.name: node.meta.get("val") for node in exported.graph.find_nodes(op="placeholder")}
    inputs = zip(program.flat.names, exported.graph_signature.user_inputs, strict=True)
    sizes = [
        value.shape[0] for name, p in inputs if name in batched and (value := values[str(p)]) is not None
    ]
    symbols = {size.node.expr for size in sizes if isinstance(size, torch.SymInt)}
    return any(
        condition.xreplace(dict.fromkeys(symbols, 1)) == (not answer) for condition, answer in answers.given
    )


def _as_traced(exported: ExportedProgram, program: Program, tensors: Mapping[str, Tensor]) -> list[Any]:
    """Returns the program's results as `results_of` does the model's, without the checks of sizes."""
    user = iter([tensors[name].clone() for name in program.flat.names])
    arguments: list[Any] = []
    for entry in exported.graph_signature.input_specs:
        if entry.kind is InputKind.USER_INPUT:
            is_plain = isinstance(entry.arg, ConstantArgument)
            arguments.append(entry.arg.value if is_plain else next(user))
        else:
            target = str(entry.target)
            known = exported.state_dict.get(target)
            arguments.append(exported.constants[target] if known is None else known)
    with keep_state(program), keep_random_numbers(), torch.no_grad():
        use_seed_of_checks()
        results = fx.Interpreter(exported.graph_module).run(*arguments)
    kinds = [entry.kind for entry in exported.graph_signature.output_specs]
    wanted = (OutputKind.USER_OUTPUT, OutputKind.LOSS_OUTPUT)
    return [result for kind, result in zip(kinds, results, strict=True) if kind in wanted]


def _runs(exported: ExportedProgram, program: Program, tensors: Mapping[str, Tensor]) -> bool:
    try:
        _as_traced(exported, program, tensors)
    except Exception:  # whatever it is
        return False
    return True


def _is_close(one: Any, other: Any) -> bool:
    """Whether the program's result equals the model's, but for rounding.

    Traced program and model may compute by different operators, hence the wider tolerance than in
    `second_call`, which compares two runs of the model. Another branch for one sample differs by far more.
    """
    if not isinstance(one, Tensor) or not isinstance(other, Tensor):
        return bool(one == other)
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    if not other.numel() or other.dtype == torch.bool:
        return torch.equal(one, other)
    # The standard deviation of one sample is nan, which is no scale for the other entries.
    finite = other.abs()[other.isfinite()]
    scale = float(finite.max()) if finite.numel() else 0.0
    return torch.allclose(one, other, rtol=1e-4, atol=1e-5 * scale, equal_nan=True)
