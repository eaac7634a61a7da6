"""Refuses schedules that would compute something else than their method, or never end."""

from __future__ import annotations

from collections.abc import Sequence

from pd2bw_fx.actions import Action, Kind, Schedule, Shape, prerequisites
from pd2bw_fx.errors import ScheduleError
from pd2bw_fx.units import are, counted

from .method import Method
from .methods import METHODS


def check_schedule(schedule: Schedule, *, in_flight: Sequence[int] | None = None) -> None:
    """Refuses a schedule that would compute something else than its method, or never end.

    The schedule has to begin with an empty pipeline; join segments with `then` first. Checks on each rank's
    list:

    - all that an action needs has been done before, and the action is on the right rank;
    - versions follow the method's rule and are alive when they are used;
    - an update has all its gradients, and overwrites no version that is still needed;
    - at most `in_flight[stage]` microbatches of a stage wait for their backward, or for its last half.

    Checks on all lists together: every receive is served, there is no circle of waits, and what is sent first
    between two ranks is received first.

    Raises ScheduleError naming the first offending action.
    """
    for rank, actions in enumerate(schedule.ranks):
        cells: dict[int, _StageCheck] = {}
        for position, action in enumerate(actions):
            cell = cells.get(action.stage)
            if cell is None:
                is_known = in_flight is not None and 0 <= action.stage < len(in_flight)
                limit = in_flight[action.stage] if in_flight is not None and is_known else None
                cell = cells[action.stage] = _StageCheck(schedule, rank, action.stage, limit)
            trouble = cell.trouble_with(action)
            if trouble is not None:
                raise ScheduleError(f"rank {rank}, action {position}, {action}: {trouble}")
        _add_idle_stages(cells, schedule, rank)
        for stage in sorted(cells):
            trouble = cells[stage].trouble_at_the_end() if schedule.drained else None
            if trouble is not None:
                raise ScheduleError(
                    f"rank {rank} ends drained, and {trouble}; append the drain, or say drained=False"
                )
    _check_progress(schedule)


def _add_idle_stages(cells: dict[int, _StageCheck], schedule: Schedule, rank: int) -> None:
    """Adds the stages that the method gives to a rank and that the rank's list has no action of."""
    for stage in range(schedule.num_stages):
        if stage not in cells:
            cell = _StageCheck(schedule, rank, stage, None)
            if cell.is_known and cell.share:
                cells[stage] = cell


class _StageCheck:
    """What one rank has done so far for one of its stages, as its own list has it."""

    def __init__(self, schedule: Schedule, rank: int, stage: int, in_flight: int | None) -> None:
        self.schedule = schedule
        self.method: Method | None = METHODS.get(schedule.method)
        self.shape = schedule.shape or Shape(schedule.num_stages, schedule.microbatches_per_update)
        self.rank = rank
        self.stage = stage
        self.limit = in_flight
        self.newest = self.empty_before = schedule.updates.start
        self.done: set[tuple[Kind, int]] = set()
        self.open: dict[int, int] = {}  # microbatches between forward and backward, and their version
        self.gradients: dict[int, int] = {}  # backwards of each update
        self.is_known = self.method is not None and 0 <= stage < schedule.num_stages
        self.versions = schedule.weight_versions
        self.share = schedule.microbatches_per_update  # of an update's microbatches, on this rank
        if self.method is not None and self.is_known:
            self.versions = min(self.versions, self.method.num_versions(self.shape, stage))
            ranks = (self.method.rank_of(self.shape, stage, k) for k in range(self.share))
            self.share = sum(of == rank for of in ranks)

    def trouble_with(self, action: Action) -> str | None:
        """Performs the action, or returns the reason why it cannot be performed."""
        trouble = self._trouble_with(action)
        if trouble is None:
            self._perform(action)
        return trouble

    def trouble_at_the_end(self) -> str | None:
        """Returns what is missing where the list ends with an empty pipeline."""
        updates, m = self.schedule.updates, self.schedule.microbatches_per_update
        if self.open:
            return f"microbatch {min(self.open)} of stage {self.stage} had no backward"
        if self._trains and self.newest < updates.stop:
            return f"update {self.newest} of stage {self.stage} was not made"
        if not self._trains and self.is_known:
            for k in range(updates.start * m, updates.stop * m):
                mine = self.method is not None and self.method.rank_of(self.shape, self.stage, k) == self.rank
                if mine and (Kind.FORWARD, k) not in self.done:
                    return f"microbatch {k} of stage {self.stage} had no forward"
        return None

    def _trouble_with(self, action: Action) -> str | None:
        kind, microbatch = action.kind, action.microbatch
        if not 0 <= action.stage < self.schedule.num_stages:
            return f"there are stages 0 to {self.schedule.num_stages - 1}"
        if kind is Kind.UPDATE:
            return self._trouble_with_update(action.version)
        if (kind, microbatch) in self.done:
            return "it was done before"
        missing = [
            before for before in self._needs(kind, microbatch) if (before, microbatch) not in self.done
        ]
        if missing:
            return f"{missing[0]}{microbatch} of its stage must come before it"
        if kind is Kind.BACKWARD and (Kind.INPUT_GRADIENT, microbatch) in self.done:
            return "half of it was done before"
        if kind is Kind.INPUT_GRADIENT and (Kind.BACKWARD, microbatch) in self.done:
            return "the whole backward was done before"
        if (trouble := self._trouble_with_method(action)) is not None:
            return trouble
        if kind not in (Kind.FORWARD, Kind.BACKWARD, Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT):
            return None
        if not self._trains:
            return None if kind is Kind.FORWARD else f"{self.schedule.method} has no backwards"
        oldest = self.newest - self.versions + 1
        if not oldest <= action.version <= self.newest:
            return (
                f"W{action.version} is {'gone' if action.version < oldest else 'not made yet'}; alive are "
                f"W{max(oldest, 0)} to W{self.newest}"
            )
        if kind is not Kind.FORWARD and self._keeps_versions and action.version != self.open[microbatch]:
            return f"its forward ran on W{self.open[microbatch]}, which backwards run on too"
        if kind is Kind.FORWARD and self.limit is not None and len(self.open) >= self.limit:
            return (
                f"{counted(len(self.open), 'microbatch')} {are(len(self.open))} in flight, and its memory "
                f"holds {self.limit}"
            )
        return None

    def _trouble_with_method(self, action: Action) -> str | None:
        """Returns what the method would do on another rank or with other weights."""
        if self.method is None:
            return None
        rank = self.method.rank_of(self.shape, self.stage, action.microbatch)
        if rank != self.rank:
            return (
                f"{self.method.name} runs microbatch {action.microbatch} of stage {self.stage} on rank {rank}"
            )
        forward = action.kind in (Kind.RECEIVE_ACTIVATION, Kind.FORWARD, Kind.SEND_ACTIVATION)
        rule = self.method.forward_version if forward else self.method.backward_version
        expected = rule(self.shape, self.stage, action.microbatch, empty_before=self.empty_before)
        if action.version != expected:
            return f"{self.method.name} runs microbatch {action.microbatch} on W{expected}"
        return None

    def _trouble_with_update(self, version: int) -> str | None:
        update = version - 1
        if self.is_known and not self.share:
            return f"{self.schedule.method} has none of stage {self.stage} on this rank"
        if version != self.newest + 1:
            return f"the newest version is W{self.newest}, so that the next update makes W{self.newest + 1}"
        if self.gradients.get(update, 0) != self.share:
            return f"update {update} has {self.gradients.get(update, 0)} of its {self.share} backwards"
        overwritten = version - self.versions
        users = [microbatch for microbatch, used in self.open.items() if used == overwritten]
        if users and self._keeps_versions:
            return f"it overwrites W{overwritten}, which microbatch {min(users)} needs for its backward"
        return None

    def _needs(self, kind: Kind, microbatch: int) -> tuple[Kind, ...]:
        return prerequisites(
            kind,
            has_input=self.stage > 0,
            has_gradient=self.stage < self.schedule.num_stages - 1,
            is_split=(Kind.INPUT_GRADIENT, microbatch) in self.done,
        )

    @property
    def _trains(self) -> bool:
        return self.method is None or self.method.trains

    @property
    def _keeps_versions(self) -> bool:
        return self.method is None or self.method.keeps_versions

    def _perform(self, action: Action) -> None:
        if action.kind is Kind.UPDATE:
            self.newest = action.version
            self.empty_before = action.version if not self.open else self.empty_before
            return
        self.done.add((action.kind, action.microbatch))
        if action.kind is Kind.FORWARD and self._trains:
            self.open[action.microbatch] = action.version
        elif action.kind in (Kind.BACKWARD, Kind.WEIGHT_GRADIENT):
            del self.open[action.microbatch]
            update = action.microbatch // self.schedule.microbatches_per_update
            self.gradients[update] = self.gradients.get(update, 0) + 1


_SENDER = {
    Kind.RECEIVE_ACTIVATION: (Kind.SEND_ACTIVATION, -1),
    Kind.RECEIVE_GRADIENT: (Kind.SEND_GRADIENT, 1),
}
_Message = tuple[Kind, int, int]  # a send: kind, stage, microbatch


def _check_progress(schedule: Schedule) -> None:
    """Performs all ranks' lists as far as possible. A receive waits until its send wakes its rank."""
    sent: dict[_Message, tuple[int, int]] = {}  # by whom, and its number among all sends
    awaited_by: dict[_Message, int] = {}
    received: dict[tuple[Kind, int, int], tuple[int, Action]] = {}  # last on the link from rank to rank
    positions = [0] * len(schedule.ranks)
    worklist = list(range(len(schedule.ranks)))
    while worklist:
        rank = worklist.pop()
        actions = schedule.ranks[rank]
        while positions[rank] < len(actions):
            action = actions[positions[rank]]
            if action.kind in _SENDER:
                message = _awaited(action)
                if message not in sent:
                    awaited_by[message] = rank
                    break
                _check_order(action, rank, positions[rank], sent[message], received)
            elif action.kind in (Kind.SEND_ACTIVATION, Kind.SEND_GRADIENT):
                message = (action.kind, action.stage, action.microbatch)
                sent[message] = (rank, len(sent))
                if message in awaited_by:
                    worklist.append(awaited_by.pop(message))
            positions[rank] += 1
    _refuse_waiting(schedule, positions)


def _refuse_waiting(schedule: Schedule, positions: Sequence[int]) -> None:
    """Raises ScheduleError where ranks can go no further, and names the receive that stops them."""
    left_of = {rank: actions[positions[rank] :] for rank, actions in enumerate(schedule.ranks)}
    stuck = {rank: left for rank, left in left_of.items() if left}
    if not stuck:
        return
    to_come = {(a.kind, a.stage, a.microbatch) for left in stuck.values() for a in left}
    # A receive that nobody sends for stops the others; without one, the earliest of the circle.
    rank = min(stuck, key=lambda rank: (_awaited(stuck[rank][0]) in to_come, stuck[rank][0].microbatch))
    kind, stage, microbatch = _awaited(stuck[rank][0])
    raise ScheduleError(
        f"rank {rank}, action {positions[rank]}, {stuck[rank][0]}: it waits for ever for "
        f"{kind}{microbatch} of stage {stage}; {len(stuck)} of {len(schedule.ranks)} ranks stand still"
    )


def _awaited(action: Action) -> _Message:
    kind, step = _SENDER[action.kind]
    return kind, action.stage + step, action.microbatch


def _check_order(
    action: Action,
    rank: int,
    position: int,
    sent: tuple[int, int],
    received: dict[tuple[Kind, int, int], tuple[int, Action]],
) -> None:
    """Messages of one kind between two ranks are told apart by their order alone."""
    sender, number = sent
    last, earlier = received.get((action.kind, sender, rank), (-1, action))
    if number < last:
        raise ScheduleError(
            f"rank {rank}, action {position}, {action}: rank {sender} sends it before what {earlier} receives"
        )
    received[action.kind, sender, rank] = (number, action)
