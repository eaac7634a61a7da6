"""The two sides of a comparison: the model as it is, and its stages one after another, in one process."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from pd2bw_fx.attributes import keep_model
from pd2bw_fx.drawing import call_draws, gpus, use_seed_of_checks
from pd2bw_fx.errors import InputError, VerificationError, models_own_backward
from pd2bw_fx.graph import OperatorGraph, dtype_name
from pd2bw_fx.plan import Plan
from pd2bw_fx.program import as_written, surrounding_autocast
from pd2bw_fx.stage import Port, StageProgram, build_module, held_buffers, held_parameters, outputs_of
from pd2bw_fx.untraced_operands import NAMESPACE as UNTRACED

Forward = Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]


@dataclass(frozen=True, slots=True)
class Sides:
    """What is compared: a model and its stages, on the same inputs. Their weights are given for each run.

    `forward` runs `model` on flat inputs by name.
    """

    graph: OperatorGraph
    plan: Plan
    programs: Sequence[StageProgram]
    example: Mapping[str, Tensor]
    model: nn.Module
    forward: Forward

    @property
    def draw_in_order(self) -> bool:
        """Whether running the stages one after another draws random numbers in the model's own order."""
        stage_of = self.plan.stage_of
        drawing = [name for name, operator in self.graph.operators.items() if operator.is_random]
        stages = [stage_of[name] for name in drawing if name in stage_of]
        return stages == sorted(stages)

    def given(self, tensors: Mapping[str, Tensor], live: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns what `forward` is given: the inputs, and the buffers of a loss outside of the model."""
        of_the_loss = {n: tensors[n] for n in self.graph.buffers if n not in live and n in tensors}
        return {**self.example, **of_the_loss}


@dataclass(frozen=True, slots=True)
class Run:
    """The tensors of one side that are compared."""

    outputs: Mapping[str, Tensor]
    gradients: Mapping[str, Tensor | None]
    buffers: Mapping[str, Tensor]
    # Parameters: of the model, those that its forward has written; of the stages, all.
    written: Mapping[str, Tensor]
    drawn: Drawn


def run_model(sides: Sides, tensors: Mapping[str, Tensor]) -> Run:
    graph = sides.graph
    with weights_of(sides, tensors) as live, randomness(on=sides.draw_in_order) as draws:
        versions = {name: _version(live[name]) for name in graph.parameters}
        outputs = sides.forward(sides.given(tensors, live))
        parameters = {name: live[name] for name, spec in graph.parameters.items() if spec.trainable}
        total = _trained_on(graph, outputs)
        gradients: Sequence[Tensor | None] = [None] * len(parameters)
        if total is not None and parameters:
            with models_own_backward():
                gradients = torch.autograd.grad(total, list(parameters.values()), allow_unused=True)
        return Run(
            outputs={name: value.detach().clone() for name, value in outputs.items()},
            gradients=dict(zip(parameters, gradients, strict=True)),
            buffers={name: live[name].detach().clone() for name in graph.buffers if name in live},
            written={
                name: live[name].detach().clone()
                for name, version in versions.items()
                if _version(live[name]) != version or name in written_by(graph)
            },
            drawn=draws.drawn(),
        )


def _version(tensor: Tensor) -> int:
    """Returns a counter that changes with each write; inference tensors have none."""
    return 0 if tensor.is_inference() else tensor._version


@contextmanager
def weights_of(sides: Sides, tensors: Mapping[str, Tensor]) -> Iterator[Mapping[str, Tensor]]:
    """Gives the model `tensors` as its weights, and restores the model afterwards."""
    model, graph = sides.model, sides.graph
    live: dict[str, Tensor] = dict(model.named_parameters()) | dict(model.named_buffers())
    missing = sorted(name for name in graph.parameters if name not in live)
    if missing:
        raise InputError(f"the model has no parameter {missing[0]!r}: it is not the model that was split")
    held = {name: live[name] for name in (*graph.parameters, *graph.buffers) if name in live}
    for name, tensor in held.items():
        if tensor.shape != tensors[name].shape:
            raise InputError(
                f"{name!r} has shape {tuple(tensor.shape)} in the model and "
                f"{tuple(tensors[name].shape)} in the pipeline: it is not the model that was split"
            )
    with keep_model(model), as_written():
        with torch.no_grad():
            for name, tensor in held.items():
                tensor.copy_(tensors[name])
        yield held


def written_by(graph: OperatorGraph) -> set[str]:
    """Returns the names of all buffers, and of parameters that a forward writes."""
    return {n for o in graph.operators.values() for n in o.writes_buffers} | graph.buffers.keys()


def stage_modules(sides: Sides, tensors: Mapping[str, Tensor]) -> list[nn.Module]:
    """Builds the stages for a run that writes what the model writes.

    Only tensors that are written are copied: there may be no room for all weights of a large model twice.
    """
    graph = sides.graph
    written = written_by(graph)
    if graph.fx is None or any(o.target.startswith(UNTRACED) for o in graph.operators.values()):
        written |= tensors.keys()  # stages that were read may have been edited
    modules: list[nn.Module] = []
    for program in sides.programs:
        held = (*program.parameters, *program.buffers)
        own = {name: tensors[name].clone() if name in written else tensors[name] for name in held}
        modules.append(build_module(program, own, copied=False))
    return modules


def run_stages(sides: Sides, tensors: Mapping[str, Tensor]) -> Run:
    graph, programs = sides.graph, sides.programs
    modules = stage_modules(sides, tensors)
    with randomness(on=sides.draw_in_order) as draws:
        received, produced = run_forwards(programs, modules, sides.example)
        if not surrounding_autocast():  # else model and stages are both under the caller's autocast
            _require_types(programs, produced)
        outputs = model_outputs(programs, produced)
        _backward(graph, programs, received, produced)  # may draw, in a part that is run as it is written
        drawn = draws.drawn()
    return Run(
        outputs={name: value.detach() for name, value in outputs.items()},
        gradients=_summed_gradients(graph, programs, modules),
        buffers={
            name: buffer.detach()
            for program, module in zip(programs, modules, strict=True)
            for name, buffer in held_buffers(program, module).items()
        },
        written={
            name: parameter.detach()
            for program, module in zip(programs, modules, strict=True)
            for name, parameter in held_parameters(program, module).items()
        },
        drawn=drawn,
    )


def _require_types(programs: Sequence[StageProgram], produced: Sequence[Mapping[str, Tensor]]) -> None:
    """Raises VerificationError for a type other than the model's: the tolerance might hide it."""
    for program, values in zip(programs, produced, strict=True):
        for port in program.outputs:
            found, expected = values[port.value].dtype, port.spec.dtype
            if port.spec.example_shape is not None and found != expected:
                raise VerificationError(
                    f"stage {program.stage} gives {port.name!r} as {dtype_name(found)}, the model has it as "
                    f"{dtype_name(expected)}"
                )


def run_forwards(
    programs: Sequence[StageProgram], modules: Sequence[nn.Module], example: Mapping[str, Tensor]
) -> tuple[list[dict[str, Tensor]], list[dict[str, Tensor]]]:
    """Runs the stages; returns what each one takes and what it returns, by name."""
    received: list[dict[str, Tensor]] = []
    produced: list[dict[str, Tensor]] = []
    for program, module in zip(programs, modules, strict=True):
        arguments = {port.value: _argument(port, example, produced) for port in program.inputs}
        received.append(arguments)
        produced.append(outputs_of(program, module(*arguments.values())))
    return received, produced


def model_outputs(
    programs: Sequence[StageProgram], produced: Sequence[Mapping[str, Tensor]]
) -> dict[str, Tensor]:
    return {
        port.model_output: produced[program.stage][port.value]
        for program in programs
        for port in program.outputs
        if port.model_output is not None
    }


def _argument(port: Port, example: Mapping[str, Tensor], produced: Sequence[Mapping[str, Tensor]]) -> Tensor:
    if port.source is None:
        return example[port.value]
    # A leaf of autograd, like a tensor that came over a link.
    return produced[port.source][port.value].detach().requires_grad_(port.needs_gradient)


def _trained_on(graph: OperatorGraph, outputs: Mapping[str, Tensor]) -> Tensor | None:
    """Returns the loss or, where the model has none, the sum of its differentiable results."""
    if graph.loss is not None:
        return outputs[graph.loss] if outputs[graph.loss].requires_grad else None
    differentiable = [value.sum() for value in outputs.values() if value.requires_grad]
    return torch.stack([value.double() for value in differentiable]).sum() if differentiable else None


def _backward(
    graph: OperatorGraph,
    programs: Sequence[StageProgram],
    received: Sequence[Mapping[str, Tensor]],
    produced: Sequence[Mapping[str, Tensor]],
) -> None:
    """Runs the backwards, last stage first.

    A value's gradient is the sum of what its readers send back, last reader first.
    """
    for program in reversed(programs):
        roots, gradients = [], []
        for port in program.outputs:
            value = produced[program.stage][port.value]
            if not value.requires_grad:
                continue
            arriving = [received[target][port.value].grad for target in reversed(port.targets)]
            if _is_trained_on(graph, port):
                arriving.insert(0, torch.ones_like(value))
            for gradient in arriving:
                if gradient is not None:
                    roots.append(value)
                    gradients.append(gradient)
        if roots:
            with _unseen_writes_named():
                torch.autograd.backward(roots, gradients)


@contextmanager
def _unseen_writes_named() -> Iterator[None]:
    """Raises VerificationError where autograd sees a write in the stages that it does not in the model.

    `h.data.clamp_(min=0)` changes what a backward has kept, and only stages, which write `h.detach()`, fail.
    """
    try:
        yield
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        raise VerificationError(
            "the forward writes in place, as through .data, what its own backward has kept: the model "
            "computes gradients from the new values, which the stages' backward refuses to. Write to a clone "
            f"({str(error).partition(';')[0]})"
        ) from error


def _is_trained_on(graph: OperatorGraph, port: Port) -> bool:
    if port.model_output is None:
        return False
    return graph.loss is None or port.model_output == graph.loss


def _summed_gradients(
    graph: OperatorGraph, programs: Sequence[StageProgram], modules: Sequence[nn.Module]
) -> dict[str, Tensor | None]:
    """Returns the gradients; a parameter that several stages hold has the sum of theirs."""
    sums: dict[str, Tensor | None] = {name: None for name, spec in graph.parameters.items() if spec.trainable}
    for program, module in reversed(list(zip(programs, modules, strict=True))):
        for name, parameter in held_parameters(program, module).items():
            gradient = parameter.grad
            if gradient is not None and name in sums:
                before = sums[name]
                sums[name] = gradient if before is None else before + gradient
    return sums


@dataclass(frozen=True, slots=True)
class Drawn:
    """What one side has drawn from the random generators; equal to the other side's if both draw alike."""

    anything: bool
    trace: Hashable  # the generators' states, or the number of draws if each starts from the same seed


class _FromOneGenerator:
    def __init__(self) -> None:
        self._before = _generators()

    def drawn(self) -> Drawn:
        after = _generators()
        return Drawn(after != self._before, after)


class _EachDrawAlike(TorchFunctionMode):
    """Has every call of torch draw from the same seed, for stages that draw in another order than the model.

    Dropout passes its input through, since a layer may call it several times within one call.
    """

    def __init__(self) -> None:
        super().__init__()
        self._draws = 0

    def drawn(self) -> Drawn:
        return Drawn(self._draws > 0, self._draws)

    def __torch_function__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        kwargs = dict(kwargs or {})
        self._draws += call_draws(function, args, kwargs)
        use_seed_of_checks()
        if function in (nn.functional.dropout, torch.dropout):
            return args[0] if args else kwargs["input"]
        if function is nn.functional.scaled_dot_product_attention:
            args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
            kwargs = kwargs | ({} if len(args) > 4 else {"dropout_p": 0.0})
        if function is nn.functional.multi_head_attention_forward:
            args = (*args[:10], 0.0, *args[11:])  # called by a layer of torch, which stages call in parts
        return function(*args, **kwargs)


@contextmanager
def randomness(*, on: bool) -> Iterator[_FromOneGenerator | _EachDrawAlike]:
    """Gives both sides the same random numbers, and restores the caller's generators.

    Yields an object that tells what was drawn.
    """
    with torch.random.fork_rng(devices=gpus()):
        use_seed_of_checks()
        if on:
            yield _FromOneGenerator()
        else:
            with _EachDrawAlike() as draws:
                yield draws


def _generators() -> tuple[bytes, ...]:
    states = [torch.get_rng_state(), *map(torch.cuda.get_rng_state, gpus())]
    return tuple(bytes(state.tolist()) for state in states)
