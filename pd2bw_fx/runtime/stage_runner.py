"""One rank's stage at work: performs the actions of a schedule in their order.

RF k   take the activations of microbatch k from the links       RB k   the same for gradients
F k    run the module; keep what the backward needs              B k    run autograd from the outputs' edges
SF k   send the outputs; drop them                               SB k   send the inputs' gradients
U v    make W(v)
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from pd2bw_fx.actions import Action, Kind
from pd2bw_fx.passes.schedule import warm_up_forwards
from pd2bw_fx.runtime.channel import Inbox, Outbox, Route
from pd2bw_fx.runtime.job import Job
from pd2bw_fx.runtime.weights import WeightStore
from pd2bw_fx.stage import Port

_POSTED_AHEAD = 2
_GRADIENT_TAGS = 2**27


@dataclass(frozen=True, slots=True)
class Microbatch:
    """A microbatch's model inputs on this rank, and what identifies their sizes on every rank."""

    inputs: Mapping[str, Tensor]
    size: Hashable


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
    random_state: _RandomState | None = None  # set where the forward is to be run again


class StageRunner:
    """Links, weights and microbatches in flight of one stage.

    `activations` and `gradients` are the process groups of the two directions.
    """

    def __init__(
        self,
        job: Job,
        weights: WeightStore,
        *,
        activations: dist.ProcessGroup,
        gradients: dist.ProcessGroup,
        device: torch.device,
        on_loss: Callable[[int, Tensor], None],
    ) -> None:
        self.job = job
        self.weights = weights
        self.device = device
        self.current: Action | None = None
        self._on_loss = on_loss
        self._training = True
        self._in_flight: dict[int, _InFlight] = {}
        program = job.program
        sources = _grouped((port.source, port) for port in program.inputs if port.source is not None)
        targets = _grouped((target, port) for port in program.outputs for target in port.targets)

        def forth(stage: int) -> Route:
            return Route(job.ranks[stage], activations, device, 0)

        def back(stage: int) -> Route:
            return Route(job.ranks[stage], gradients, device, _GRADIENT_TAGS)

        most = job.num_stages + job.microbatches_per_update
        self._activations_in = [Inbox(forth(s), _names(ports)) for s, ports in sources]
        self._activations_out = [Outbox(forth(t), _names(ports), most) for t, ports in targets]
        # The last reader's gradient comes first, as one backward of the whole model adds them.
        self._gradients_in = [
            Inbox(back(t), names) for t, ports in reversed(targets) if (names := _differentiable(ports))
        ]
        self._gradients_out = [
            Outbox(back(s), names, self._gradients_untaken(s))
            for s, ports in sources
            if (names := _differentiable(ports))
        ]
        self._perform: Mapping[Kind, Callable[[Action], None]] = {
            Kind.RECEIVE_ACTIVATION: self._receive_activation,
            Kind.FORWARD: self._forward,
            Kind.SEND_ACTIVATION: self._send_activation,
            Kind.RECEIVE_GRADIENT: self._receive_gradient,
            Kind.BACKWARD: self._backward,
            Kind.SEND_GRADIENT: self._send_gradient,
            Kind.UPDATE: self._update,
        }

    def _gradients_untaken(self, stage: int) -> int:
        """How many gradients may be on their way to an earlier stage, that no send has to wait for it.

        When this stage sends that of microbatch k, it has had the activations of k + w here, which the other
        sent after it took the gradient of k + w here - w there - 1 (w: warm-up forwards). More could be left
        only if the other stood still.
        """
        here, there = (
            warm_up_forwards(s, self.job.num_stages, self.job.slack) for s in (self.job.stage, stage)
        )
        return there - here + 1

    def add(self, first: int, microbatches: Iterable[Microbatch]) -> None:
        """Microbatches that coming actions refer to, numbered from `first`."""
        for number, microbatch in enumerate(microbatches, start=first):
            self._in_flight[number] = _InFlight(microbatch)

    def run(self, actions: Sequence[Action], *, training: bool = True) -> None:
        """Perform the actions.

        Receives are posted a few actions ahead, so that data arrives while this rank computes; those of
        gradients even for the actions of the next call, since their microbatches are known by then.
        """
        self._training = training
        activations = self._post(
            self._activations_in, (a.microbatch for a in actions if a.kind is Kind.RECEIVE_ACTIVATION)
        )
        gradients = self._post(
            self._gradients_in, (a.microbatch for a in actions if a.kind is Kind.RECEIVE_GRADIENT)
        )
        for action in actions:
            self.current = action
            self._perform[action.kind](action)
            self.weights.progress()
            if action.kind is Kind.RECEIVE_ACTIVATION:
                activations = self._post(self._activations_in, activations)
            elif action.kind is Kind.RECEIVE_GRADIENT:
                gradients = self._post(self._gradients_in, gradients)
        self.current = None
        if training:
            self._post(self._gradients_in, sorted(self._in_flight))

    def settle(self) -> None:
        """Wait until every peer has what was sent to it."""
        for outbox in (*self._activations_out, *self._gradients_out):
            outbox.settle()

    def _post(self, inboxes: Sequence[Inbox], coming: Iterable[int]) -> deque[int]:
        """Post receives up to the limit; what is still to be posted."""
        if not inboxes:
            return deque()
        left = deque(number for number in coming if not inboxes[0].expects(number))
        while left and inboxes[0].num_expected < _POSTED_AHEAD:
            number = left.popleft()
            for inbox in inboxes:
                inbox.expect(number, self._in_flight[number].microbatch.size)
        return left

    def _receive_activation(self, action: Action) -> None:
        # What other ranks wait for in an update goes out before this one waits for them.
        self.weights.progress(needed=action.version)
        kept = self._in_flight[action.microbatch]
        for inbox in self._activations_in:
            for value, tensor in zip(inbox.values, inbox.take(action.microbatch), strict=True):
                assert tensor is not None
                kept.received[value] = tensor

    def _forward(self, action: Action) -> None:
        kept = self._in_flight[action.microbatch]
        module = self.weights.acquire(action.version, in_flight=self._training)
        again = self._training and self.job.recompute
        if again:
            kept.random_state = _RandomState.now(self.device)
        with torch.set_grad_enabled(self._training and not again):
            produced = self._run(module, kept)
        kept.outputs = {port.value: produced[port.value] for port in self.job.program.outputs if port.targets}
        for port in self.job.program.outputs:
            if port.model_output == self.job.loss:
                self._on_loss(action.microbatch, produced[port.value].detach())
        if self._training and not again:
            self._keep_roots(kept, produced)
        if not self._training and not kept.outputs:
            del self._in_flight[action.microbatch]

    def _run(self, module: nn.Module, kept: _InFlight) -> dict[str, Tensor]:
        """The stage's forward on what a microbatch has: its outputs by name."""
        arguments = []
        for port in self.job.program.inputs:
            if port.source is None:
                arguments.append(kept.microbatch.inputs[port.value])
                continue
            arguments.append(kept.received[port.value])
            if torch.is_grad_enabled() and port.needs_gradient:
                arguments[-1].requires_grad_()
        returned = module(*arguments)
        values = (returned,) if isinstance(returned, Tensor) else returned
        return {port.value: value for port, value in zip(self.job.program.outputs, values, strict=True)}

    def _keep_roots(self, kept: _InFlight, produced: Mapping[str, Tensor]) -> None:
        """Where the backward begins. Of the outputs themselves nothing is kept beyond their sending."""
        for port in self.job.program.outputs:
            value = produced[port.value]
            if not value.requires_grad:
                continue
            edge = get_gradient_edge(value)
            if port.targets:
                kept.roots[port.value] = edge
            if port.model_output == self.job.loss:
                # The mean over the update's microbatches is what is trained on.
                kept.loss = edge, torch.full_like(value, 1.0 / self.job.microbatches_per_update)

    def _send_activation(self, action: Action) -> None:
        kept = self._in_flight[action.microbatch]
        for outbox in self._activations_out:
            outbox.send(
                action.microbatch, kept.microbatch.size, [kept.outputs[value] for value in outbox.values]
            )
        kept.outputs = {}
        if not self._training:
            del self._in_flight[action.microbatch]

    def _receive_gradient(self, action: Action) -> None:
        kept = self._in_flight[action.microbatch]
        for inbox in self._gradients_in:
            for value, tensor in zip(inbox.values, inbox.take(action.microbatch), strict=True):
                if tensor is not None:
                    kept.gradients.setdefault(value, []).append(tensor)
        # Gradients have come back, so what they are gradients of has arrived, and its memory may go.
        if self._gradients_in:
            for outbox in self._activations_out:
                outbox.settle(action.microbatch)

    def _backward(self, action: Action) -> None:
        kept = self._in_flight[action.microbatch]
        if kept.random_state is not None:
            self._run_again(kept, action.version)
        edges: list[GradientEdge] = []
        gradients: list[Tensor] = []
        if kept.loss is not None:
            edges.append(kept.loss[0])
            gradients.append(kept.loss[1])
        for value, edge in kept.roots.items():
            for gradient in kept.gradients.get(value, []):
                edges.append(edge)
                gradients.append(gradient)
        if edges:
            torch.autograd.backward(edges, gradients)
        self.weights.release(action.version)
        received = kept.received
        del self._in_flight[action.microbatch]
        if self._gradients_out:
            done = self._in_flight[action.microbatch] = _InFlight(kept.microbatch)
            done.input_gradients = {value: tensor.grad for value, tensor in received.items()}

    def _run_again(self, kept: _InFlight, version: int) -> None:
        """The forward that was run without keeping anything. Statistics have counted it already."""
        assert kept.random_state is not None
        module = self.weights.module(version)
        with kept.random_state.restored(), _other_buffers(module), torch.enable_grad():
            produced = self._run(module, kept)
        self._keep_roots(kept, produced)

    def _send_gradient(self, action: Action) -> None:
        if not self._gradients_out:
            return
        kept = self._in_flight.pop(action.microbatch)
        for outbox in self._gradients_out:
            values = [kept.input_gradients[value] for value in outbox.values]
            outbox.send(action.microbatch, kept.microbatch.size, values)

    def _update(self, action: Action) -> None:
        self.weights.update(action.version)


@dataclass(frozen=True, slots=True)
class _RandomState:
    """The generators that a forward draws from, to draw the same again."""

    cpu: Tensor
    device: torch.device
    cuda: Tensor | None

    @classmethod
    def now(cls, device: torch.device) -> _RandomState:
        cuda = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
        return cls(torch.get_rng_state(), device, cuda)

    @contextlib.contextmanager
    def restored(self) -> Iterator[None]:
        with torch.random.fork_rng([self.device] if self.cuda is not None else []):
            torch.set_rng_state(self.cpu)
            if self.cuda is not None:
                torch.cuda.set_rng_state(self.cuda, self.device)
            yield


@contextlib.contextmanager
def _other_buffers(module: nn.Module) -> Iterator[None]:
    """The module with copies of its buffers, which it may write and autograd may keep."""
    held = [(owner, dict(owner._buffers)) for owner in module.modules()]
    copies = {id(b): b.clone() for _, buffers in held for b in buffers.values() if b is not None}
    for owner, buffers in held:
        owner._buffers.update({n: None if b is None else copies[id(b)] for n, b in buffers.items()})
    try:
        yield
    finally:
        for owner, buffers in held:
            owner._buffers.update(buffers)


def _grouped(ends: Iterable[tuple[int, Port]]) -> list[tuple[int, list[Port]]]:
    """By stage, in order; the values of one link in the order of their names, alike at both ends."""
    groups: dict[int, list[Port]] = {}
    for stage, port in ends:
        groups.setdefault(stage, []).append(port)
    return [(stage, sorted(groups[stage], key=lambda port: port.value)) for stage in sorted(groups)]


def _names(ports: Iterable[Port]) -> tuple[str, ...]:
    return tuple(port.value for port in ports)


def _differentiable(ports: Iterable[Port]) -> tuple[str, ...]:
    return _names(port for port in ports if port.needs_gradient)
