"""Schedules: the order in which each stage computes, sends, receives and updates.

PipeDream-2BW (arXiv 2006.09503), d = 3 stages, m = 4 microbatches an update; w = d - 1 - s warm-up forwards,
then one forward, one backward, never flushed:

    stage 0   F0 F1 F2 B0 F3|B1 F4 B2 F5 B3 U F6 ..     | a segment ends with the last forward of its update,
    stage 1      F0 F1 B0 F2 B1 F3|B2 F4 B3 U F5 B4 ..    so that a rank which has to wait for a gradient can
    stage 2         F0 B0 F1 B1 F2 B2 F3 B3 U|F4 B4 ..    fetch its next batch meanwhile

Receives stand right before the action that needs them and sends right after the one that makes them; posting
receives ahead of time is the engine's business.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from pd2bw_fx.actions import Action, Kind, Schedule
from pd2bw_fx.errors import InputError, ScheduleError

SYNCHRONOUS = ("1f1b", "gpipe")
METHODS = ("2bw", *SYNCHRONOUS, "inference")


def build_schedule(
    method: str,
    num_stages: int,
    *,
    microbatches_per_update: int,
    updates: range,
    drain: bool,
    empty_before: int = 0,
    slack: float = 0.0,
) -> Schedule:
    """The actions of `updates` at every stage; segments joined with `then` equal the schedule built at once.

    `method`: "2bw"; "1f1b" (flushed after every update) and "gpipe" (all forwards, then the backwards last
    microbatch first), which leave nothing to drain; "inference" (forwards alone, each microbatch on the
    newest weights of its update).

    `drain` appends the backwards and updates that are still to come. `empty_before` is the update before
    which the pipeline was empty for the last time: 0, or where a drained segment ended. `slack` lengthens
    the warm-up of 2BW to (d - 1 - s)(1 + slack): more microbatches in flight against late gradients.

    Raises InputError for an unknown method, for counts that cannot be, and where two weight versions would
    not be enough: 2BW needs m >= d and a warm-up of m forwards or fewer.
    """
    ranks = tuple(
        stage_actions(
            method,
            num_stages,
            stage,
            microbatches_per_update=microbatches_per_update,
            updates=updates,
            drain=drain,
            empty_before=empty_before,
            slack=slack,
        )
        for stage in range(num_stages)
    )
    return Schedule(
        method=method,
        num_stages=num_stages,
        microbatches_per_update=microbatches_per_update,
        updates=updates,
        ranks=ranks,
        drained=drain or method != "2bw",
        weight_versions=num_versions(method),
    )


def stage_actions(
    method: str,
    num_stages: int,
    stage: int,
    *,
    microbatches_per_update: int,
    updates: range,
    drain: bool,
    empty_before: int = 0,
    slack: float = 0.0,
) -> tuple[Action, ...]:
    """One stage's list of `build_schedule`, for a rank that needs no other."""
    m = microbatches_per_update
    if method not in METHODS:
        raise InputError(f"method is {method!r}; expected one of {', '.join(METHODS)}")
    if num_stages < 1 or m < 1:
        raise InputError(f"found {num_stages} stages and {m} microbatches an update; both must be 1 or more")
    if updates.step != 1 or not 0 <= empty_before <= updates.start:
        raise InputError(
            f"updates is {updates}, empty before update {empty_before}; expected consecutive updates that do "
            "not begin before the pipeline was empty"
        )
    if method == "2bw":
        _check_two_versions(num_stages, m, slack)
    build = {"2bw": _two_buffered, "1f1b": _flushed, "gpipe": _gpipe, "inference": _inference}[method]
    cell = _Stage(stage, num_stages, m, two_buffered=method == "2bw")
    return tuple(build(cell, updates, warm_up_forwards(stage, num_stages, slack), drain, empty_before))


def num_versions(method: str) -> int:
    """Weight versions alive at any one time."""
    return 2 if method == "2bw" else 1


def weight_version(method: str, microbatch: int, microbatches_per_update: int) -> int:
    """The version that a microbatch runs on, forward and backward, at every stage.

    2BW: W(t+1) = W(t) - lr * grad f(W(t-1)), so update t runs on version t - 1, and the first two updates on
    the initial weights. The synchronous methods: update t runs on version t.
    """
    update = microbatch // microbatches_per_update
    return max(update - 1, 0) if method == "2bw" else update


def warm_up_forwards(stage: int, num_stages: int, slack: float = 0.0) -> int:
    """Forwards of a stage before its first forward-backward pair; one more microbatch is in flight then.

    d - 1 - s is the least that keeps every stage busy; with it 2BW would do with m >= d - 1.
    """
    return math.ceil((num_stages - 1 - stage) * (1 + slack))


def _check_two_versions(num_stages: int, m: int, slack: float) -> None:
    if m < num_stages:
        raise InputError(
            f"2bw with {m} microbatches an update on {num_stages} stages: two weight versions are enough if "
            f"there are as many microbatches as stages; try microbatches_per_update={num_stages}"
        )
    longest = warm_up_forwards(0, num_stages, slack)
    if slack < 0 or longest > m:
        raise InputError(
            f"slack={slack} on {num_stages} stages: stage 0 would begin with {longest} forwards, which two "
            f"weight versions allow up to {m}, the microbatches of an update; try a slack from 0 to "
            f"{m / max(num_stages - 1, 1) - 1:.2g}"
        )


class _Stage:
    """Makes the actions of one stage, each with its receives and sends."""

    def __init__(self, stage: int, num_stages: int, m: int, *, two_buffered: bool) -> None:
        self.stage = stage
        self.is_first = stage == 0
        self.is_last = stage == num_stages - 1
        self.m = m
        self.method = "2bw" if two_buffered else "synchronous"

    def forward(self, microbatch: int) -> Iterator[Action]:
        version = weight_version(self.method, microbatch, self.m)
        if not self.is_first:
            yield Action(Kind.RECEIVE_ACTIVATION, self.stage, microbatch, version)
        yield Action(Kind.FORWARD, self.stage, microbatch, version)
        if not self.is_last:
            yield Action(Kind.SEND_ACTIVATION, self.stage, microbatch, version)

    def backward(self, microbatch: int) -> Iterator[Action]:
        version = weight_version(self.method, microbatch, self.m)
        if not self.is_last:
            yield Action(Kind.RECEIVE_GRADIENT, self.stage, microbatch, version)
        yield Action(Kind.BACKWARD, self.stage, microbatch, version)
        if not self.is_first:
            yield Action(Kind.SEND_GRADIENT, self.stage, microbatch, version)

    def update(self, update: int) -> Action:
        """The one that makes version update + 1."""
        return Action(Kind.UPDATE, self.stage, -1, update + 1)


def _two_buffered(
    cell: _Stage, updates: range, warm_up: int, drain: bool, empty_before: int
) -> Iterator[Action]:
    """After the forward of microbatch k comes the backward of k - warm_up.

    Where that has to wait for a gradient, it is the first action of the next microbatch instead, so that a
    segment ends with a forward.
    """
    m = cell.m
    late = 0 if warm_up == 0 else 1

    def backward(microbatch: int) -> Iterator[Action]:
        if microbatch < empty_before * m:
            return
        yield from cell.backward(microbatch)
        if microbatch % m == m - 1:
            yield cell.update(microbatch // m)

    for microbatch in range(updates.start * m, updates.stop * m):
        if late:
            yield from backward(microbatch - warm_up - 1)
        yield from cell.forward(microbatch)
        if not late:
            yield from backward(microbatch)
    if drain:
        begun = max(updates.stop * m, empty_before * m)
        for microbatch in range(begun - warm_up - late, begun):
            yield from backward(microbatch)


def _flushed(cell: _Stage, updates: range, warm_up: int, drain: bool, empty_before: int) -> Iterator[Action]:
    for update in updates:
        first, beyond = update * cell.m, (update + 1) * cell.m
        for microbatch in range(first, beyond):
            yield from cell.forward(microbatch)
            if microbatch - warm_up >= first:
                yield from cell.backward(microbatch - warm_up)
        for microbatch in range(max(first, beyond - warm_up), beyond):
            yield from cell.backward(microbatch)
        yield cell.update(update)


def _gpipe(cell: _Stage, updates: range, warm_up: int, drain: bool, empty_before: int) -> Iterator[Action]:
    for update in updates:
        microbatches = range(update * cell.m, (update + 1) * cell.m)
        for microbatch in microbatches:
            yield from cell.forward(microbatch)
        for microbatch in reversed(microbatches):
            yield from cell.backward(microbatch)
        yield cell.update(update)


def _inference(
    cell: _Stage, updates: range, warm_up: int, drain: bool, empty_before: int
) -> Iterator[Action]:
    for microbatch in range(updates.start * cell.m, updates.stop * cell.m):
        yield from cell.forward(microbatch)


def check_schedule(schedule: Schedule, *, in_flight: Sequence[int] | None = None) -> None:
    """Refuse a schedule that would compute something else than its method, or never end.

    The schedule begins with an empty pipeline (join segments with `then` before). Checked for each rank in
    its order: what an action needs is there, versions follow the method's rule and are alive when they are
    used, an update has all its gradients and overwrites nothing in use, no more than `in_flight[stage]`
    microbatches wait for their backward. Checked for all: every receive is served, and no circle of waits.

    Raises ScheduleError naming the first offending action.
    """
    for rank, actions in enumerate(schedule.ranks):
        cells: dict[int, _StageCheck] = {}
        for position, action in enumerate(actions):
            limit = None if in_flight is None else in_flight[action.stage]
            cell = cells.setdefault(action.stage, _StageCheck(schedule, action.stage, limit))
            trouble = cell.trouble_with(action)
            if trouble is not None:
                raise ScheduleError(f"rank {rank}, action {position}, {action}: {trouble}")
        for cell in cells.values():
            if schedule.drained and cell.open:
                raise ScheduleError(
                    f"rank {rank} ends drained, and microbatch {min(cell.open)} of stage {cell.stage} had no "
                    "backward; append the drain, or say drained=False"
                )
    _check_progress(schedule)


class _StageCheck:
    """What one stage has done so far, by its own list alone."""

    def __init__(self, schedule: Schedule, stage: int, in_flight: int | None) -> None:
        self.schedule = schedule
        self.stage = stage
        self.limit = in_flight
        self.newest = _first_version(schedule)
        self.done: set[tuple[Kind, int]] = set()
        self.open: dict[int, int] = {}  # microbatches between forward and backward, and their version
        self.gradients: dict[int, int] = {}  # backwards of each update

    def trouble_with(self, action: Action) -> str | None:
        """Perform the action; or the reason why it cannot be."""
        trouble = self._trouble_with(action)
        if trouble is None:
            self._perform(action)
        return trouble

    def _trouble_with(self, action: Action) -> str | None:
        kind, microbatch = action.kind, action.microbatch
        if not 0 <= action.stage < self.schedule.num_stages:
            return f"there are stages 0 to {self.schedule.num_stages - 1}"
        if kind is Kind.UPDATE:
            return self._trouble_with_update(action.version)
        if (kind, microbatch) in self.done:
            return "it was done before"
        missing = [before for before in self._needs(kind) if (before, microbatch) not in self.done]
        if missing:
            return f"{missing[0]}{microbatch} of its stage must come before it"
        expected = weight_version(self.schedule.method, microbatch, self.schedule.microbatches_per_update)
        if self.schedule.method in METHODS and action.version != expected:
            return f"{self.schedule.method} runs microbatch {microbatch} on W{expected}"
        if kind not in (Kind.FORWARD, Kind.BACKWARD):
            return None
        oldest = self.newest - self.schedule.weight_versions + 1
        if self.schedule.method != "inference" and not oldest <= action.version <= self.newest:
            return (
                f"W{action.version} is {'gone' if action.version < oldest else 'not made yet'}; alive are "
                f"W{max(oldest, 0)} to W{self.newest}"
            )
        if kind is Kind.FORWARD and self.limit is not None and len(self.open) >= self.limit:
            return f"{len(self.open)} microbatches are in flight, and its memory holds {self.limit}"
        return None

    def _trouble_with_update(self, version: int) -> str | None:
        m, update = self.schedule.microbatches_per_update, version - 1
        if version != self.newest + 1:
            return f"the newest version is W{self.newest}, so that the next update makes W{self.newest + 1}"
        if self.gradients.get(update, 0) != m:
            return f"update {update} has {self.gradients.get(update, 0)} of its {m} backwards"
        overwritten = version - self.schedule.weight_versions
        users = [microbatch for microbatch, used in self.open.items() if used == overwritten]
        if users:
            return f"it overwrites W{overwritten}, which microbatch {min(users)} needs for its backward"
        return None

    def _needs(self, kind: Kind) -> list[Kind]:
        received = [Kind.RECEIVE_ACTIVATION] if self.stage > 0 else []
        gradient = [Kind.RECEIVE_GRADIENT] if self.stage < self.schedule.num_stages - 1 else []
        return {
            Kind.FORWARD: received,
            Kind.SEND_ACTIVATION: [Kind.FORWARD],
            Kind.BACKWARD: [Kind.FORWARD, *gradient],
            Kind.SEND_GRADIENT: [Kind.BACKWARD],
        }.get(kind, [])

    def _perform(self, action: Action) -> None:
        if action.kind is Kind.UPDATE:
            self.newest = action.version
            return
        self.done.add((action.kind, action.microbatch))
        if action.kind is Kind.FORWARD and self.schedule.method != "inference":
            self.open[action.microbatch] = action.version
        elif action.kind is Kind.BACKWARD:
            del self.open[action.microbatch]
            update = action.microbatch // self.schedule.microbatches_per_update
            self.gradients[update] = self.gradients.get(update, 0) + 1


def _first_version(schedule: Schedule) -> int:
    """The newest version before the first action."""
    return schedule.updates.start


def _check_progress(schedule: Schedule) -> None:
    """Perform all ranks' lists as far as they go, a receive only after its send."""
    sender = {
        Kind.RECEIVE_ACTIVATION: (Kind.SEND_ACTIVATION, -1),
        Kind.RECEIVE_GRADIENT: (Kind.SEND_GRADIENT, 1),
    }
    sent: set[tuple[Kind, int, int]] = set()
    positions = [0] * len(schedule.ranks)
    moved = True
    while moved:
        moved = False
        for rank, actions in enumerate(schedule.ranks):
            while positions[rank] < len(actions):
                action = actions[positions[rank]]
                if action.kind in sender:
                    kind, step = sender[action.kind]
                    if (kind, action.stage + step, action.microbatch) not in sent:
                        break
                sent.add((action.kind, action.stage, action.microbatch))
                positions[rank] += 1
                moved = True
    stuck = {rank: list_[positions[rank] :] for rank, list_ in enumerate(schedule.ranks)}
    stuck = {rank: left for rank, left in stuck.items() if left}
    if not stuck:
        return
    to_come = {(a.kind, a.stage, a.microbatch) for left in stuck.values() for a in left}

    def awaited(rank: int) -> tuple[Kind, int, int]:
        action = stuck[rank][0]
        kind, step = sender[action.kind]
        return kind, action.stage + step, action.microbatch

    # A receive that nobody sends for stops the others; without one, the earliest of the circle.
    rank = min(stuck, key=lambda rank: (awaited(rank) in to_come, stuck[rank][0].microbatch))
    kind, stage, microbatch = awaited(rank)
    raise ScheduleError(
        f"rank {rank}, action {positions[rank]}, {stuck[rank][0]}: it waits for ever for "
        f"{kind}{microbatch} of stage {stage}; {len(stuck)} of {len(schedule.ranks)} ranks stand still"
    )
