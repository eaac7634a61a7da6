"""A stage: its source, its inputs and outputs, and the module that the source builds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from torch import Tensor, nn

from pd2bw_fx.errors import PlanMismatchError
from pd2bw_fx.graph import OperatorGraph, TensorSpec
from pd2bw_fx.module import build_module, build_modules, held_buffers, held_parameters, held_tensors
from pd2bw_fx.stage_errors import authors_lines, note_place
from pd2bw_fx.units import counted

__all__ = [
    "Port",
    "Stage",
    "StageProgram",
    "build_module",
    "build_modules",
    "held_buffers",
    "held_parameters",
    "held_tensors",
]


@dataclass(frozen=True, slots=True)
class Port:
    """One argument of a stage's forward, or one of the tensors that it returns.

    `value` is the value's name in the operator graph, which is the same at both ends of a link.
    """

    value: str
    name: str  # the argument's or variable's name in the generated code
    spec: TensorSpec
    source: int | None = None  # for an input: the stage that sends it; None: an input of the model
    targets: tuple[int, ...] = ()  # for an output: the stages that it is sent to
    model_output: str | None = None  # for an output: its name in the model ("loss"), if that returns it

    @property
    def needs_gradient(self) -> bool:
        """Whether a gradient flows back over this port."""
        return self.spec.requires_grad

    def to_json(self) -> dict[str, Any]:
        return {
            "value": self.value,
            "name": self.name,
            "spec": self.spec.to_json(),
            "source": self.source,
            "targets": list(self.targets),
            "model_output": self.model_output,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        spec, targets = TensorSpec.from_json(data["spec"]), tuple(data["targets"])
        return cls(data["value"], data["name"], spec, data["source"], targets, data["model_output"])


@dataclass(frozen=True, slots=True)
class StageProgram:
    """Generated code and what it promises.

    `source` defines `class_name`, an `nn.Module` without constructor arguments. Its forward takes `inputs`
    positionally in this order, and returns the one tensor of `outputs` or a tuple of them in this order.
    `parameters` and `buffers` (constants and non-persistent buffers among them) are names in the graph, which
    are the original model's. The module has its tensors under the same names, except tied ones: `ties` maps
    all names that the stage has a tied tensor under to the graph's, which need not be one of them. `draws`
    are the positions in the graph of the operators that draw random numbers, in their order.
    """

    stage: int
    class_name: str
    source: str
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    parameters: tuple[str, ...]
    buffers: tuple[str, ...]
    ties: Mapping[str, str]
    draws: tuple[int, ...] = ()

    @property
    def names(self) -> dict[str, str]:
        """The names in the module's state dict, with those in the graph."""
        tied = set(self.ties.values())
        own = (name for name in (*self.parameters, *self.buffers) if name not in tied)
        return {name: name for name in own} | dict(self.ties)

    def __repr__(self) -> str:
        lines = counted(self.source.count("\n"), "line")
        return f"<StageProgram of stage {self.stage}: {self.class_name}, {lines}>"

    def to_json(self) -> dict[str, Any]:
        """Returns everything but the source, which has a file of its own."""
        return {
            "stage": self.stage,
            "class_name": self.class_name,
            "inputs": [port.to_json() for port in self.inputs],
            "outputs": [port.to_json() for port in self.outputs],
            "parameters": list(self.parameters),
            "buffers": list(self.buffers),
            "ties": dict(self.ties),
            "draws": list(self.draws),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any], source: str) -> Self:
        return cls(
            stage=data["stage"],
            class_name=data["class_name"],
            source=source,
            inputs=tuple(Port.from_json(port) for port in data["inputs"]),
            outputs=tuple(Port.from_json(port) for port in data["outputs"]),
            parameters=tuple(data["parameters"]),
            buffers=tuple(data["buffers"]),
            ties=dict(data["ties"]),
            draws=tuple(data.get("draws", ())),
        )


@dataclass(frozen=True, slots=True)
class Stage:
    """An element of `pipe.stages`: the program, and the module built from it with its weights."""

    program: StageProgram
    module: nn.Module

    def __repr__(self) -> str:
        return f"<Stage {self.program.stage}: {self.program.class_name}>"

    @property
    def source(self) -> str:
        """The Python module of the stage."""
        return self.program.source


def outputs_of(program: StageProgram, returned: Any) -> dict[str, Tensor]:
    """Returns a stage's outputs by value. Raises PlanMismatchError where they are not what its ports say."""
    values = (returned,) if isinstance(returned, Tensor) else returned
    if not isinstance(values, tuple) or len(values) != len(program.outputs):
        found = counted(len(values), "value") if isinstance(values, tuple) else type(values).__name__
        names = ", ".join(port.name for port in program.outputs)
        raise PlanMismatchError(f"stage_{program.stage}.py returns {found}; expected were {names}")
    return {port.value: value for port, value in zip(program.outputs, values, strict=True)}


def run_in_turn(
    stages: Sequence[Stage], inputs: Mapping[str, Tensor], graph: OperatorGraph
) -> dict[str, Tensor]:
    """Runs the stages one after another in this process; returns the model's outputs by name.

    An error in a stage gets a note with the author's line, which `graph` has.
    """
    values = dict(inputs)
    outputs: dict[str, Tensor] = {}
    for stage in stages:
        try:
            returned = stage.module(*(values[port.value] for port in stage.program.inputs))
        except Exception as error:
            note_place(error, authors_lines(graph))
            raise
        results = outputs_of(stage.program, returned)
        values |= results
        for port in stage.program.outputs:
            if port.model_output is not None:
                outputs[port.model_output] = results[port.value]
    return outputs
