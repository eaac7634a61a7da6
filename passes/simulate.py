"""Execute a schedule's action lists on a model of time.

    rank 0   F0 F1 F2 .... B0 F3 B1 F4 B2          a receive waits until its data has arrived;
               \\  \\  \\    /     /                   a send takes latency + bytes / bandwidth, and the rank
    rank 1      F0 B0 F1 B1 F2 B2                  goes on meanwhile

Each rank performs its own list in order. Only the sender's list decides when a link is used, so the times do
not depend on the order in which the ranks are visited: the simulation is deterministic.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Self

from pd2bw_fx.actions import Action, Kind, Schedule
from pd2bw_fx.cluster import Cluster
from pd2bw_fx.errors import InputError, ScheduleError
from pd2bw_fx.plan import Plan
from pd2bw_fx.timeline import Event, Timeline

Links = Literal["busy", "latency"]


@dataclass(frozen=True, slots=True)
class LinkTimes:
    """What one microbatch takes from stage `source` to stage `target`, and its gradient on the way back.

    `activation_s` and `gradient_s` are bytes / bandwidth, for which the link is busy; the latency comes on
    top of it. `gradient_s` is None where no gradient flows back, and the source waits for none.
    """

    source: int
    target: int
    latency_s: float = 0.0
    activation_s: float = 0.0
    gradient_s: float | None = 0.0
    gradient_latency_s: float | None = None  # None: the same as `latency_s`


@dataclass(frozen=True, slots=True)
class Durations:
    """The model of time: seconds for one microbatch at each stage and on each link, and for an update.

    `backward_s` has everything in it that a backward does, recomputation of the forward included.
    """

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    update_s: tuple[float, ...]
    links: tuple[LinkTimes, ...]

    @classmethod
    def chain(
        cls,
        forward_s: Sequence[float],
        backward_s: Sequence[float],
        *,
        update_s: float = 0.0,
        latency_s: float = 0.0,
    ) -> Self:
        """Stages in a row, each linked to the next with a pure latency: the setting of published numbers."""
        links = tuple(LinkTimes(stage, stage + 1, latency_s) for stage in range(len(forward_s) - 1))
        return cls(tuple(forward_s), tuple(backward_s), (update_s,) * len(forward_s), links)

    @classmethod
    def of(cls, plan: Plan, cluster: Cluster, *, update_s: float = 0.0) -> Self:
        """Compute times from the plan, link times from its transfers on the cluster's links.

        All values that a stage sends another for one microbatch travel as one message.
        """
        beyond = [stage for stage in plan.stages if stage.device >= len(cluster)]
        if beyond:
            raise InputError(
                f"stage {beyond[0].stage} is on device {beyond[0].device}, and the cluster has "
                f"{len(cluster)}; simulate on the cluster that the plan was made for"
            )
        recomputed_s = [stage.forward_s if stage.recompute else 0.0 for stage in plan.stages]
        return cls(
            forward_s=tuple(stage.forward_s for stage in plan.stages),
            backward_s=tuple(
                stage.backward_s + again_s for stage, again_s in zip(plan.stages, recomputed_s, strict=True)
            ),
            update_s=(update_s,) * plan.num_stages,
            links=_links(plan, cluster),
        )


def _links(plan: Plan, cluster: Cluster) -> tuple[LinkTimes, ...]:
    sizes: dict[tuple[int, int], tuple[int, int]] = {}
    for transfer in plan.transfers:
        pair = (transfer.source, transfer.target)
        there, back = sizes.get(pair, (0, 0))
        sizes[pair] = (there + transfer.bytes, back + transfer.gradient_bytes)
    links = []
    for (source, target), (num_bytes, gradient_bytes) in sorted(sizes.items()):
        a, b = plan.stages[source].device, plan.stages[target].device
        local = a == b
        links.append(
            LinkTimes(
                source,
                target,
                latency_s=0.0 if local else cluster.latency_s[a][b],
                activation_s=0.0 if local else num_bytes / cluster.bytes_per_s[a][b],
                gradient_s=_gradient_s(cluster, b, a, gradient_bytes),
                gradient_latency_s=0.0 if local else cluster.latency_s[b][a],
            )
        )
    return tuple(links)


def _gradient_s(cluster: Cluster, source: int, target: int, num_bytes: int) -> float | None:
    if num_bytes == 0:
        return None
    return 0.0 if source == target else num_bytes / cluster.bytes_per_s[source][target]


def simulate(
    schedule: Schedule,
    plan: Plan,
    cluster: Cluster,
    *,
    links: Links = "busy",
    jitter: float = 0.0,
    seed: int = 0,
    update_s: float = 0.0,
) -> Timeline:
    """When every action of the schedule happens, with the plan's compute times and the cluster's links.

    `links="busy"`: a link sends one message after another; `"latency"`: any number at once.
    `jitter` is the relative standard deviation of every compute time (normal, mean 1, not below 0.05).

    Raises ScheduleError naming the first action that waits for ever, InputError where schedule, plan and
    cluster do not belong together.
    """
    durations = Durations.of(plan, cluster, update_s=update_s)
    return simulate_durations(schedule, durations, links=links, jitter=jitter, seed=seed)


def simulate_durations(
    schedule: Schedule, durations: Durations, *, links: Links = "busy", jitter: float = 0.0, seed: int = 0
) -> Timeline:
    """The same with all times given as plain numbers."""
    if schedule.num_stages != len(durations.forward_s):
        raise InputError(
            f"the schedule has {schedule.num_stages} stages and the times are for "
            f"{len(durations.forward_s)}; use the schedule that was built for this plan"
        )
    if links not in ("busy", "latency"):
        raise InputError(f"links={links!r}; give 'busy' or 'latency'")
    if not 0 <= jitter < 1:
        raise InputError(f"jitter={jitter}; give a share of the compute times, 0 or more and below 1")
    _check_order(schedule, durations)
    return _Simulation(schedule, durations, links=links, jitter=jitter, seed=seed).run()


def _check_order(schedule: Schedule, durations: Durations) -> None:
    """No rank works on what it has not received: such a list would be timed too fast."""
    with_input = {link.target for link in durations.links}
    with_gradient = {link.source for link in durations.links if link.gradient_s is not None}
    done: dict[Kind, set[tuple[int, int]]] = {kind: set() for kind in Kind}
    for rank, actions in enumerate(schedule.ranks):
        for position, action in enumerate(actions):
            kind, piece = action.kind, (action.stage, action.microbatch)
            needed: list[Kind] = []
            if kind is Kind.FORWARD and action.stage in with_input:
                needed = [Kind.RECEIVE_ACTIVATION]
            elif kind is Kind.SEND_ACTIVATION:
                needed = [Kind.FORWARD]
            elif kind is Kind.BACKWARD:
                gradient = [Kind.RECEIVE_GRADIENT] if action.stage in with_gradient else []
                needed = [Kind.FORWARD, *gradient]
            elif kind is Kind.SEND_GRADIENT:
                needed = [Kind.BACKWARD]
            for before in needed:
                if piece not in done[before]:
                    raise ScheduleError(
                        f"rank {rank}, action {position}: {action} comes before its {before.value}"
                        f"{action.microbatch}; put it later, or start the simulation at the first update "
                        "(schedule.then joins segments)"
                    )
            done[kind].add(piece)


class _Mailbox:
    """What has arrived at one stage: for each microbatch, how many messages and when the last one did."""

    __slots__ = ("arrived", "expected", "last_s")

    def __init__(self, expected: int) -> None:
        self.expected = expected
        self.arrived: dict[int, int] = {}
        self.last_s: dict[int, float] = {}

    def put(self, microbatch: int, arrival_s: float) -> bool:
        """Whether all messages for this microbatch are on their way now."""
        self.arrived[microbatch] = self.arrived.get(microbatch, 0) + 1
        self.last_s[microbatch] = max(arrival_s, self.last_s.get(microbatch, 0.0))
        return self.arrived[microbatch] == self.expected

    def ready_s(self, microbatch: int) -> float | None:
        """When everything is there; None as long as something is not yet sent."""
        if self.expected == 0:
            return 0.0
        if self.arrived.get(microbatch, 0) < self.expected:
            return None
        return self.last_s[microbatch]


@dataclass(slots=True)
class _Wire:
    """One direction of a link: where it leads, what it costs, and until when it is busy."""

    mailbox: _Mailbox
    rank: int  # that reads the mailbox
    latency_s: float
    transmit_s: float
    shared: list[float]  # busy until; one entry, common to all wires between the same two ranks


class _Simulation:
    """The state of one run: a clock and a position for each rank, mailboxes, wires, and a worklist."""

    def __init__(
        self, schedule: Schedule, durations: Durations, *, links: Links, jitter: float, seed: int
    ) -> None:
        self.schedule = schedule
        self.durations = durations
        self.busy_links = links == "busy"
        self.jitter = jitter
        # One generator a rank: its draws must not depend on when the other ranks are visited.
        self.noise = [random.Random(f"{seed}/{rank}") for rank in range(len(schedule.ranks))]
        self.clock_s = [0.0] * len(schedule.ranks)
        self.position = [0] * len(schedule.ranks)
        self.events: list[list[Event]] = [[] for _ in schedule.ranks]
        self._connect()

    def _connect(self) -> None:
        stages = range(self.schedule.num_stages)
        rank_of = {a.stage: rank for rank, actions in enumerate(self.schedule.ranks) for a in actions}
        missing = [stage for stage in stages if stage not in rank_of]
        if missing:
            raise ScheduleError(f"no rank has an action of stage {missing[0]}; every stage needs a rank")
        links = self.durations.links
        back = [link for link in links if link.gradient_s is not None]
        into = [_Mailbox(sum(link.target == stage for link in links)) for stage in stages]
        home = [_Mailbox(sum(link.source == stage for link in back)) for stage in stages]
        busy: dict[tuple[int, int], list[float]] = {}

        def wire(mailbox: _Mailbox, a: int, b: int, latency_s: float, transmit_s: float) -> _Wire:
            source, target = rank_of[a], rank_of[b]
            shared = busy.setdefault((source, target), [0.0])
            return _Wire(mailbox, target, latency_s, transmit_s, shared)

        forth: list[list[_Wire]] = [[] for _ in stages]
        gradients: list[list[_Wire]] = [[] for _ in stages]
        for link in links:
            out = wire(into[link.target], link.source, link.target, link.latency_s, link.activation_s)
            forth[link.source].append(out)
            if link.gradient_s is not None:
                given_s = link.gradient_latency_s
                latency_s = link.latency_s if given_s is None else given_s
                gradients[link.target].append(
                    wire(home[link.source], link.target, link.source, latency_s, link.gradient_s)
                )
        self.mailboxes = {Kind.RECEIVE_ACTIVATION: into, Kind.RECEIVE_GRADIENT: home}
        self.wires = {Kind.SEND_ACTIVATION: forth, Kind.SEND_GRADIENT: gradients}

    def run(self) -> Timeline:
        worklist = deque(range(len(self.schedule.ranks)))
        waiting: set[int] = set()
        while worklist:
            rank = worklist.popleft()
            woken = self._advance(rank)
            waiting.discard(rank)
            if self.position[rank] < len(self.schedule.ranks[rank]):
                waiting.add(rank)
            for other in woken:
                if other in waiting:
                    waiting.discard(other)
                    worklist.append(other)
        if waiting:
            self._refuse(waiting)
        return Timeline(
            method=self.schedule.method,
            num_ranks=len(self.schedule.ranks),
            microbatches_per_update=self.schedule.microbatches_per_update,
            events=tuple(event for events in self.events for event in events),
        )

    def _advance(self, rank: int) -> list[int]:
        """Perform the rank's actions until one has to wait for a message that is not yet sent.

        Returns the ranks for which a receive has become possible. (Everything at one level and looked up
        once: this loop runs for every action.)
        """
        actions, events, noise = self.schedule.ranks[rank], self.events[rank], self.noise[rank]
        seconds = {
            Kind.FORWARD: self.durations.forward_s,
            Kind.BACKWARD: self.durations.backward_s,
            Kind.UPDATE: self.durations.update_s,
        }
        mailboxes, wires, jitter = self.mailboxes, self.wires, self.jitter
        now_s, position, woken = self.clock_s[rank], self.position[rank], list[int]()
        while position < len(actions):
            action = actions[position]
            kind, stage, microbatch = action.kind, action.stage, action.microbatch
            start_s = now_s
            if kind in seconds:
                length_s = seconds[kind][stage]
                if jitter:
                    length_s *= max(0.05, noise.gauss(1.0, jitter))
                end_s = now_s = now_s + length_s
            elif kind in mailboxes:
                ready_s = mailboxes[kind][stage].ready_s(microbatch)
                if ready_s is None:
                    break
                end_s = now_s = max(now_s, ready_s)
            else:
                end_s = now_s
                for wire in wires[kind][stage]:
                    arrival_s = self._send(wire, now_s)
                    end_s = max(end_s, arrival_s)
                    if wire.mailbox.put(microbatch, arrival_s):
                        woken.append(wire.rank)
            events.append(Event(rank, kind, stage, microbatch, action.version, start_s, end_s))
            position += 1
        self.clock_s[rank], self.position[rank] = now_s, position
        return woken

    def _send(self, wire: _Wire, now_s: float) -> float:
        """When a message that is sent now has arrived."""
        if not self.busy_links:
            return now_s + wire.transmit_s + wire.latency_s
        free_s = max(now_s, wire.shared[0]) + wire.transmit_s
        wire.shared[0] = free_s
        return free_s + wire.latency_s

    def _refuse(self, waiting: set[int]) -> None:
        """Name the receive that nobody will ever send for, or, in a circle of waits, the earliest one."""
        left = {rank: self.schedule.ranks[rank][self.position[rank] :] for rank in waiting}
        to_come = {(a.kind, a.stage, a.microbatch) for actions in left.values() for a in actions}

        def urgency(rank: int) -> tuple[bool, float, int]:
            action = left[rank][0]
            kind, stages = _senders(action, self.durations.links)
            hopeful = any((kind, stage, action.microbatch) in to_come for stage in stages)
            return hopeful, self.clock_s[rank], rank

        rank = min(waiting, key=urgency)
        action = left[rank][0]
        kind, stages = _senders(action, self.durations.links)
        what = "activation" if kind is Kind.SEND_ACTIVATION else "gradient"
        raise ScheduleError(
            f"the schedule never ends: rank {rank} waits in action {self.position[rank]}, {action}, for the "
            f"{what} of {'stage' if len(stages) == 1 else 'stages'} {', '.join(map(str, stages))}; "
            f"{len(waiting)} of {len(self.schedule.ranks)} ranks stand still; look for a send "
            "that is missing or comes too late"
        )


def _senders(action: Action, links: Sequence[LinkTimes]) -> tuple[Kind, list[int]]:
    """What kind of send a receive waits for, and from which stages."""
    if action.kind is Kind.RECEIVE_ACTIVATION:
        return Kind.SEND_ACTIVATION, [link.source for link in links if link.target == action.stage]
    return Kind.SEND_GRADIENT, [
        link.target for link in links if link.source == action.stage and link.gradient_s is not None
    ]
