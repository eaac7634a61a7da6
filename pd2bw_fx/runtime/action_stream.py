"""The actions that a rank performs next: its method's schedule, update by update."""

from __future__ import annotations

from dataclasses import dataclass

from pd2bw_fx.actions import Action, Kind
from pd2bw_fx.passes.schedule import method_of
from pd2bw_fx.runtime.job import Job

_SENDS = (Kind.SEND_ACTIVATION, Kind.SEND_GRADIENT)


@dataclass(frozen=True, slots=True)
class PeerActions:
    """What the other ranks do in the same call.

    `sends` are the sends of each rank, in its order. When the call ends, all ranks have come to the update
    that makes version `reached`.
    """

    sends: tuple[Action, ...]
    reached: int


class ActionStream:
    """Counts the updates of a rank, and returns their actions one after another.

    The first `synchronous_updates` follow 1f1b's schedule and are flushed each (PipeMare may begin so).
    """

    def __init__(self, job: Job, *, synchronous_updates: int) -> None:
        self._job = job
        self._synchronous_updates = synchronous_updates
        self._home = 0  # no microbatch of an update before this one is in flight
        self._made: dict[tuple[int, int], int] = {}  # the newest version of each rank's stages
        self._first: int | None = None  # the first update that was begun here
        self.updates = 0  # begun so far

    @property
    def is_empty(self) -> bool:
        """Whether no microbatch is in flight."""
        return self._home == self.updates

    @property
    def updates_in_flight(self) -> int:
        """The updates that have begun and that this rank makes only when it goes on, or flushes."""
        return sum(action.kind is Kind.UPDATE for action in self.drain())

    def next_update(self) -> tuple[Action, ...]:
        """Returns the actions of one more update; what it leaves in flight is finished in the next one."""
        if self._first is None:
            self._first = self.updates
        self.updates += 1
        return self._actions(range(self.updates - 1, self.updates), self._job.place, drain=False)

    @property
    def is_new(self) -> bool:
        """Whether some rank has not made two versions yet."""
        return self._first is None or min(self._made.values(), default=self._first) < self._first + 2

    def peer_actions(self) -> PeerActions:
        """Returns what the other ranks do in the last update that was begun; to be called in every update."""
        return self._peer_actions(range(self.updates - 1, self.updates), drain=False)

    def peer_actions_while_draining(self) -> PeerActions:
        """Returns what the other ranks do while the pipeline drains."""
        return self._peer_actions(range(self.updates, self.updates), drain=True)

    def _peer_actions(self, updates: range, *, drain: bool) -> PeerActions:
        of_places = [self._actions(updates, place, drain=drain) for place in range(self._job.num_ranks)]
        for place, actions in enumerate(of_places):
            for action in actions:
                self._made.setdefault((place, action.stage), self._home)
                if action.kind is Kind.UPDATE:
                    self._made[place, action.stage] = action.version
        del of_places[self._job.place]
        sends = [action for actions in of_places for action in actions if action.kind in _SENDS]
        return PeerActions(tuple(sends), min(self._made.values()))

    def drain(self) -> tuple[Action, ...]:
        """Returns the actions that finish all that is in flight."""
        return self._actions(range(self.updates, self.updates), self._job.place, drain=True)

    def go_on_after(self, updates: int) -> None:
        """Goes on after this number of updates, with nothing in flight."""
        self.updates = self._home = updates
        self._made = dict.fromkeys(self._made, updates)

    def evaluation(self, microbatches: range) -> list[Action]:
        """Returns forwards alone, on the newest version, of this rank's share of the microbatches."""
        job, version = self._job, self.updates
        actions: list[Action] = []
        last = job.shape.num_stages - 1
        for microbatch in microbatches:
            for stage in job.stages:
                if job.rank_of(stage, microbatch) != job.rank:
                    continue
                if stage > 0:
                    actions.append(Action(Kind.RECEIVE_ACTIVATION, stage, microbatch, version))
                actions.append(Action(Kind.FORWARD, stage, microbatch, version))
                if stage < last:
                    actions.append(Action(Kind.SEND_ACTIVATION, stage, microbatch, version))
        return actions

    def _actions(self, updates: range, place: int, *, drain: bool) -> tuple[Action, ...]:
        job, rules, empty_before = self._job, self._job.work.rules, self._home
        if updates.start < self._synchronous_updates:
            rules = method_of("1f1b")
        else:
            empty_before = max(empty_before, self._synchronous_updates)
        return rules.actions(
            job.shape,
            place,
            updates=updates,
            drain=drain,
            empty_before=min(empty_before, updates.start),
        )
