"""The operator graph: what the model computes, one node for each operator of the traced program.

The graph is data (it survives a JSON round trip); `fx` and `root`, the traced program and the live model,
are at hand only in the process that traced it.

Normal form of `fx` (what `passes/normalise/` promises and everything after it relies on):

- `placeholder`: the model's tensor inputs, flat, under the names of the forward's arguments;
- `get_attr`: parameters, buffers and constants; `target` is the name in `parameters`, `buffers` or
  `constants`, which for parameters and buffers is the name in the model's own state_dict;
- `call_function`: ATen operators before decomposition, `operator.getitem`, arithmetic on sizes;
  `call_module` and `call_method` occur only where symbolic tracing was the front end;
- `output`: one flat tuple, in the order of `outputs`.

Every call node has an entry of the same name in `operators`. `meta["nn_module_stack"]` has the calls of
modules that it is in, by keys of which those of layers within a `torch.vmap` end in `OF_A_MAP`.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Self

import torch
from torch import nn

from pd2bw_fx.size_range import ANY_SIZE, SizeRange
from pd2bw_fx.units import counted

if TYPE_CHECKING:
    import networkx as nx

    from pd2bw_fx.program import FxProgram

OF_A_MAP = " of a map"
# Keys of an operator's meta. Their values are dicts by the key of a call in nn_module_stack: which argument
# of the call its value is, and which result, as (position, name, how many); "" if the author gave no name.
GIVEN_AS, RETURNED_AT = "given_as", "returned_at"
# For a result in a tuple that is itself a result, the positions of both are one number.
RETURNED_INSIDE = "returned_inside"
NOTED_OF_CALLS = (GIVEN_AS, RETURNED_AT, RETURNED_INSIDE)


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """A tensor's shape, type and whether a gradient flows to it.

    A dimension that follows the batch (or another dynamic size) is an expression in the graph's symbols,
    e.g. `"batch"` or `"4*batch"`; its value at the traced example stands in `example_shape`.
    `shape` is None where nothing is known (symbolic tracing without example inputs).
    """

    shape: tuple[int | str, ...] | None
    dtype: torch.dtype
    requires_grad: bool = False
    example_shape: tuple[int, ...] | None = None

    @property
    def num_bytes(self) -> int:
        """The bytes at the example's sizes; 0 where the shape is unknown."""
        if self.example_shape is None:
            return 0
        return math.prod(self.example_shape) * self.dtype.itemsize

    def __str__(self) -> str:
        sizes = "?" if self.shape is None else ", ".join(str(size) for size in self.shape)
        return f"{dtype_name(self.dtype)} ({sizes})"

    def to_json(self) -> dict[str, Any]:
        return {
            "shape": None if self.shape is None else list(self.shape),
            "dtype": dtype_name(self.dtype),
            "requires_grad": self.requires_grad,
            "example_shape": None if self.example_shape is None else list(self.example_shape),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        shape, example = data["shape"], data["example_shape"]
        return cls(
            shape=None if shape is None else tuple(shape),
            dtype=dtype_from_name(data["dtype"]),
            requires_grad=data["requires_grad"],
            example_shape=None if example is None else tuple(example),
        )


@dataclass(frozen=True, slots=True)
class Operator:
    """One call of the traced program.

    `reads` names the operators and model inputs whose values it takes, in order, without repeats;
    `parameters` and `buffers` (constants among them) are read by state_dict name. `outputs` holds one spec,
    or one for each element of a tuple, or none for a size. Operators of one `memory_group` stay in one stage,
    in order: they write the same memory in place (running statistics, and what has no functional form), have
    values whose size only a run can tell, or belong to one call that evaluation leaves out.
    """

    name: str
    target: str  # "aten.linear.default", "operator.getitem"
    module_path: str  # "transformer.h.0.attn"; "" is the model itself
    module_type: str  # "GPT2Attention"
    reads: tuple[str, ...]
    parameters: tuple[str, ...] = ()
    buffers: tuple[str, ...] = ()
    outputs: tuple[TensorSpec, ...] = ()
    source_line: str | None = None  # "modeling_gpt2.py:221"
    writes_buffers: tuple[str, ...] = ()  # BatchNorm's running statistics
    is_view: bool = False  # its output shares storage with an operand
    is_random: bool = False  # it draws random numbers
    is_replicable: bool = False  # computed from inputs and sizes alone: every stage that reads it computes it
    memory_group: str | None = None

    @property
    def requires_grad(self) -> bool:
        return any(spec.requires_grad for spec in self.outputs)


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """A parameter, buffer or constant. `tied_names` are its further names in the state_dict, if any."""

    name: str
    spec: TensorSpec
    trainable: bool = True
    persistent: bool = True  # False: a buffer or constant that the model's state_dict leaves out
    tied_names: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelOutput:
    """An output of the model: what it returns under `name` is the value of operator (or input) `value`."""

    name: str
    value: str


@dataclass(frozen=True, slots=True)
class OperatorGraph:
    """The whole model. Operators are in program order, which is a topological order."""

    operators: Mapping[str, Operator]
    inputs: Mapping[str, TensorSpec]
    parameters: Mapping[str, ParameterSpec]
    buffers: Mapping[str, ParameterSpec]  # buffers and constants
    outputs: tuple[ModelOutput, ...]
    loss: str | None  # name of the output that is trained on; None: the model has no loss
    model_name: str = "model"
    batch_symbol: str | None = "batch"  # None: traced at one size, the example's
    batch_sizes: SizeRange = ANY_SIZE  # the sizes that the program is right for, where the batch is open
    unused_inputs: tuple[str, ...] = ()
    fx: FxProgram | None = field(default=None, compare=False, repr=False)
    root: nn.Module | None = field(default=None, compare=False, repr=False)
    changing: tuple[nn.Module, ...] = field(default=(), compare=False, repr=False)  # see `Traced`

    def __repr__(self) -> str:
        held = counted(len(self.parameters), "parameter")
        return f"<OperatorGraph of {self.model_name}: {counted(len(self.operators), 'operator')}, {held}>"

    def digraph(self) -> nx.DiGraph[str]:
        """Returns a graph of operator names (attribute `operator`), with edges from producer to consumer."""
        import networkx as nx  # a rank that trains needs none

        graph: nx.DiGraph[str] = nx.DiGraph()
        for operator in self.operators.values():
            graph.add_node(operator.name, operator=operator)
        for operator in self.operators.values():
            for value in operator.reads:
                if value in self.operators:
                    graph.add_edge(value, operator.name)
        return graph

    def readers(self) -> dict[str, list[str]]:
        """Returns the operators that read each operator or input, in program order."""
        readers: dict[str, list[str]] = {name: [] for name in (*self.inputs, *self.operators)}
        for operator in self.operators.values():
            for value in operator.reads:
                readers[value].append(operator.name)
        return readers

    def unread(self) -> dict[str, str]:
        """Returns the parameters, buffers and constants that no operator reads, with where each stays.

        That is the first operator that reads a tensor with most modules around both.
        """
        reads = {name: (*o.parameters, *o.buffers) for name, o in self.operators.items()}
        read = {tensor for tensors in reads.values() for tensor in tensors}
        placed = [name for name, operator in self.operators.items() if not operator.is_replicable]
        by_module = {"": placed[0]} if placed else {}
        for operator in placed:
            for module in (module for tensor in reads[operator] for module in _modules_around(tensor)):
                by_module.setdefault(module, operator)
        return {
            name: next(by_module[module] for module in _modules_around(name) if module in by_module)
            for name in (*self.parameters, *self.buffers)
            if name not in read and placed
        }

    def trained(self) -> frozenset[str]:
        """Returns the parameters that are trained: one that no operator reads has no gradient."""
        trainable = {name for name, parameter in self.parameters.items() if parameter.trainable}
        return frozenset(trainable - self.unread().keys())

    def computed_from(self, inputs: Collection[str]) -> frozenset[str]:
        """Returns these inputs and the operators whose values depend on them, if only through a buffer."""
        found, written = set(inputs), set[str]()
        for operator in self.operators.values():
            if not found.isdisjoint(operator.reads) or not written.isdisjoint(operator.buffers):
                found.add(operator.name)
                written.update(operator.writes_buffers)
        return frozenset(found)

    def fingerprint(self) -> str:
        """Returns a hash of what is computed: a plan fits only graphs with the hash of its own."""
        text = json.dumps(self.to_json(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def without_live_parts(self) -> OperatorGraph:
        return replace(self, fx=None, root=None, changing=())

    def to_json(self) -> dict[str, Any]:
        return {
            "model_name": self.model_name,
            "batch_symbol": self.batch_symbol,
            "batch_sizes": self.batch_sizes.to_json(),
            "inputs": {name: spec.to_json() for name, spec in self.inputs.items()},
            "unused_inputs": list(self.unused_inputs),
            "parameters": [_parameter_to_json(p) for p in self.parameters.values()],
            "buffers": [_parameter_to_json(b) for b in self.buffers.values()],
            "operators": [_operator_to_json(o) for o in self.operators.values()],
            "outputs": [[output.name, output.value] for output in self.outputs],
            "loss": self.loss,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        operators = (_operator_from_json(entry) for entry in data["operators"])
        parameters = (_parameter_from_json(entry) for entry in data["parameters"])
        buffers = (_parameter_from_json(entry) for entry in data["buffers"])
        return cls(
            operators={operator.name: operator for operator in operators},
            inputs={name: TensorSpec.from_json(spec) for name, spec in data["inputs"].items()},
            parameters={parameter.name: parameter for parameter in parameters},
            buffers={buffer.name: buffer for buffer in buffers},
            outputs=tuple(ModelOutput(name, value) for name, value in data["outputs"]),
            loss=data["loss"],
            model_name=data["model_name"],
            batch_symbol=data["batch_symbol"],
            batch_sizes=SizeRange(*data["batch_sizes"]),
            unused_inputs=tuple(data["unused_inputs"]),
        )


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def dtype_from_name(name: str) -> torch.dtype:
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"{name!r} is no torch dtype")
    return dtype


def _operator_to_json(operator: Operator) -> dict[str, Any]:
    return {
        "name": operator.name,
        "target": operator.target,
        "module_path": operator.module_path,
        "module_type": operator.module_type,
        "reads": list(operator.reads),
        "parameters": list(operator.parameters),
        "buffers": list(operator.buffers),
        "outputs": [spec.to_json() for spec in operator.outputs],
        "source_line": operator.source_line,
        "writes_buffers": list(operator.writes_buffers),
        "is_view": operator.is_view,
        "is_random": operator.is_random,
        "is_replicable": operator.is_replicable,
        "memory_group": operator.memory_group,
    }


def _operator_from_json(data: Mapping[str, Any]) -> Operator:
    return Operator(
        name=data["name"],
        target=data["target"],
        module_path=data["module_path"],
        module_type=data["module_type"],
        reads=tuple(data["reads"]),
        parameters=tuple(data["parameters"]),
        buffers=tuple(data["buffers"]),
        outputs=tuple(TensorSpec.from_json(spec) for spec in data["outputs"]),
        source_line=data["source_line"],
        writes_buffers=tuple(data["writes_buffers"]),
        is_view=data["is_view"],
        is_random=data["is_random"],
        is_replicable=data["is_replicable"],
        memory_group=data["memory_group"],
    )


def _modules_around(name: str) -> Iterator[str]:
    """Yields the modules that a tensor is inside of, the innermost first, and "" for the model."""
    while name:
        name = name.rpartition(".")[0]
        yield name


def _parameter_to_json(parameter: ParameterSpec) -> dict[str, Any]:
    return {
        "name": parameter.name,
        "spec": parameter.spec.to_json(),
        "trainable": parameter.trainable,
        "persistent": parameter.persistent,
        "tied_names": list(parameter.tied_names),
    }


def _parameter_from_json(data: Mapping[str, Any]) -> ParameterSpec:
    return ParameterSpec(
        name=data["name"],
        spec=TensorSpec.from_json(data["spec"]),
        trainable=data["trainable"],
        persistent=data["persistent"],
        tied_names=tuple(data["tied_names"]),
    )
