"""Simulates a schedule action by action: which rank does what, and when.

    rank 0   F0 F1 F2 .... B0 F3 B1 F4 B2          a receive waits until its data has arrived;
               \\  \\  \\    /     /                   a send takes latency + bytes / bandwidth, and the rank
    rank 1      F0 B0 F1 B1 F2 B2                  goes on meanwhile

Each rank performs its own list in order. A message goes to the rank that runs its microbatch at the receiving
stage. Where several ranks hold a stage, or several stages a parameter, an update waits until all of them have
posted their gradients, and then for the all-reduce (`sums.py`). With one weight version the rank waits at the
update itself. With more versions it goes on meanwhile, and waits at the first use of the new version.

The simulation is deterministic. Only the sender's list decides when a link is used, so the times do not
depend on the order in which ranks are visited.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from pd2bw_fx.actions import Action, Kind, Schedule, prerequisites
from pd2bw_fx.arguments import require_kind, require_not_negative, require_share
from pd2bw_fx.cluster import Cluster
from pd2bw_fx.costs import Calibration
from pd2bw_fx.errors import InputError, ScheduleError
from pd2bw_fx.plan import Plan
from pd2bw_fx.timeline import Event, Timeline

from .durations import Durations, LinkTimes
from .sums import Sums, sums_of

Links = Literal["busy", "latency"]


def simulate(
    schedule: Schedule,
    plan: Plan,
    cluster: Cluster,
    *,
    links: Links = "busy",
    jitter: float = 0.0,
    link_jitter_s: float = 0.0,
    seed: int = 0,
    update_s: float = 0.0,
    calibration: Calibration | None = None,
    trainable_bytes: Mapping[str, int] | None = None,
) -> Timeline:
    """Simulates when every action of a schedule happens, by the plan's compute times and the cluster's links.

    With `links="busy"` a link sends one message after another, with "latency" any number at once. `jitter` is
    the relative standard deviation of every compute time (normal, mean 1, not below 0.05). `link_jitter_s` is
    the standard deviation of a normal number, whose absolute value delays every message. `calibration` (from
    `calibrate`) is what a run took besides the plan's times. `trainable_bytes` has the size of parameters by
    name; without it, gradients of parameters that several stages hold are not summed.

    Raises ScheduleError naming the first action that waits for ever, InputError where schedule, plan and
    cluster do not belong together.
    """
    require_not_negative("update_s", update_s, "a number of seconds, 0 or more,")
    if calibration is not None:
        require_kind("calibration", calibration, Calibration, "a Calibration (of Pipeline.calibration)")
    holders: list[set[int]] = [set() for _ in plan.stages]
    for rank, actions in enumerate(schedule.ranks):
        for stage in {action.stage for action in actions}:
            holders[stage].add(rank)
    durations = Durations.of(
        plan,
        cluster,
        update_s=update_s,
        holders=holders,
        trainable_bytes=trainable_bytes,
        calibration=calibration,
    )
    return simulate_durations(
        schedule, durations, links=links, jitter=jitter, link_jitter_s=link_jitter_s, seed=seed
    )


def simulate_durations(
    schedule: Schedule,
    durations: Durations,
    *,
    links: Links = "busy",
    jitter: float = 0.0,
    link_jitter_s: float = 0.0,
    seed: int = 0,
) -> Timeline:
    """Simulates a schedule as `simulate` does, with all times given as numbers."""
    if schedule.num_stages != len(durations.forward_s):
        raise InputError(
            f"the schedule has {schedule.num_stages} stages and the times are for "
            f"{len(durations.forward_s)}; use the schedule that was built for this plan"
        )
    if links not in ("busy", "latency"):
        raise InputError(f"links={links!r}; give 'busy' or 'latency'")
    require_share("jitter", jitter, "a share of the compute times, 0 or more and below 1,")
    require_not_negative("link_jitter_s", link_jitter_s, "a number of seconds, 0 or more,")
    _check_order(schedule, durations)
    noise = _Noise(jitter, link_jitter_s, seed)
    return _Simulation(schedule, durations, links=links, noise=noise).run()


def _check_order(schedule: Schedule, durations: Durations) -> None:
    """Raises ScheduleError where a rank works on what it has not received: that would be timed too fast."""
    with_input = {link.target for link in durations.links}
    with_gradient = {link.source for link in durations.links if link.gradient_s is not None}
    done: dict[Kind, set[tuple[int, int]]] = {kind: set() for kind in Kind}
    for rank, actions in enumerate(schedule.ranks):
        for position, action in enumerate(actions):
            piece = (action.stage, action.microbatch)
            needed = prerequisites(
                action.kind,
                has_input=action.stage in with_input,
                has_gradient=action.stage in with_gradient,
                is_split=piece in done[Kind.INPUT_GRADIENT],
            )
            missing = next((before for before in needed if piece not in done[before]), None)
            if missing is not None:
                raise ScheduleError(
                    f"rank {rank}, action {position}: {action} comes before its {missing.value}"
                    f"{action.microbatch}; put it later, or start the simulation at the first update "
                    "(schedule.then joins segments)"
                )
            done[action.kind].add(piece)


class _Mailbox:
    """The messages sent to one stage: how many for each microbatch, and when the last one arrives."""

    __slots__ = ("arrived", "expected", "last_s")

    def __init__(self, expected: int) -> None:
        self.expected = expected
        self.arrived: dict[int, int] = {}
        self.last_s: dict[int, float] = {}

    def put(self, microbatch: int, arrival_s: float) -> bool:
        """Adds a message, and returns whether all messages for its microbatch have been sent now."""
        self.arrived[microbatch] = self.arrived.get(microbatch, 0) + 1
        self.last_s[microbatch] = max(arrival_s, self.last_s.get(microbatch, 0.0))
        return self.arrived[microbatch] == self.expected

    def ready_s(self, microbatch: int) -> float | None:
        """Returns when all messages have arrived, or None while one has not been sent."""
        if self.expected == 0:
            return 0.0
        if self.arrived.get(microbatch, 0) < self.expected:
            return None
        return self.last_s[microbatch]


@dataclass(slots=True)
class _Wire:
    """One direction of a link between stages: its mailbox and its times."""

    mailbox: _Mailbox
    stage: int  # the one that reads the mailbox
    latency_s: float
    transmit_s: float
    send_s: float  # for which the sending rank is busy
    elsewhere: dict[tuple[int, int], tuple[float, float]]  # latency and transmission, by sender and receiver


@dataclass(frozen=True, slots=True)
class _Noise:
    jitter: float
    link_jitter_s: float
    seed: int


class _Simulation:
    """The state of one run: a clock and a position for each rank, mailboxes, wires, and a worklist."""

    def __init__(self, schedule: Schedule, durations: Durations, *, links: Links, noise: _Noise) -> None:
        self.schedule = schedule
        self.durations = durations
        self.busy_links = links == "busy"
        self.jitter, self.link_jitter_s = noise.jitter, noise.link_jitter_s
        # One generator a rank: its draws must not depend on when the other ranks are visited.
        self.noise = [random.Random(f"{noise.seed}/{rank}") for rank in range(len(schedule.ranks))]
        self.clock_s = [0.0] * len(schedule.ranks)
        self.position = [0] * len(schedule.ranks)
        self.events: list[list[Event]] = [[] for _ in schedule.ranks]
        stages = range(schedule.num_stages)
        self.seconds: dict[Kind, Sequence[float]] = {
            Kind.FORWARD: durations.forward_s,
            Kind.BACKWARD: tuple(durations.whole_backward_s(stage) for stage in stages),
            Kind.INPUT_GRADIENT: durations.backward_s,
            Kind.WEIGHT_GRADIENT: durations.weight_backward_s or (0.0,) * len(stages),
            Kind.UPDATE: durations.update_s,
        }
        self._place_stages()
        self._connect()

    def _place_stages(self) -> None:
        """Finds which ranks have a stage, which run its microbatches, and which sums they take part in.

        Raises ScheduleError for a stage that no rank has.
        """
        stages = range(self.schedule.num_stages)
        holders: list[set[int]] = [set() for _ in stages]
        for rank, actions in enumerate(self.schedule.ranks):
            for action in actions:
                holders[action.stage].add(rank)
        missing = [stage for stage in stages if not holders[stage]]
        if missing:
            raise ScheduleError(f"no rank has an action of stage {missing[0]}; every stage needs a rank")
        all_reduce_s = self.durations.all_reduce_s or (0.0,) * len(stages)
        self.sums = Sums(sums_of(holders, all_reduce_s, self.durations.tied), len(stages))
        self.gated = self.sums.stages
        self.shared = {stage for stage in stages if len(holders[stage]) > 1}
        self.only = [min(ranks) for ranks in holders]
        self.runs = {
            (action.stage, action.microbatch): rank
            for rank, actions in enumerate(self.schedule.ranks)
            for action in actions
            if action.kind is Kind.FORWARD and action.stage in self.shared
        }

    def _connect(self) -> None:
        """Makes a mailbox for each stage and direction, and the wires that lead to them."""
        stages, links = range(self.schedule.num_stages), self.durations.links
        back = [link for link in links if link.gradient_s is not None]
        into = [_Mailbox(sum(link.target == stage for link in links)) for stage in stages]
        home = [_Mailbox(sum(link.source == stage for link in back)) for stage in stages]
        self.busy_until_s: dict[tuple[int, int], float] = {}  # one for all wires between the same two ranks
        forth: list[list[_Wire]] = [[] for _ in stages]
        gradients: list[list[_Wire]] = [[] for _ in stages]
        for link in links:
            elsewhere = {ranks: (own.latency_s, own.activation_s) for ranks, own in link.elsewhere.items()}
            there = link.latency_s, link.activation_s
            forth[link.source].append(_Wire(into[link.target], link.target, *there, link.send_s, elsewhere))
            if link.gradient_s is not None:
                elsewhere = {ranks[::-1]: _back(own) for ranks, own in link.elsewhere.items()}
                gradients[link.target].append(
                    _Wire(home[link.source], link.source, *_back(link), link.send_s, elsewhere)
                )
        self.mailboxes = {Kind.RECEIVE_ACTIVATION: into, Kind.RECEIVE_GRADIENT: home}
        self.taking_s = {
            Kind.RECEIVE_ACTIVATION: [sum(k.receive_s for k in links if k.target == s) for s in stages],
            Kind.RECEIVE_GRADIENT: [sum(k.receive_s for k in back if k.source == s) for s in stages],
        }
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
        """Performs the rank's actions until one has to wait for a message that has not been sent.

        Returns the ranks that can go on now. The loop runs for every action, so all is at one level and
        looked up once.
        """
        actions, events, noise = self.schedule.ranks[rank], self.events[rank], self.noise[rank]
        seconds, mailboxes, wires = self.seconds, self.mailboxes, self.wires
        jitter, shared, gated = self.jitter, self.shared, self.gated
        now_s, position, woken = self.clock_s[rank], self.position[rank], list[int]()
        while position < len(actions):
            action = actions[position]
            kind, stage, microbatch = action.kind, action.stage, action.microbatch
            start_s = now_s
            if kind in seconds:
                if stage in gated:
                    gate_s = self._gate_s(rank, action, now_s, woken)
                    if gate_s is None:
                        break
                    if gate_s > now_s:
                        wait = (rank, Kind.ALL_REDUCE, stage, -1, action.version, now_s, gate_s)
                        events.append(Event(*wait))
                        start_s = now_s = gate_s
                length_s = seconds[kind][stage]
                if jitter:
                    length_s *= max(0.05, noise.gauss(1.0, jitter))
                end_s = now_s = now_s + length_s
            elif kind in mailboxes:
                ready_s = mailboxes[kind][stage].ready_s(microbatch)
                if ready_s is None:
                    break
                end_s = now_s = max(now_s, ready_s) + self.taking_s[kind][stage]
            else:
                end_s = now_s
                for wire in wires[kind][stage]:
                    now_s += wire.send_s
                    to = self.runs[wire.stage, microbatch] if wire.stage in shared else self.only[wire.stage]
                    arrival_s = self._send(wire, rank, to, now_s)
                    end_s = max(end_s, arrival_s)
                    if wire.mailbox.put(microbatch, arrival_s):
                        woken.append(to)
            events.append(Event(rank, kind, stage, microbatch, action.version, start_s, end_s))
            position += 1
        self.clock_s[rank], self.position[rank] = now_s, position
        return woken

    def _gate_s(self, rank: int, action: Action, now_s: float, woken: list[int]) -> float | None:
        """Returns when a computation of a stage with sums may begin; None while a rank has not posted."""
        stage, version = action.stage, action.version
        if action.kind is not Kind.UPDATE:
            # With one version, the update itself has waited.
            if self.schedule.weight_versions == 1 or version <= self.schedule.updates.start:
                return now_s
            return self.sums.done_s(stage, version, rank)
        woken.extend(self.sums.post(stage, version, rank, now_s))
        return now_s if self.schedule.weight_versions > 1 else self.sums.done_s(stage, version, rank)

    def _send(self, wire: _Wire, source: int, target: int, now_s: float) -> float:
        """Returns when a message that is sent now arrives."""
        link = (source, target)
        late_s, transmit_s = wire.latency_s, wire.transmit_s
        if wire.elsewhere:
            late_s, transmit_s = wire.elsewhere.get(link, (late_s, transmit_s))
        if self.link_jitter_s:
            late_s += abs(self.noise[source].gauss(0.0, self.link_jitter_s))
        if not self.busy_links:
            return now_s + transmit_s + late_s
        free_s = max(now_s, self.busy_until_s.get(link, 0.0)) + transmit_s
        self.busy_until_s[link] = free_s
        return free_s + late_s

    def _refuse(self, waiting: set[int]) -> None:
        """Raises an error that names the receive without a send or, in a circle of waits, the earliest."""
        left = {rank: self.schedule.ranks[rank][self.position[rank] :] for rank in waiting}
        receivers = [rank for rank in waiting if left[rank][0].kind in self.mailboxes] or sorted(waiting)
        to_come = {(a.kind, a.stage, a.microbatch) for actions in left.values() for a in actions}

        def urgency(rank: int) -> tuple[bool, float, int]:
            action = left[rank][0]
            kind, stages = _senders(action, self.durations.links)
            hopeful = any((kind, stage, action.microbatch) in to_come for stage in stages)
            return hopeful, self.clock_s[rank], rank

        rank = min(receivers, key=urgency)
        action = left[rank][0]
        kind, stages = _senders(action, self.durations.links)
        what = "activation" if kind is Kind.SEND_ACTIVATION else "gradient"
        whose = f"{'stage' if len(stages) == 1 else 'stages'} {', '.join(map(str, stages))}"
        if action.kind not in self.mailboxes:
            others = self.sums.others(action.stage, rank)
            what, whose = f"update to W{action.version}", f"ranks {', '.join(map(str, others))}"
        raise ScheduleError(
            f"the schedule never ends: rank {rank} waits in action {self.position[rank]}, {action}, for the "
            f"{what} of {whose}; {len(waiting)} of {len(self.schedule.ranks)} ranks stand still; look for a "
            "send that is missing or comes too late"
        )


def _back(link: LinkTimes) -> tuple[float, float]:
    """Returns latency and transmission of a gradient."""
    given_s = link.gradient_latency_s
    return link.latency_s if given_s is None else given_s, link.gradient_s or 0.0


def _senders(action: Action, links: Sequence[LinkTimes]) -> tuple[Kind, list[int]]:
    """Returns the kind of send that a receive waits for, and the stages that send it."""
    if action.kind is Kind.RECEIVE_ACTIVATION:
        return Kind.SEND_ACTIVATION, [link.source for link in links if link.target == action.stage]
    return Kind.SEND_GRADIENT, [
        link.target for link in links if link.source == action.stage and link.gradient_s is not None
    ]
