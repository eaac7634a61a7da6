"""What the stages of a model that was traced in training compute differently from the model in evaluation.

A trace has one of the two branches of `if self.training`. Where a layer of the author's asks for its mode,
the branches may agree at the present weights and not later: noise of a strength that is still zero, a power
iteration that has converged, a centre that training subtracts and that is still zero. So they are compared
at other weights too, and with the buffers that a few forwards in training leave. They may also agree by
chance, where labels are dropped at a small rate: so if one side draws random numbers, the other must.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from pd2bw_fx.errors import VerificationError
from pd2bw_fx.graph import Operator, OperatorGraph
from pd2bw_fx.modes import asking_for_mode
from pd2bw_fx.program import returned, set_fast_path, with_gradients_if_asked
from pd2bw_fx.stage import StageProgram, held_tensors

from .compare import coarsest_tolerance, difference, tolerance_of
from .sides import (
    Drawn,
    Sides,
    model_outputs,
    randomness,
    run_forwards,
    stage_modules,
    weights_of,
    written_by,
)

_CALLS_IN_TRAINING = 2
_MOVED_BY = 0.1  # how far weights are moved, relative to 1 plus their size


@dataclass(frozen=True, slots=True)
class Evaluation:
    """How stages in evaluation mode compare with the model in evaluation mode."""

    differs: str = ""  # what the stages compute differently from the model, or ""
    writes: tuple[str, ...] = ()  # tensors that the stages write, and the model only in training
    has_run: bool = True  # whether both could be run


def evaluation_of(sides: Sides, tensors: Mapping[str, Tensor]) -> Evaluation:
    """Compares the stages with the model, both in evaluation mode, on the example inputs."""

    def compared(weights: Mapping[str, Tensor]) -> Evaluation:
        try:
            outputs, written, drawn = _of_model(sides, weights)
        except Exception as error:  # whatever the model's other branch raises on the example
            return Evaluation(f"the model cannot be run on the example inputs: {_told(error)}", has_run=False)
        try:
            found, own, drawn_here = _of_stages(sides, weights)
        except Exception as error:  # sizes that differ between the modes, for example
            return Evaluation(
                f"the stages cannot be run on the example inputs: {_told(error)}", has_run=False
            )
        said = outputs_differ(sides, outputs, found)
        said = said or _draws_differ(sides.graph, drawn, drawn_here)
        missed = sorted(written - own)
        if not said and missed:
            said = f"the model writes {missed[0]!r}, and the stages do not"
        return Evaluation(said, tuple(sorted(own - written)))

    first = compared(tensors)
    if first.differs or not asking_for_mode(sides.model):
        return first
    moved = _moved(sides.graph, tensors)
    later = compared({**moved, **_after_training(sides, moved)})
    if not later.has_run:  # with weights that nobody has trained
        return first
    told = f"with other weights than it has now, {later.differs}" if later.differs else ""
    return Evaluation(told, tuple(sorted({*first.writes, *later.writes})))


def _moved(graph: OperatorGraph, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    moved = dict(tensors)
    for name, spec in graph.parameters.items():
        tensor = tensors[name]
        if spec.trainable:
            by = torch.randn(tensor.shape, generator=generator, device="cpu").to(tensor) * _MOVED_BY
            moved[name] = tensor + by * (1 + tensor.abs())
    return moved


def _after_training(sides: Sides, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns what a forward in training writes, as a few leave it: a centre has moved, a count is 2.

    It is empty where the stages cannot run with these weights.
    """
    names = written_by(sides.graph)
    modules = stage_modules(sides, tensors)
    try:
        with randomness(on=sides.draw_in_order), torch.no_grad():
            for _ in range(_CALLS_IN_TRAINING):
                run_forwards(sides.programs, modules, sides.example)
    except Exception:  # the comparison that follows tells of it
        return {}
    return {name: tensor.detach() for name, tensor in _held(sides.programs, modules) if name in names}


def _of_model(sides: Sides, tensors: Mapping[str, Tensor]) -> tuple[Mapping[str, Tensor], set[str], Drawn]:
    """Returns the model's results, the tensors that it has changed, and what it has drawn."""

    def run(gradients: bool) -> tuple[Mapping[str, Tensor], set[str], Drawn]:
        with weights_of(sides, tensors) as live, randomness(on=sides.draw_in_order) as draws:
            sides.model.eval()
            # The tensors may be the model's own.
            before = {name: live[name].clone() for name in written_by(sides.graph) if name in live}
            outputs = returned(sides.forward, sides.given(tensors, live), gradients=gradients)
            changed = {name for name, tensor in before.items() if _is_changed(live[name], tensor)}
            return outputs, changed, draws.drawn()

    return with_gradients_if_asked(run)


def _of_stages(sides: Sides, tensors: Mapping[str, Tensor]) -> tuple[Mapping[str, Tensor], set[str], Drawn]:
    modules = [module.eval() for module in stage_modules(sides, tensors)]
    with randomness(on=sides.draw_in_order) as draws, torch.no_grad(), set_fast_path(on=False):
        _, produced = run_forwards(sides.programs, modules, sides.example)
        drawn = draws.drawn()
    changed = {name for name, after in _held(sides.programs, modules) if _is_changed(after, tensors[name])}
    return model_outputs(sides.programs, produced), changed, drawn


def _held(programs: Sequence[StageProgram], modules: Sequence[nn.Module]) -> Iterator[tuple[str, Tensor]]:
    """Yields the names in the graph and the tensors of all stages; several may hold one name."""
    for program, module in zip(programs, modules, strict=True):
        yield from held_tensors(program, module).items()


def draws_in_evaluation(graph: OperatorGraph) -> bool:
    """Whether stages may draw in evaluation too, by an operator other than dropout, which is off then."""
    return next(_not_dropping(graph), None) is not None


def _not_dropping(graph: OperatorGraph) -> Iterator[Operator]:
    for operator in graph.operators.values():
        if operator.is_random and not any(word in operator.target for word in ("dropout", "attention")):
            yield operator


def _told(error: Exception) -> str:
    """Returns what an error says; an `assert` says nothing more than what it is."""
    return str(error) or type(error).__name__


def _draws_differ(graph: OperatorGraph, model: Drawn, stages: Drawn) -> str:
    if model == stages:
        return ""
    places = (f" ({operator.source_line})" for operator in _not_dropping(graph) if operator.source_line)
    place = next(places, "")
    if not model.anything:
        return f"the stages draw random numbers{place}, and the model does not"
    if not stages.anything:
        return "the model draws random numbers, and the stages do not"
    return f"the stages draw other random numbers than the model{place}"


def _is_changed(after: Tensor, before: Tensor) -> bool:
    if after.shape != before.shape:
        return True
    after = after.to(before)
    return not bool(((after == before) | (after.isnan() & before.isnan())).all())


def outputs_differ(sides: Sides, expected: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> str:
    """Describes the first output that differs from the model's, or returns ""."""
    for name, value in found.items():
        if name not in expected:
            return f"the model does not return {name!r}"
        try:
            apart = difference(name, expected[name], value, 0.0)
        except VerificationError as error:
            return str(error)
        if not apart.relative <= tolerance_of(value, coarsest_tolerance(sides.graph, sides.programs)):
            return f"{name!r} is another one, by {apart.relative:.1e} of its largest entry"
    return ""
