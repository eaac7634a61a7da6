"""A stage's links: the peers with which it exchanges tensors, microbatch by microbatch.

    stage 1 (replicas on ranks 1 and 2) to stage 2 (rank 3)       microbatch k is run by replica k mod 2, so
                                                                  that stage 2 has an inbox for each of them

A link between two stages of one rank hands its tensors over without torch.distributed.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from pd2bw_fx.runtime.channel import TAGS_A_LINK, Inbox, Outbox, Route
from pd2bw_fx.runtime.groups import DirectedLink
from pd2bw_fx.runtime.job import Job
from pd2bw_fx.stage import Port, StageProgram

_GRADIENTS_UNDER_WAY = 2


@dataclass(slots=True)
class Handover:
    """Both ends of a link within a rank."""

    _held: dict[int, list[Tensor | None]] = field(default_factory=dict)

    def send(
        self, microbatch: int, size: Hashable, tensors: Sequence[Tensor | None], *, by_host: bool
    ) -> None:
        self._held[microbatch] = [None if tensor is None else tensor.detach() for tensor in tensors]

    def settle(self, microbatch: int | None = None) -> None:
        """Does nothing: nothing is on its way."""

    def expect(self, microbatch: int, size: Hashable, *, by_host: bool) -> None:
        """Does nothing: there is no receive to post."""

    def read_headers(self) -> None:
        """Does nothing: there are no headers."""

    def take(self, microbatch: int) -> list[Tensor | None]:
        return self._held.pop(microbatch)


_End = TypeVar("_End", Inbox | Handover, Outbox | Handover)


@dataclass(frozen=True, slots=True)
class Link(Generic[_End]):
    """The values that go between two stages in one direction, and this rank's ends, by the peer's rank."""

    values: tuple[str, ...]
    peer: int  # the other stage
    job: Job
    ends: Mapping[int, _End]

    def of(self, microbatch: int) -> _End:
        if len(self.ends) == 1:  # for each message: no rules are asked
            return next(iter(self.ends.values()))
        return self.ends[self.job.rank_of(self.peer, microbatch)]


@dataclass(frozen=True, slots=True)
class Links:
    """All links of one stage of a rank."""

    activations_in: tuple[Link[Inbox | Handover], ...]
    activations_out: tuple[Link[Outbox | Handover], ...]
    gradients_in: tuple[Link[Inbox | Handover], ...]
    gradients_out: tuple[Link[Outbox | Handover], ...]

    def settle_activations(self, microbatch: int) -> None:
        """Lets go of the activations that were sent: their gradients have come back, so they have arrived."""
        if self.gradients_in:
            for link in self.activations_out:
                link.of(microbatch).settle(microbatch)

    def read_headers(self) -> None:
        """Waits for the headers of all microbatches that are expected."""
        for link in (*self.activations_in, *self.gradients_in):
            for end in link.ends.values():
                end.read_headers()

    def settle(self) -> None:
        """Waits until every peer has received what was sent to it."""
        for link in (*self.activations_out, *self.gradients_out):
            for end in link.ends.values():
                end.settle()


@dataclass(slots=True)
class Connections:
    """Makes the links of a rank's stages.

    `wire` is the device of what their `groups` move, `control` a group that moves what is on the host.
    """

    job: Job
    groups: Mapping[DirectedLink, dist.ProcessGroup]
    control: dist.ProcessGroup
    device: torch.device
    wire: torch.device
    receiving: torch.cuda.Stream | None
    in_reach: frozenset[int]  # ranks whose memory this one sees
    timeout_s: float
    _handovers: dict[tuple[int, int, bool], Handover] = field(default_factory=dict)

    def of(self, program: StageProgram) -> Links:
        own, (sources, targets, coming, returning) = program.stage, _values_of(program)
        return Links(
            activations_in=tuple(self._incoming(s, own, names, back=False) for s, names in sources),
            activations_out=tuple(self._outgoing(own, t, names, back=False) for t, names in targets),
            # The last reader's gradient comes first, as one backward of the whole model adds them.
            gradients_in=tuple(self._incoming(t, own, names, back=True) for t, names in reversed(coming)),
            gradients_out=tuple(self._outgoing(own, s, names, back=True) for s, names in returning),
        )

    def _incoming(
        self, sender: int, own: int, values: tuple[str, ...], *, back: bool
    ) -> Link[Inbox | Handover]:
        ends: dict[int, Inbox | Handover] = {}
        for rank in self.job.ranks_of(sender):
            if rank == self.job.rank:
                ends[rank] = self._handover(sender, own, back)
            else:
                ends[rank] = Inbox(self._route(DirectedLink(sender, own, back, rank, self.job.rank)), values)
        return Link(values, sender, self.job, ends)

    def _outgoing(
        self, own: int, receiver: int, values: tuple[str, ...], *, back: bool
    ) -> Link[Outbox | Handover]:
        window = self._untaken(own, receiver) if back else self._most
        ends: dict[int, Outbox | Handover] = {}
        for rank in self.job.ranks_of(receiver):
            if rank == self.job.rank:
                ends[rank] = self._handover(own, receiver, back)
            else:
                link = DirectedLink(own, receiver, back, self.job.rank, rank)
                ends[rank] = Outbox(self._route(link), values, window)
        return Link(values, receiver, self.job, ends)

    def _handover(self, sender: int, receiver: int, back: bool) -> Handover:
        return self._handovers.setdefault((sender, receiver, back), Handover())

    def _route(self, link: DirectedLink) -> Route:
        """Returns the route of a link, with tags of its own among the links between the same two ranks."""
        theirs, mine = (
            self.job.work.rules.stages_of(self.job.shape, self.job.ranks.index(rank))
            for rank in (link.source, link.target)
        )
        number = theirs.index(link.sender) * len(mine) + mine.index(link.receiver)
        # The two directions may share a group with each other and with tags below those of any link.
        first_tag = (1 + 2 * number + link.back) * TAGS_A_LINK
        peer = link.source if link.target == self.job.rank else link.target
        shares = peer in self.in_reach and self.device.type == "cpu"
        host = torch.device("cpu")
        by_host = Route(peer, self.control, self.device, host, first_tag, shares, self.timeout_s)
        if self.groups[link] is self.control:
            return by_host
        return replace(
            by_host, group=self.groups[link], wire=self.wire, receiving=self.receiving, by_host=by_host
        )

    @property
    def _most(self) -> int:
        """More microbatches than are ever in flight: no send waits for a receiver that is not ready."""
        return self.job.num_ranks + self.job.shape.num_stages + self.job.microbatches_per_update

    def _untaken(self, own: int, receiver: int) -> int:
        """Returns how many gradients may be on their way to an earlier stage, so that no send has to wait.

        In asynchronous methods, when this stage sends the gradient of microbatch k, it has had the
        activations of k + w here, which the other stage sent after it took the gradient of k + w here - w
        there - 1 (w: warm-up forwards). More could be on their way only if the other stage stood still.
        """
        rules, shape = self.job.work.rules, self.job.shape
        if len(self.job.stages) > 1 or len(set(shape.replicas or (1,))) > 1:
            return self._most
        if rules.is_synchronous:
            return _GRADIENTS_UNDER_WAY  # nobody stands still before the flush
        return rules.in_flight(shape, receiver) - rules.in_flight(shape, own) + 1


def directed_links(job: Job) -> set[DirectedLink]:
    """Returns every link over which this rank sends to another one, or receives from it."""
    found: set[DirectedLink] = set()
    for program in job.programs:
        own, (sources, targets, coming, returning) = program.stage, _values_of(program)
        for back, senders, receivers in ((False, sources, targets), (True, coming, returning)):
            for sender, _ in senders:
                found |= {DirectedLink(sender, own, back, rank, job.rank) for rank in job.ranks_of(sender)}
            for receiver, _ in receivers:
                found |= {
                    DirectedLink(own, receiver, back, job.rank, rank) for rank in job.ranks_of(receiver)
                }
    return {link for link in found if link.source != link.target}


_Ends = list[tuple[int, tuple[str, ...]]]  # stages, and what goes between them and this one


def _values_of(program: StageProgram) -> tuple[_Ends, _Ends, _Ends, _Ends]:
    """Returns where a stage's activations come from and go to, and the same for its gradients."""
    sources = _grouped((port.source, port) for port in program.inputs if port.source is not None)
    targets = _grouped((target, port) for port in program.outputs for target in port.targets)
    return (
        [(stage, _names(ports)) for stage, ports in sources],
        [(stage, _names(ports)) for stage, ports in targets],
        [(stage, names) for stage, ports in targets if (names := _differentiable(ports))],
        [(stage, names) for stage, ports in sources if (names := _differentiable(ports))],
    )


def _grouped(ends: Iterable[tuple[int, Port]]) -> list[tuple[int, list[Port]]]:
    """Returns the values of each stage's link in the order of their names, which is the same at both ends."""
    groups: dict[int, list[Port]] = {}
    for stage, port in ends:
        groups.setdefault(stage, []).append(port)
    return [(stage, sorted(groups[stage], key=lambda port: port.value)) for stage in sorted(groups)]


def _names(ports: Iterable[Port]) -> tuple[str, ...]:
    return tuple(port.value for port in ports)


def _differentiable(ports: Iterable[Port]) -> tuple[str, ...]:
    return _names(port for port in ports if port.needs_gradient)
