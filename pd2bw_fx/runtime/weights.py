"""The weights of one stage in one or two versions, and the update that makes the next one.

    slot 0   W(0) . . W(2) . .        two copies of the stage's module ("shells"), each with its parameters in
    slot 1   . W(1) . . W(3) .        its own flat buffer; version v lives in slot v % 2, buffers are shared

An update copies the newest version to the other slot and steps the optimizer there. Microbatches in flight
keep the version that they began with: their saved tensors are views of a slot that nobody writes until their
backward is done. (Swapping data under one module instead gives silently wrong gradients with recomputation.)

Where other stages add to an update (tied parameters, the norm of the whole gradient), it is put off until its
version is needed; a second gradient buffer takes what comes meanwhile.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from pd2bw_fx.errors import InputError, PlanMismatchError
from pd2bw_fx.runtime.checkpoint import Checkpoint, StageState, random_state
from pd2bw_fx.runtime.ties import TiedParameter
from pd2bw_fx.runtime.update import Clipping, PendingUpdate
from pd2bw_fx.stage import StageProgram, build_module, held_buffers, held_parameters

OptimizerFactory = Callable[[Any], Optimizer]  # takes what torch's optimizers take: parameters, or groups
SchedulerFactory = Callable[[Optimizer], LRScheduler]
ParameterOptions = Callable[[str, nn.Parameter], Mapping[str, Any]]

# Kernels may choose by alignment, and with them the last bit of a sum; torch's own allocations have this one.
_ALIGNMENT_BYTES = 64


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a parameter lies in the flat buffers of its type."""

    name: str
    dtype: torch.dtype
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]

    def view(self, flat: Mapping[torch.dtype, Tensor]) -> Tensor:
        return flat[self.dtype].as_strided(self.shape, self.stride, self.offset)


class WeightStore:
    """Versions W(v) of one stage's parameters, `num_versions` of them alive at a time."""

    def __init__(
        self,
        program: StageProgram,
        tensors: Mapping[str, Tensor],
        *,
        trainable: Iterable[str],
        num_versions: int,
        device: torch.device,
        ties: Sequence[TiedParameter] = (),
        clipping: Clipping | None = None,
    ) -> None:
        self.program = program
        self.newest = 0
        self._device = device
        self.num_versions = num_versions
        local = {name: tensors[name].to(device) for name in (*program.parameters, *program.buffers)}
        self._shells = [build_module(program, local)]
        self._shells += [build_module(program, local) for _ in range(num_versions - 1)]
        wanted = set(trainable)
        shell = self._shells[0]
        self._places = _lay_out({n: p for n, p in held_parameters(program, shell).items() if n in wanted})
        self._flat = [_flat_buffers(self._places, device) for _ in self._shells]
        self._ties = tuple(tied for tied in ties if tied.name in self._places)
        self._clipping = clipping
        self._pending: PendingUpdate | None = None
        self._parameters = [
            _move_into(shell, program, self._places, flat)
            for shell, flat in zip(self._shells, self._flat, strict=True)
        ]
        for other in self._shells[1:]:
            _share(other, self._shells[0], program, wanted)
        # The optimizer's parameters: stepped in the slot that is being made.
        self._aliases = {
            name: nn.Parameter(place.view(self._flat[0]).detach()) for name, place in self._places.items()
        }
        self._users = [0] * num_versions
        # Tied parameters with a gradient on any of their holders; None until the first update has asked.
        self._used_ties: frozenset[str] | None = None
        self._optimizer: Optimizer | None = None
        self._scheduler: LRScheduler | None = None

    def optimize_with(
        self,
        optimizer: OptimizerFactory,
        scheduler: SchedulerFactory | None,
        parameter_options: ParameterOptions | None = None,
    ) -> None:
        """Make the optimizer, over this stage's trainable parameters in the order of the graph.

        A stage without any has none: torch's optimizers refuse an empty list.
        """
        if not self._aliases:
            return
        self._optimizer = optimizer(grouped(self._aliases, parameter_options))
        self._scheduler = None if scheduler is None else scheduler(self._optimizer)
        if isinstance(self._scheduler, ReduceLROnPlateau):
            raise InputError(
                "ReduceLROnPlateau wants a metric at every step, which a pipeline's update does not have; "
                "use a scheduler that steps by itself, such as CosineAnnealingLR"
            )

    def module(self, version: int) -> nn.Module:
        """The stage's module with the weights of a living version."""
        if self._pending is not None and version == self._pending.version:
            self.finish_update()
        assert self.newest - self.num_versions < version <= self.newest, f"W{version} is not alive"
        return self._shells[version % self.num_versions]

    def acquire(self, version: int, *, in_flight: bool) -> nn.Module:
        """The module for a forward; `in_flight`: its backward is still to come, on the same version."""
        module = self.module(version)
        self._users[version % self.num_versions] += in_flight
        return module

    def release(self, version: int) -> None:
        """After the backward of a microbatch that ran on this version."""
        self._users[version % self.num_versions] -= 1

    def update(self, version: int) -> None:
        """Make W(version) of the one before with the gradients that the backwards have left, when needed."""
        self.finish_update()
        assert version == self.newest + 1, f"W{version} made after W{self.newest}"
        self._pending = PendingUpdate(
            version, self._taken_gradients(), self._ties, self._clipping, self._device
        )
        self._pending.start(self._used_ties, empty=self._empty_gradient)
        if not self._pending.can_wait:
            self.finish_update()

    def progress(self, *, needed: int | None = None) -> None:
        """Let a pending update go on; without further waiting unless it makes the version `needed`."""
        if self._pending is not None:
            self._pending.progress(must=needed == self._pending.version)

    def finish_update(self) -> None:
        """Make the version that was put off, if one was."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        gradients = pending.finish()
        self._used_ties = pending.used_ties
        source, target = self.newest % self.num_versions, pending.version % self.num_versions
        assert self._users[target] == 0, f"W{pending.version} overwrites weights that a microbatch needs"
        for dtype, flat in self._flat[target].items():
            if source != target:
                flat.copy_(self._flat[source][dtype])
        self._step(target, gradients)
        self.newest = pending.version

    def tensors(self) -> dict[str, Tensor]:
        """Parameters of the newest version, buffers and constants, by their names in the graph."""
        self.finish_update()
        shell = self._shells[self.newest % self.num_versions]
        held = {**held_parameters(self.program, shell), **held_buffers(self.program, shell)}
        return {name: tensor.detach() for name, tensor in held.items()}

    def state(self) -> StageState:
        """Everything that training goes on from. No update may be pending, no microbatch in flight."""
        self.finish_update()
        assert not any(self._users), "microbatches are in flight"
        tensors: dict[str, Tensor] = {}
        for kind, version in (("newest", self.newest), ("older", self.newest - 1)):
            shell = self._shells[version % self.num_versions]
            for name, parameter in held_parameters(self.program, shell).items():
                tensors[f"{kind}/{name}"] = parameter
        for name, buffer in held_buffers(self.program, self._shells[0]).items():
            tensors[f"buffer/{name}"] = buffer
        options: dict[str, dict[str, Any]] = {}
        for name, alias in self._aliases.items():
            assert self._optimizer is not None
            for key, value in self._optimizer.state.get(alias, {}).items():
                if value is not None:
                    tensors[f"optimizer/{name}/{key}"] = torch.as_tensor(value)
            group = next(g for g in self._optimizer.param_groups if any(p is alias for p in g["params"]))
            options[name] = {key: value for key, value in group.items() if key != "params"}
        scheduler = None if self._scheduler is None else _plain_state(self._scheduler)
        return StageState(tensors, options, scheduler, random_state(self._device))

    def load(self, checkpoint: Checkpoint) -> None:
        """Take over what `state` gave, of this stage or of the stages that held its parameters then."""
        updates = checkpoint.header.updates
        parameters = [f"{kind}/{name}" for kind in ("newest", "older") for name in self.program.parameters]
        buffers = [f"buffer/{name}" for name in self.program.buffers]
        found = checkpoint.tensors([*parameters, *buffers, *(f"optimizer/{name}" for name in self._aliases)])
        missing = [key for key in (*parameters, *buffers) if key not in found]
        if missing:
            raise PlanMismatchError(
                f"{checkpoint.path} has no {missing[0]!r}; it is a checkpoint of another model"
            )
        with torch.no_grad():
            for kind, version in (("older", updates - 1), ("newest", updates)):
                shell = self._shells[version % self.num_versions]
                for name, parameter in held_parameters(self.program, shell).items():
                    parameter.copy_(found[f"{kind}/{name}"])
            for name, buffer in held_buffers(self.program, self._shells[0]).items():
                buffer.copy_(found[f"buffer/{name}"])
        self.newest = updates
        self._load_optimizer(checkpoint, found)

    def _load_optimizer(self, checkpoint: Checkpoint, found: Mapping[str, Tensor]) -> None:
        if self._optimizer is None:
            return
        names = {id(alias): name for name, alias in self._aliases.items()}
        state = self._optimizer.state_dict()
        ordered = [names[id(p)] for group in self._optimizer.param_groups for p in group["params"]]
        state["state"] = {
            index: kept
            for index, name in enumerate(ordered)
            if (
                kept := {
                    k.rpartition("/")[2]: v for k, v in found.items() if k.startswith(f"optimizer/{name}/")
                }
            )
        }
        for group in state["param_groups"]:
            group |= checkpoint.options[ordered[group["params"][0]]]
        self._optimizer.load_state_dict(state)
        if self._scheduler is not None and checkpoint.scheduler is not None:
            self._scheduler.load_state_dict(dict(checkpoint.scheduler))

    def train(self, *, on: bool) -> None:
        for shell in self._shells:
            shell.train(on)

    def _step(self, target: int, gradients: Mapping[str, Tensor]) -> None:
        if self._optimizer is None:
            return
        for name, alias in self._aliases.items():
            alias.data = self._places[name].view(self._flat[target])
            # No gradient is not a zero gradient: AdamW decays the weight for the one, and not for the other.
            alias.grad = gradients.get(name)
        self._optimizer.step()
        for alias in self._aliases.values():
            alias.grad = None
        if self._scheduler is not None:
            self._scheduler.step()

    def _taken_gradients(self) -> dict[str, Tensor]:
        """What backwards have added up since the last update, handed over rather than copied.

        All microbatches of an update ran on one version, so that one shell has all there is.
        """
        taken: dict[str, Tensor] = {}
        for parameters in self._parameters:
            for name, parameter in parameters.items():
                if parameter.grad is not None:
                    assert name not in taken, f"two versions have a gradient of {name}"
                    taken[name] = parameter.grad.to_dense() if parameter.grad.is_sparse else parameter.grad
                    parameter.grad = None
        return taken

    def _empty_gradient(self, name: str) -> Tensor:
        return torch.zeros_like(self._aliases[name], memory_format=torch.contiguous_format)


def _plain_state(scheduler: LRScheduler) -> dict[str, Any]:
    """Its state without the functions in it, which the next run brings itself."""
    plain = (int, float, str, bool, list, tuple, dict, type(None))
    return {k: v for k, v in scheduler.state_dict().items() if isinstance(v, plain) and k != "lr_lambdas"}


def grouped(parameters: Mapping[str, nn.Parameter], options: ParameterOptions | None) -> list[Any]:
    """What an optimizer is made from: the parameters, or one group for each distinct set of options."""
    if options is None:
        return list(parameters.values())
    groups: list[dict[str, Any]] = []
    for name, parameter in parameters.items():
        chosen = dict(options(name, parameter))
        known = next((g for g in groups if {k: v for k, v in g.items() if k != "params"} == chosen), None)
        if known is None:
            groups.append({"params": [parameter], **chosen})
        else:
            known["params"].append(parameter)
    return groups


def _lay_out(parameters: Mapping[str, nn.Parameter]) -> dict[str, _Place]:
    places, ends = dict[str, _Place](), dict[torch.dtype, int]()
    for name, parameter in parameters.items():
        step = _ALIGNMENT_BYTES // parameter.dtype.itemsize
        offset = ends.get(parameter.dtype, 0)
        dense = torch.ops.aten.is_non_overlapping_and_dense(parameter)
        stride = parameter.stride() if dense else parameter.contiguous().stride()
        places[name] = _Place(name, parameter.dtype, offset, parameter.shape, stride)
        ends[parameter.dtype] = offset + math.ceil(parameter.numel() / step) * step
    return places


def _flat_buffers(places: Mapping[str, _Place], device: torch.device) -> dict[torch.dtype, Tensor]:
    sizes: dict[torch.dtype, int] = {}
    for place in places.values():
        step = _ALIGNMENT_BYTES // place.dtype.itemsize
        sizes[place.dtype] = place.offset + math.ceil(place.shape.numel() / step) * step
    return {dtype: torch.zeros(size, dtype=dtype, device=device) for dtype, size in sizes.items()}


def _move_into(
    shell: nn.Module, program: StageProgram, places: Mapping[str, _Place], flat: Mapping[torch.dtype, Tensor]
) -> dict[str, nn.Parameter]:
    """Give the shell's trainable parameters their values in the flat buffer; the others are frozen."""
    held = held_parameters(program, shell)
    moved: dict[str, nn.Parameter] = {}
    for name, place in places.items():
        view = place.view(flat)
        parameter = held[name]
        view.copy_(parameter.detach())
        parameter.data = view
        moved[name] = parameter
        parameter.requires_grad_(True)
    for name, parameter in held.items():
        if name not in moved:
            parameter.requires_grad_(False)
    _refresh_recurrent(shell)
    return moved


def _share(shell: nn.Module, first: nn.Module, program: StageProgram, own: set[str]) -> None:
    """Buffers and frozen parameters exist once: the shell takes the first one's."""
    parameters, buffers = held_parameters(program, first), held_buffers(program, first)
    for name, _ in list(shell.named_parameters(remove_duplicate=False)):
        canonical = program.ties.get(name, name)
        if canonical not in own:
            _owner(shell, name)._parameters[name.rpartition(".")[2]] = parameters[canonical]
    for name, _ in list(shell.named_buffers(remove_duplicate=False)):
        canonical = program.ties.get(name, name)
        _owner(shell, name)._buffers[name.rpartition(".")[2]] = buffers[canonical]
    _refresh_recurrent(shell)


def _owner(module: nn.Module, name: str) -> nn.Module:
    return module.get_submodule(name.rpartition(".")[0])


def _refresh_recurrent(shell: nn.Module) -> None:
    """Recurrent modules keep a list of their weights beside the attributes."""
    for module in shell.modules():
        if isinstance(module, nn.RNNBase):
            module._init_flat_weights()
