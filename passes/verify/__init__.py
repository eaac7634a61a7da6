"""Stages against the original model: outputs, every gradient, every buffer, on the same inputs.

The stages run in one process, one after another, forward and then backward, exactly as the runtime chains
them; the model runs as it is. Both draw the same random numbers. The same operations in the same order give
the same bits, so the expected difference is zero; only a gradient that is the sum of three or more parts may
be added up in another order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from pd2bw_fx.errors import InputError, VerificationError
from pd2bw_fx.graph import OperatorGraph
from pd2bw_fx.plan import Plan
from pd2bw_fx.stage import Port, StageProgram, build_module, held_buffers, held_parameters

from .compare import Difference, coarsest_tolerance, difference, largest_of, tolerance_of

__all__ = ["Difference", "Forward", "Verification", "another_example", "evaluation_differs", "verify"]

# A gradient may be nothing but rounding (softmax takes no notice of a key's bias): its scale is at least this
# share of the largest gradient.
_FAINTEST = 1e-3

Forward = Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]]


@dataclass(frozen=True, slots=True)
class Verification:
    """What was compared, and how far it was apart. `exact`: every tensor is equal bit for bit."""

    differences: tuple[Difference, ...]
    with_random_numbers: bool  # dropout was active on both sides; else it was switched off on both

    @property
    def worst(self) -> Difference:
        return max(self.differences, key=lambda difference: difference.relative)

    @property
    def exact(self) -> bool:
        return self.worst.largest == 0

    def __str__(self) -> str:
        compared = f"{len(self.differences)} outputs, gradients and buffers compared with the model's"
        if self.exact:
            return f"{compared}: all equal bit for bit"
        return f"{compared}: largest difference {self.worst.relative:.2e} of {self.worst.name}"


@dataclass(frozen=True, slots=True)
class _Run:
    outputs: Mapping[str, Tensor]
    gradients: Mapping[str, Tensor | None]
    buffers: Mapping[str, Tensor]


def verify(
    graph: OperatorGraph,
    plan: Plan,
    programs: Sequence[StageProgram],
    tensors: Mapping[str, Tensor],
    example: Mapping[str, Tensor],
    *,
    model: nn.Module,
    forward: Forward,
    tolerance: float | None = None,
) -> Verification:
    """Compare on the example inputs. `forward` runs `model` on flat inputs and names its flat outputs.

    The model is given `tensors` as its weights and has its own back afterwards.
    Raises VerificationError naming the first tensor that differs by more than the tolerance.
    """
    in_order = _draws_in_program_order(graph, plan)
    eager = _run_model(graph, tensors, example, model, forward, random=in_order)
    staged = _run_stages(graph, programs, tensors, example, random=in_order)
    coarsest = coarsest_tolerance(graph, programs)
    return Verification(tuple(_compared(eager, staged, tolerance, coarsest)), with_random_numbers=in_order)


def evaluation_differs(
    graph: OperatorGraph,
    plan: Plan,
    programs: Sequence[StageProgram],
    tensors: Mapping[str, Tensor],
    example: Mapping[str, Tensor],
    *,
    model: nn.Module,
    forward: Forward,
) -> str:
    """What the stages of a model that was traced in training do otherwise than it in evaluation; or "".

    A trace has one of the two branches of `if self.training`.
    """
    in_order = _draws_in_program_order(graph, plan)
    with _weights_of(model, graph, tensors), _randomness(on=in_order), torch.no_grad():
        model.eval()
        try:
            expected = forward(example)
        except Exception as error:  # whatever the model's other branch does with the example
            return f"the model cannot be run in evaluation mode on the example inputs: {error}"
    modules = [build_module(program, tensors).eval() for program in programs]
    with _randomness(on=in_order), torch.no_grad():
        _, produced = _run_forwards(programs, modules, example)
    found = _model_outputs(programs, produced)
    for name, value in found.items():
        if name not in expected:
            return f"the model does not return {name!r}"
        try:
            apart = difference(name, expected[name], value, 0.0)
        except VerificationError as error:
            return str(error)
        if not apart.relative <= tolerance_of(value, coarsest_tolerance(graph, programs)):
            return f"{name!r} is another one, by {apart.relative:.1e} of its largest entry"
    return ""


def another_example(graph: OperatorGraph, example: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Inputs of other values and, in every dimension that is open, of another size, the same every time.

    Values are drawn from each input's own, so that tokens stay tokens; what is all 0 and 1 is a mask, and
    keeps them. An open batch is one sample longer (shorter, where the program is for no more); an open
    length is one shorter, for a model may bound it.
    """
    generator = torch.Generator().manual_seed(0)
    return {
        name: _another(graph, graph.inputs[name].shape, tensor, generator) for name, tensor in example.items()
    }


def _another(
    graph: OperatorGraph,
    shape: Sequence[int | str] | None,
    tensor: Tensor,
    generator: torch.Generator,
) -> Tensor:
    for dimension, size in enumerate(shape or ()):
        if not isinstance(size, str) or not size.isidentifier():
            continue
        if dimension == 0:
            before, flipped = tensor.shape[0], tensor.flip(0)
            sizes = [size for size in (before + 1, before - 1) if size in graph.batch_sizes and size]
            tensor = torch.cat([flipped, flipped[-1:]])[: sizes[0] if sizes else before]
        elif tensor.shape[dimension] > 2:
            tensor = tensor.narrow(dimension, 0, tensor.shape[dimension] - 1)
    if tensor.numel() == 0 or bool(((tensor == 0) | (tensor == 1)).all()):
        return tensor.clone()
    chosen = torch.randint(tensor.numel(), tensor.shape, generator=generator).to(tensor.device)
    return tensor.flatten()[chosen]


def _draws_in_program_order(graph: OperatorGraph, plan: Plan) -> bool:
    """Whether running the stages one after another draws random numbers in the model's own order."""
    stage_of = plan.stage_of
    drawing = [name for name, operator in graph.operators.items() if operator.is_random]
    stages = [stage_of[name] for name in drawing if name in stage_of]
    return stages == sorted(stages)


def _run_model(
    graph: OperatorGraph,
    tensors: Mapping[str, Tensor],
    example: Mapping[str, Tensor],
    model: nn.Module,
    forward: Forward,
    *,
    random: bool,
) -> _Run:
    with _weights_of(model, graph, tensors) as live, _randomness(on=random):
        outputs = forward(example)
        parameters = {name: live[name] for name, spec in graph.parameters.items() if spec.trainable}
        total = _trained_on(graph, outputs)
        gradients: Sequence[Tensor | None] = [None] * len(parameters)
        if total is not None and parameters:
            gradients = torch.autograd.grad(total, list(parameters.values()), allow_unused=True)
        return _Run(
            outputs={name: value.detach().clone() for name, value in outputs.items()},
            gradients=dict(zip(parameters, gradients, strict=True)),
            buffers={name: live[name].detach().clone() for name in graph.buffers if name in live},
        )


@contextmanager
def _weights_of(
    model: nn.Module, graph: OperatorGraph, tensors: Mapping[str, Tensor]
) -> Iterator[Mapping[str, Tensor]]:
    """The model in training mode with `tensors` as its weights; its own weights and mode come back."""
    live: dict[str, Tensor] = dict(model.named_parameters()) | dict(model.named_buffers())
    missing = sorted(name for name in graph.parameters if name not in live)
    if missing:
        raise InputError(f"the model has no parameter {missing[0]!r}: it is not the model that was split")
    held = {name: live[name] for name in (*graph.parameters, *graph.buffers) if name in live}
    before = {name: tensor.detach().clone() for name, tensor in held.items()}
    modes = {module: module.training for module in model.modules()}
    try:
        with torch.no_grad():
            for name, tensor in held.items():
                if tensor.shape != tensors[name].shape:
                    raise InputError(
                        f"{name!r} has shape {tuple(tensor.shape)} in the model and "
                        f"{tuple(tensors[name].shape)} in the pipeline: it is not the model that was split"
                    )
                tensor.copy_(tensors[name])
        yield held
    finally:
        with torch.no_grad():
            for name, tensor in held.items():
                tensor.copy_(before[name])
        for module, training in modes.items():
            module.training = training


def _run_stages(
    graph: OperatorGraph,
    programs: Sequence[StageProgram],
    tensors: Mapping[str, Tensor],
    example: Mapping[str, Tensor],
    *,
    random: bool,
) -> _Run:
    modules = [build_module(program, tensors) for program in programs]
    with _randomness(on=random):
        received, produced = _run_forwards(programs, modules, example)
    outputs = _model_outputs(programs, produced)
    _backward(graph, programs, received, produced)
    return _Run(
        outputs={name: value.detach() for name, value in outputs.items()},
        gradients=_summed_gradients(graph, programs, modules),
        buffers={
            name: buffer.detach()
            for program, module in zip(programs, modules, strict=True)
            for name, buffer in held_buffers(program, module).items()
        },
    )


def _run_forwards(
    programs: Sequence[StageProgram], modules: Sequence[nn.Module], example: Mapping[str, Tensor]
) -> tuple[list[dict[str, Tensor]], list[dict[str, Tensor]]]:
    """What each stage takes and what it gives, by name."""
    received: list[dict[str, Tensor]] = []
    produced: list[dict[str, Tensor]] = []
    for program, module in zip(programs, modules, strict=True):
        arguments = {port.value: _argument(port, example, produced) for port in program.inputs}
        received.append(arguments)
        produced.append(_named_outputs(program, module(*arguments.values())))
    return received, produced


def _model_outputs(
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
    # A leaf, as a tensor that came over a link is.
    return produced[port.source][port.value].detach().requires_grad_(port.needs_gradient)


def _named_outputs(program: StageProgram, returned: Tensor | tuple[Tensor, ...]) -> dict[str, Tensor]:
    values = (returned,) if isinstance(returned, Tensor) else returned
    return {port.value: value for port, value in zip(program.outputs, values, strict=True)}


def _trained_on(graph: OperatorGraph, outputs: Mapping[str, Tensor]) -> Tensor | None:
    """The loss; where the model has none, the sum of all that it returns."""
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
    """Last stage first; a value's gradient is the sum of what its readers send back, last reader first."""
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
            torch.autograd.backward(roots, gradients)


def _is_trained_on(graph: OperatorGraph, port: Port) -> bool:
    if port.model_output is None:
        return False
    return graph.loss is None or port.model_output == graph.loss


def _summed_gradients(
    graph: OperatorGraph, programs: Sequence[StageProgram], modules: Sequence[nn.Module]
) -> dict[str, Tensor | None]:
    """A parameter that several stages hold has the sum of their gradients."""
    sums: dict[str, Tensor | None] = {name: None for name, spec in graph.parameters.items() if spec.trainable}
    for program, module in reversed(list(zip(programs, modules, strict=True))):
        for name, parameter in held_parameters(program, module).items():
            gradient = parameter.grad
            if gradient is not None and name in sums:
                before = sums[name]
                sums[name] = gradient if before is None else before + gradient
    return sums


def _compared(eager: _Run, staged: _Run, tolerance: float | None, coarsest: float) -> Iterator[Difference]:
    largest = max((largest_of(g) for g in eager.gradients.values() if g is not None), default=0.0)
    faintest = {"output": 0.0, "gradient of": _FAINTEST * largest, "buffer": 0.0}
    for kind, expected, found in (
        ("output", eager.outputs, staged.outputs),
        ("gradient of", eager.gradients, staged.gradients),
        ("buffer", eager.buffers, staged.buffers),
    ):
        for name in expected:
            if name not in found:
                raise VerificationError(f"{kind} {name!r} is the model's, but no stage gives it")
            apart = difference(f"{kind} {name}", expected[name], found[name], faintest[kind])
            like = expected[name] if expected[name] is not None else found[name]
            allowed = tolerance if tolerance is not None else tolerance_of(like, coarsest)
            if not apart.relative <= allowed:
                raise VerificationError(
                    f"{apart.name} differs from the model's by {apart.relative:.3e} of its largest "
                    f"entry ({apart.largest:.3e} of {apart.scale:.3e}); {allowed:.0e} is allowed"
                )
            yield apart


class _EachDrawAlike(TorchFunctionMode):
    """For stages that draw in another order: every call of torch's draws from the same seed, and dropout, of
    which layers may do several within a call, passes its input through."""

    def __torch_function__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        kwargs = dict(kwargs or {})
        torch.manual_seed(0)
        if function in (nn.functional.dropout, torch.dropout):
            return args[0] if args else kwargs["input"]
        if function is nn.functional.scaled_dot_product_attention:
            args = (*args[:4], 0.0, *args[5:]) if len(args) > 4 else args
            kwargs = kwargs | ({} if len(args) > 4 else {"dropout_p": 0.0})
        return function(*args, **kwargs)


@contextmanager
def _randomness(*, on: bool) -> Iterator[None]:
    """The same random numbers for both sides, and the caller's generator as it was."""
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(0)
        if on:
            yield
        else:
            with _EachDrawAlike():
                yield
