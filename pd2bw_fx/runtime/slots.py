"""A rank's modules over flat memory: one slot for each weight version that is alive.

    slot 0    stage 1's module, stage 5's module      parameters are views of one flat buffer a type
    slot 1    the same modules once more              buffers and frozen parameters are those of slot 0

There is a tree of modules for each slot, rather than one whose data is swapped, so that a microbatch in
flight keeps the version that it began with, also for recomputation.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from pd2bw_fx.stage import StageProgram, build_modules, held_buffers, held_parameters

# Which kernel runs, and with it the last bit of a sum, may depend on alignment; this one is torch's own.
_ALIGNMENT_BYTES = 64

Flat = dict[torch.dtype, Tensor]


@dataclass(frozen=True, slots=True)
class Span:
    """Where a parameter lies in the flat buffers of its type."""

    dtype: torch.dtype
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]

    @property
    def end(self) -> int:
        step = _ALIGNMENT_BYTES // self.dtype.itemsize
        return self.offset + math.ceil(self.shape.numel() / step) * step

    def view(self, flat: Mapping[torch.dtype, Tensor]) -> Tensor:
        return flat[self.dtype].as_strided(self.shape, self.stride, self.offset)


@dataclass(slots=True)
class Slot:
    """One version of the rank's trainable parameters, and its stages' modules that compute with them.

    A parameter that several of the rank's stages hold is one span in memory, and a Parameter for each stage.
    """

    flat: Flat
    modules: dict[int, nn.Module] = field(default_factory=dict)
    parameters: dict[str, list[nn.Parameter]] = field(default_factory=dict)

    def take_gradients(self) -> dict[str, Tensor]:
        """Returns the gradients that were added up since the last call, not copied, and leaves none."""
        taken: dict[str, Tensor] = {}
        for name, uses in self.parameters.items():
            for parameter in uses:
                if parameter.grad is None:
                    continue
                gradient = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
                taken[name] = taken[name] + gradient if name in taken else gradient
                parameter.grad = None
        return taken


class Slots:
    """`count` slots with the same initial weights."""

    def __init__(
        self,
        programs: Sequence[StageProgram],
        tensors: Mapping[str, Tensor],
        *,
        trainable: set[str],
        count: int,
        device: torch.device,
    ) -> None:
        self._programs = programs
        names = {name for program in programs for name in (*program.parameters, *program.buffers)}
        local = {name: tensors[name].to(device) for name in names}
        # What is trained is copied only once, into the flat memory: making an engine takes no more memory
        # than training.
        local = {name: tensor if name in trainable else tensor.clone() for name, tensor in local.items()}
        built = {p.stage: build_modules(p, local, count, copied=False) for p in programs}
        trees = [{stage: modules[slot] for stage, modules in built.items()} for slot in range(count)]
        held: dict[str, nn.Parameter] = {}
        for program in programs:
            held |= held_parameters(program, trees[0][program.stage])
        self.spans = _lay_out({name: p for name, p in held.items() if name in trainable})
        self._slots = [Slot(empty_flat(self.spans, device), tree) for tree in trees]
        shared = self._shared(held)
        for slot in self._slots:
            for program in programs:
                _share(slot.modules[program.stage], program, shared)
                _move_in(slot, program, self.spans)

    def __len__(self) -> int:
        return len(self._slots)

    def __getitem__(self, index: int) -> Slot:
        return self._slots[index]

    def __iter__(self) -> Iterator[Slot]:
        return iter(self._slots)

    def parameters(self, index: int) -> dict[str, nn.Parameter]:
        """Returns one slot's parameters, trainable and frozen, by name in the graph and in its order."""
        found: dict[str, nn.Parameter] = {}
        for program in self._programs:
            found |= held_parameters(program, self._slots[index].modules[program.stage])
        return found

    def buffers(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for program in self._programs:
            found |= held_buffers(program, self._slots[0].modules[program.stage])
        return found

    def train(self, *, on: bool) -> None:
        for slot in self._slots:
            for module in slot.modules.values():
                module.train(on)

    def _shared(self, held: Mapping[str, nn.Parameter]) -> dict[str, Tensor]:
        """Returns what exists once: buffers and frozen parameters."""
        frozen = {name: parameter for name, parameter in held.items() if name not in self.spans}
        return {**frozen, **self.buffers()}


def empty_flat(spans: Mapping[str, Span], device: torch.device) -> Flat:
    sizes: dict[torch.dtype, int] = {}
    for span in spans.values():
        sizes[span.dtype] = max(span.end, sizes.get(span.dtype, 0))
    return {dtype: torch.zeros(size, dtype=dtype, device=device) for dtype, size in sizes.items()}


def _lay_out(parameters: Mapping[str, nn.Parameter]) -> dict[str, Span]:
    spans, ends = dict[str, Span](), dict[torch.dtype, int]()
    for name, parameter in parameters.items():
        dense = torch.ops.aten.is_non_overlapping_and_dense(parameter)
        stride = parameter.stride() if dense else parameter.contiguous().stride()
        spans[name] = Span(parameter.dtype, ends.get(parameter.dtype, 0), parameter.shape, stride)
        ends[parameter.dtype] = spans[name].end
    return spans


def _move_in(slot: Slot, program: StageProgram, spans: Mapping[str, Span]) -> None:
    """Moves a stage's trainable parameters into the flat buffer, and freezes the others."""
    module = slot.modules[program.stage]
    for name, parameter in held_parameters(program, module).items():
        parameter.requires_grad_(name in spans)
        if name in spans:
            view = spans[name].view(slot.flat)
            view.copy_(parameter.detach())
            parameter.data = view
            slot.parameters.setdefault(name, []).append(parameter)
    _refresh_recurrent(module)


def _share(module: nn.Module, program: StageProgram, shared: Mapping[str, Tensor]) -> None:
    """Gives the module the buffers and frozen parameters, which exist once."""
    for name, _ in list(module.named_parameters(remove_duplicate=False)):
        parameter = shared.get(program.ties.get(name, name))
        if parameter is not None:
            assert isinstance(parameter, nn.Parameter)
            _owner(module, name)._parameters[name.rpartition(".")[2]] = parameter
    for name, _ in list(module.named_buffers(remove_duplicate=False)):
        _owner(module, name)._buffers[name.rpartition(".")[2]] = shared[program.ties.get(name, name)]
    _refresh_recurrent(module)


def _owner(module: nn.Module, name: str) -> nn.Module:
    return module.get_submodule(name.rpartition(".")[0])


def _refresh_recurrent(module: nn.Module) -> None:
    """Renews the lists of weights that recurrent modules keep beside their attributes.

    The weights are not flattened, as torch flattens them for cuDNN: they would get memory of their own, which
    no optimizer steps.
    """
    for part in module.modules():
        if isinstance(part, nn.RNNBase):
            weights = [getattr(part, name, None) for name in part._flat_weights_names]
            part._flat_weights = weights
            part._flat_weight_refs = [None if weight is None else weakref.ref(weight) for weight in weights]
