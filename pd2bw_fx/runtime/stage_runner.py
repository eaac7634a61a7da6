"""Runs one stage: what each kind of action does to a microbatch.

RF k   take the activations of microbatch k from the links       RB k   the same for gradients
F k    run the module; keep what the backward needs              B k    run autograd from the outputs
SF k   send the outputs; drop them                               SB k   send the inputs' gradients
                                                                 I, W   the two halves of B
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Self

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from pd2bw_fx.actions import Action, Kind
from pd2bw_fx.program import set_fast_path
from pd2bw_fx.runtime.channel import Inbox, Outbox
from pd2bw_fx.runtime.draws import Draws
from pd2bw_fx.runtime.job import Job
from pd2bw_fx.runtime.links import Handover, Link, Links
from pd2bw_fx.runtime.recompute import WrittenState, with_copied_state
from pd2bw_fx.runtime.split_backward import WeightHalf, input_half, reaches
from pd2bw_fx.runtime.weights import WeightStore
from pd2bw_fx.source_check import uses_vary
from pd2bw_fx.stage import StageProgram, held_tensors, outputs_of
from pd2bw_fx.stage_errors import note_place

OnOutput = Callable[[int, str, Tensor], None]
"""Is told what the model returns for a microbatch: by its number, the output's name and value."""


@dataclass(frozen=True, slots=True)
class Microbatch:
    """A microbatch's model inputs on this rank, and what identifies their sizes on every rank.

    `by_host`: its tensors go between ranks through the host, which does not occupy the GPU.
    """

    inputs: Mapping[str, Tensor]
    size: Hashable
    by_host: bool = False

    @classmethod
    def of(cls, inputs: Mapping[str, Tensor]) -> Self:
        """Returns a microbatch with all inputs of the model."""
        return cls(inputs, tuple((name, tuple(tensor.shape)) for name, tensor in inputs.items()))

    def on(self, device: torch.device, names: Iterable[str], *, by_host: bool) -> Microbatch:
        """Returns the microbatch with these inputs only, on that device."""
        # From a GPU to the CPU torch would not wait for the copy, and a forward there neither.
        moved = {n: self.inputs[n].to(device, non_blocking=device.type != "cpu") for n in names}
        return Microbatch(moved, self.size, by_host)


def sizes_of(microbatches: Iterable[Microbatch]) -> str:
    """Returns the sizes in words, the same on every rank that was given the same batch."""
    return "microbatches of " + " and ".join(map(str, dict.fromkeys(each.size for each in microbatches)))


@dataclass(slots=True)
class _InFlight:
    """What is kept of a microbatch, from its arrival to the end of its backward."""

    microbatch: Microbatch
    received: dict[str, Tensor] = field(default_factory=dict)
    outputs: dict[str, Tensor] = field(default_factory=dict)
    roots: dict[str, GradientEdge] = field(default_factory=dict)
    loss: tuple[GradientEdge, Tensor] | None = None
    gradients: dict[str, list[Tensor]] = field(default_factory=dict)
    input_gradients: dict[str, Tensor | None] = field(default_factory=dict)
    runs_again: bool = False  # nothing was kept of the forward
    state: dict[Tensor, Tensor] = field(default_factory=dict)  # what the forward writes, before that
    weight_half: WeightHalf | None = None
    is_done: bool = False  # except that its gradients are still to be sent

    def release(self) -> None:
        """Drops the graph and the inputs that went into it."""
        self.received, self.roots, self.gradients, self.loss = {}, {}, {}, None


class StageRunner:
    """The links, weights and microbatches in flight of one stage.

    `precision` is the type that autocast computes in; None is no autocast. `is_compiled`: torch.compile has
    compiled the module.
    """

    def __init__(
        self,
        job: Job,
        program: StageProgram,
        links: Links,
        weights: WeightStore,
        *,
        device: torch.device,
        precision: torch.dtype | None,
        is_compiled: bool = False,
        on_output: OnOutput,
    ) -> None:
        self.program = program
        self.links = links
        self.weights = weights
        self.device = device
        self.training = True
        # A compiled stage calls no operator that could be told from the others: it draws as a whole.
        self.draws = Draws(program.stage, () if is_compiled else program.draws, device)
        self._stage = program.stage
        self._authors_lines = job.authors_lines
        self._loss = job.loss
        self._version_of_loss = functools.partial(
            job.work.rules.forward_version, job.shape, job.shape.num_stages - 1
        )
        self._recompute = program.stage in job.recomputed
        self._training_writes = job.training_writes
        self._share = 1.0 / job.microbatches_per_update
        self._loss_gradient: tuple[float, Tensor] | None = None
        self._precision = precision
        self._is_compiled = is_compiled
        self._on_output = on_output
        self._in_flight: dict[int, _InFlight] = {}
        self._is_reached: dict[str, bool] = {}  # inputs that a backward has left without a gradient
        self._uses_vary = uses_vary(program.source)
        self._views_of_weights: list[str] | None = None  # outputs, known from the first forward
        self._written = WrittenState(program, job.written_parameters, job.unread_statistics)

    def add(self, number: int, microbatch: Microbatch) -> None:
        """Takes a microbatch, to which coming actions refer by its number."""
        self._in_flight[number] = _InFlight(microbatch)

    @property
    def waiting(self) -> list[int]:
        """The microbatches whose gradients are still to come."""
        return sorted(self._in_flight)

    def expect(self, kind: Kind, number: int) -> None:
        """Posts the receives of a coming action, unless they are posted."""
        microbatch = self._in_flight[number].microbatch
        for link in self._incoming(kind):
            link.of(number).expect(number, microbatch.size, by_host=microbatch.by_host)

    def expect_sent(self, send: Action, received: Collection[tuple[Kind, int, int]]) -> None:
        """Posts the receives for another rank's send, if it goes to this stage and is not in `received`."""
        kind = Kind.RECEIVE_ACTIVATION if send.kind is Kind.SEND_ACTIVATION else Kind.RECEIVE_GRADIENT
        number = send.microbatch
        if number not in self._in_flight or (kind, self._stage, number) in received:
            return
        microbatch = self._in_flight[number].microbatch
        for link in self._incoming(kind):
            if link.peer == send.stage:
                link.of(number).expect(number, microbatch.size, by_host=microbatch.by_host)

    def receives(self, kind: Kind) -> bool:
        return bool(self._incoming(kind))

    def _incoming(self, kind: Kind) -> tuple[Link[Inbox | Handover], ...]:
        return self.links.activations_in if kind is Kind.RECEIVE_ACTIVATION else self.links.gradients_in

    def perform(self, action: Action) -> None:
        try:
            self._performs[action.kind](self, action)
        except Exception as error:
            note_place(error, self._authors_lines)
            raise

    # This rank sends what other ranks wait for in an update before it waits for them.

    def _receive_activation(self, action: Action) -> None:
        self.weights.progress(needed=action.version)
        self.expect(action.kind, action.microbatch)
        kept = self._in_flight[action.microbatch]
        for link in self.links.activations_in:
            taken = link.of(action.microbatch).take(action.microbatch)
            for value, tensor in zip(link.values, taken, strict=True):
                assert tensor is not None
                kept.received[value] = tensor

    def _forward(self, action: Action) -> None:
        kept = self._in_flight[action.microbatch]
        module = self.weights.begin_forward(self._stage, action.version, in_flight=self.training)
        if not self.training:
            produced = self._evaluated(module, kept)
        elif self._recompute:
            produced = self._run_without_graph(module, kept, action.microbatch)
        else:
            with torch.enable_grad(), self._drawing(action.microbatch):
                produced = self._run(module, kept)
            self._keep_roots(kept, produced, action.version)
        kept.outputs = self._outgoing(module, produced)
        for port in self.program.outputs:
            if port.model_output is not None:
                self._on_output(action.microbatch, port.model_output, produced[port.value])
        if not self.training and not kept.outputs:
            del self._in_flight[action.microbatch]

    def _run_without_graph(self, module: nn.Module, kept: _InFlight, microbatch: int) -> dict[str, Tensor]:
        """Runs a forward that will run again for its backward, and keeps of it what that one needs."""
        kept.runs_again = True
        kept.state = self._written.before(module)
        # Compiled without gradients it might draw other numbers than when it runs again.
        with torch.set_grad_enabled(self._is_compiled), self._drawing(microbatch):
            produced = self._run(module, kept)
        self._written.keep(kept.state)
        return {v: tensor.detach() for v, tensor in produced.items()} if self._is_compiled else produced

    def _evaluated(self, module: nn.Module, kept: _InFlight) -> dict[str, Tensor]:
        """Runs a forward in evaluation, which leaves the module as it was.

        Attention layers compute as in other cuts, where they are divided: not by torch's fast path.
        """
        with torch.no_grad(), set_fast_path(on=False):
            as_before = self._kept_in_evaluation(module)
            produced = self._run(module, kept)
            for tensor, before in as_before.items():
                tensor.copy_(before)
        return produced

    def _outgoing(self, module: nn.Module, produced: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Returns the outputs for later stages.

        One that is a view of weights is copied: an update in place may come before it has been sent.
        """
        outputs = {port.value: produced[port.value] for port in self.program.outputs if port.targets}
        if self._views_of_weights is None:
            trained = {id(parameter) for parameter in module.parameters() if parameter.requires_grad}
            self._views_of_weights = [
                value
                for value, tensor in outputs.items()
                if id(tensor._base if tensor._is_view() else tensor) in trained
            ]
        for value in self._views_of_weights:
            outputs[value] = outputs[value].detach().clone()
        return outputs

    def _kept_in_evaluation(self, module: nn.Module) -> dict[Tensor, Tensor]:
        """Copies what a forward writes in training only: the traced forward writes it in evaluation too."""
        if not self._training_writes:
            return {}
        held = held_tensors(self.program, module)
        return {held[name]: held[name].clone() for name in self._training_writes & held.keys()}

    def _run(self, module: nn.Module, kept: _InFlight) -> dict[str, Tensor]:
        """Runs the stage's forward on a microbatch; returns its outputs by name."""
        with_graph = torch.is_grad_enabled()
        arguments = []
        for port in self.program.inputs:
            if port.source is None:
                arguments.append(kept.microbatch.inputs[port.value])
                continue
            arguments.append(kept.received[port.value])
            if with_graph and port.needs_gradient:
                arguments[-1].requires_grad_()
        with self._autocast():
            return outputs_of(self.program, module(*arguments))

    def _drawing(self, microbatch: int) -> contextlib.AbstractContextManager[None]:
        if self.training and (self.program.draws or self._recompute):
            return self.draws.of(microbatch)
        return contextlib.nullcontext()

    def _autocast(self) -> contextlib.AbstractContextManager[None]:
        if self._precision is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device.type, self._precision)

    def _keep_roots(self, kept: _InFlight, produced: Mapping[str, Tensor], version: int) -> None:
        """Keeps where the backward begins. The outputs themselves are dropped once they are sent."""
        for port in self.program.outputs:
            value = produced[port.value]
            if not value.requires_grad:
                continue
            edge = get_gradient_edge(value)
            if port.targets:
                kept.roots[port.value] = edge
            if port.model_output == self._loss:
                kept.loss = edge, self._gradient_of_loss(value, version)

    def _gradient_of_loss(self, loss: Tensor, version: int) -> Tensor:
        """Returns the loss's gradient: what is trained on is the mean over the update's microbatches."""
        share = self._share * self.weights.loss_scale(version)
        last = self._loss_gradient
        if last is None or last[0] != share or last[1].dtype != loss.dtype or last[1].shape != loss.shape:
            self._loss_gradient = last = share, torch.full_like(loss, share)
        return last[1]

    def _send_activation(self, action: Action) -> None:
        kept = self._in_flight[action.microbatch]
        for link in self.links.activations_out:
            self._send(link, action.microbatch, [kept.outputs[value] for value in link.values])
        kept.outputs = {}
        if not self.training:
            del self._in_flight[action.microbatch]

    def _receive_gradient(self, action: Action) -> None:
        self.weights.progress(needed=self._version_of_loss(action.microbatch))
        self.expect(action.kind, action.microbatch)
        kept = self._in_flight[action.microbatch]
        for link in self.links.gradients_in:
            taken = link.of(action.microbatch).take(action.microbatch)
            for value, tensor in zip(link.values, taken, strict=True):
                if tensor is not None:
                    kept.gradients.setdefault(value, []).append(tensor)
        self.links.settle_activations(action.microbatch)

    def _backward(self, action: Action) -> None:
        kept = self._in_flight[action.microbatch]
        edges, gradients = self._roots(kept, action)
        if edges:
            torch.autograd.backward(edges, gradients)
        self._end_backward(kept, action, edges)

    def _input_gradient(self, action: Action) -> None:
        kept = self._in_flight[action.microbatch]
        edges, gradients = self._roots(kept, action)
        inputs = [tensor for tensor in kept.received.values() if tensor.requires_grad]
        kept.weight_half = input_half(edges, gradients, inputs if edges else [])
        kept.input_gradients = self._input_gradients(kept, edges)
        kept.release()

    def _weight_gradient(self, action: Action) -> None:
        kept = self._in_flight[action.microbatch]
        assert kept.weight_half is not None
        kept.weight_half.run()
        self.weights.end_backward(action.version)
        del self._in_flight[action.microbatch]

    def _roots(self, kept: _InFlight, action: Action) -> tuple[list[GradientEdge], list[Tensor]]:
        """Returns where the backward begins, and the gradients there."""
        module = self.weights.begin_backward(self._stage, action.version)
        if kept.runs_again:
            self._run_again(kept, module, action)
        edges: list[GradientEdge] = []
        gradients: list[Tensor] = []
        if kept.loss is not None:
            edges.append(kept.loss[0])
            gradients.append(kept.loss[1])
        for value, edge in kept.roots.items():
            for gradient in kept.gradients.get(value, []):
                edges.append(edge)
                gradients.append(gradient)
        return edges, gradients

    def _end_backward(self, kept: _InFlight, action: Action, edges: Sequence[GradientEdge]) -> None:
        self.weights.end_backward(action.version)
        if not self.links.gradients_out:
            del self._in_flight[action.microbatch]
            return
        kept.input_gradients = self._input_gradients(kept, edges)
        kept.release()
        kept.is_done = True

    def _input_gradients(self, kept: _InFlight, edges: Sequence[GradientEdge]) -> dict[str, Tensor | None]:
        """Returns the inputs' gradients by value.

        Where Python computes a part of the stage, an input may have a gradient in one microbatch and none in
        another. It gets zeros if the backward reaches it, and None if no backward ever does.
        """
        found: dict[str, Tensor | None] = {}
        for value, tensor in kept.received.items():
            found[value] = tensor.grad
            if self._uses_vary and tensor.grad is None and tensor.requires_grad and edges:
                if value not in self._is_reached:
                    self._is_reached[value] = reaches(edges, tensor)
                found[value] = torch.zeros_like(tensor) if self._is_reached[value] else None
        return found

    def _run_again(self, kept: _InFlight, module: nn.Module, action: Action) -> None:
        """Recomputes a forward that has kept nothing. Running statistics have counted it already."""
        with self._drawing(action.microbatch), with_copied_state(module, kept.state), torch.enable_grad():
            produced = self._run(module, kept)
        kept.state = {}
        self._keep_roots(kept, produced, action.version)

    def _send_gradient(self, action: Action) -> None:
        if not self.links.gradients_out:
            return
        kept = self._in_flight[action.microbatch]
        for link in self.links.gradients_out:
            self._send(link, action.microbatch, [kept.input_gradients[value] for value in link.values])
        kept.input_gradients = {}
        if kept.is_done:
            del self._in_flight[action.microbatch]

    def _send(self, link: Link[Outbox | Handover], number: int, values: Sequence[Tensor | None]) -> None:
        microbatch = self._in_flight[number].microbatch
        link.of(number).send(number, microbatch.size, values, by_host=microbatch.by_host)

    # The class's own: bound methods would hold the runner, which would hold them, and the weights with it.
    _performs: ClassVar[Mapping[Kind, Callable[[StageRunner, Action], None]]] = {
        Kind.RECEIVE_ACTIVATION: _receive_activation,
        Kind.FORWARD: _forward,
        Kind.SEND_ACTIVATION: _send_activation,
        Kind.RECEIVE_GRADIENT: _receive_gradient,
        Kind.BACKWARD: _backward,
        Kind.INPUT_GRADIENT: _input_gradient,
        Kind.WEIGHT_GRADIENT: _weight_gradient,
        Kind.SEND_GRADIENT: _send_gradient,
    }
