"""One rank at work: performs the actions of its list in their order, each on the stage that it names."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence

import torch

from pd2bw_fx.actions import Action, Kind
from pd2bw_fx.runtime.action_stream import Elsewhere
from pd2bw_fx.runtime.job import Job
from pd2bw_fx.runtime.recorder import Recorder
from pd2bw_fx.runtime.stage_runner import Microbatch, StageRunner
from pd2bw_fx.runtime.weights import WeightStore

_POSTED_AHEAD = 2
_ASKED_AHEAD = 4
_ENDS = (Kind.BACKWARD, Kind.WEIGHT_GRADIENT)  # of a microbatch
_RECEIVES = (Kind.RECEIVE_ACTIVATION, Kind.RECEIVE_GRADIENT)


class Pace:
    """Lets a rank ask its GPU for a few microbatches more than that has done, and no more: memory for what is
    received is taken when it is asked for."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._ended: deque[torch.cuda.Event] = deque()

    def ended(self) -> None:
        """A microbatch's backward has been asked for."""
        if self._device.type == "cuda":
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(self._device))
            self._ended.append(event)
            if len(self._ended) > _ASKED_AHEAD:
                self._ended.popleft().synchronize()


class RankRunner:
    """The stages of a rank, and their common weights."""

    def __init__(
        self,
        job: Job,
        stages: Mapping[int, StageRunner],
        weights: WeightStore,
        *,
        before_waiting: Callable[[], None],
        posts_ahead: bool,
        recorder: Recorder | None = None,
    ) -> None:
        self.current: Action | None = None
        self._job = job
        self._recorder = recorder
        self._stages = stages
        self._weights = weights
        self._before_waiting = before_waiting
        self._posts_ahead = posts_ahead
        self._pace = Pace(next(iter(stages.values())).device)
        self._posted: dict[Kind, set[tuple[int, int]]] = {kind: set() for kind in _RECEIVES}
        self._sizes: set[Hashable] = set()  # of microbatches that have been here
        self._is_new = True  # what the GPU computes in the call at work
        self._updated: set[int] = set()  # stages that have come to the end of an update

    def draw_by(self, seed: int) -> None:
        """What random numbers of coming forwards are drawn from."""
        for stage in self._stages.values():
            stage.draws.seed = seed

    def add(self, numbers: Sequence[int], microbatches: Sequence[Microbatch], *, is_new: bool) -> None:
        """To those of the stages that this rank does them for: replicas have theirs elsewhere.

        `is_new`: all ranks compute what they have not before, as they do with microbatches of another size.
        """
        job, sizes = self._job, {microbatch.size for microbatch in microbatches}
        self._is_new = is_new or not sizes <= self._sizes
        self._sizes |= sizes
        for number, microbatch in zip(numbers, microbatches, strict=True):
            own = [runner for stage, runner in self._stages.items() if job.rank_of(stage, number) == job.rank]
            if own:
                there = microbatch.on(own[0].device, job.inputs(), by_host=self._is_new)
                for runner in own:
                    runner.add(number, there)

    def run(
        self, actions: Sequence[Action], elsewhere: Elsewhere | None = None, *, training: bool = True
    ) -> None:
        """Perform the actions.

        Receives are posted a few actions ahead, so that data arrives while this rank computes; those of
        gradients even for the actions of the next call, since their microbatches are known by then.

        A GPU is kept busy by a send or receive of nccl until they meet, and by a sum until all its ranks are
        there; some calls wait until it is not (the first of a kernel, more memory, torch.cuda.synchronize).
        There nothing is asked for that needs this rank to go on: receives in their turn, which comes well
        before the GPU is so far, sums when the other ranks come to them in this call too, and in the end all
        that they have asked for in it: it is theirs that `elsewhere` tells. Where much is new to the GPU (the
        first updates, microbatches of another size), these travel by the host, and sums start in the end.
        """
        if elsewhere is not None and not self._is_new:
            self._weights.join(elsewhere.joined)
        for stage in self._stages.values():
            stage.training = training
        coming = {
            kind: self._post(kind, _pieces(actions, kind)) if self._posts_ahead else deque[tuple[int, int]]()
            for kind in _RECEIVES
        }
        if self._recorder is not None:
            self._recorder.begin()
        completing = _last_backwards(actions)
        for index, action in enumerate(actions):
            self.current = action
            self._weights.is_completing = index in completing
            began_s = time.perf_counter()
            if action.kind is Kind.UPDATE:
                self._before_waiting()
                self._update(action)
            else:
                if action.kind in coming:
                    self._before_waiting()
                self._stages[action.stage].perform(action)
            if self._recorder is not None:
                self._recorder.note(action, began_s, self._weights.take_steps())
            if self._posts_ahead or action.kind not in _RECEIVES:
                self._weights.progress()
            if action.kind in _ENDS:
                self._pace.ended()
            if action.kind in coming:
                self._posted[action.kind].discard((action.stage, action.microbatch))
                coming[action.kind] = self._post(action.kind, coming[action.kind])
        self.current = None
        if not self._posts_ahead:
            received = {(action.kind, action.stage, action.microbatch) for action in actions}
            for action in () if elsewhere is None else elsewhere.sends:
                for stage in self._stages.values():
                    stage.expect_sent(action, received)
            for stage in self._stages.values():
                stage.links.read_headers()
            if elsewhere is not None:
                self._weights.all_join(elsewhere.joined, finish=self._is_new)
        elif training:
            waiting = [(stage.program.stage, k) for stage in self._stages.values() for k in stage.waiting]
            self._post(Kind.RECEIVE_GRADIENT, sorted(waiting, key=lambda piece: piece[1]))

    def finish_update(self) -> None:
        """Make the version that was put off, if one was."""
        self._weights.finish_update()
        if self._recorder is not None:
            self._recorder.note_rest(self._weights.take_steps())

    def settle(self) -> None:
        """Wait until every peer has what was sent to it."""
        for stage in self._stages.values():
            stage.links.settle()

    def _post(self, kind: Kind, coming: Iterable[tuple[int, int]]) -> deque[tuple[int, int]]:
        """Post receives up to the limit; what is still to be posted."""
        posted = self._posted[kind]
        left = deque(p for p in coming if p not in posted and self._stages[p[0]].receives(kind))
        while left and len(posted) < _POSTED_AHEAD:
            stage, number = left.popleft()
            self._stages[stage].expect(kind, number)
            posted.add((stage, number))
        return left

    def _update(self, action: Action) -> None:
        """The weights of all stages make one step together."""
        self._updated.add(action.stage)
        if len(self._updated) == len(self._stages):
            self._updated.clear()
            self._weights.update(action.version)


def _last_backwards(actions: Sequence[Action]) -> set[int]:
    """The places of each stage's last backward before an update; not of those that come in two halves."""
    last: dict[int, int] = {}
    found: set[int] = set()
    for index, action in enumerate(actions):
        if action.kind is Kind.BACKWARD:
            last[action.stage] = index
        elif action.kind is Kind.WEIGHT_GRADIENT:
            last.pop(action.stage, None)
        elif action.kind is Kind.UPDATE and action.stage in last:
            found.add(last.pop(action.stage))
    return found


def _pieces(actions: Sequence[Action], kind: Kind) -> list[tuple[int, int]]:
    return [(action.stage, action.microbatch) for action in actions if action.kind is kind]
