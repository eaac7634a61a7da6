"""Performs a rank's actions in their order, each on the stage that it names."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence

import torch

from pd2bw_fx.actions import Action, Kind
from pd2bw_fx.runtime.action_stream import PeerActions
from pd2bw_fx.runtime.job import Job
from pd2bw_fx.runtime.recorder import Recorder
from pd2bw_fx.runtime.stage_runner import Microbatch, StageRunner
from pd2bw_fx.runtime.weights import WeightStore

_POSTED_AHEAD = 2  # receives of one kind that are posted before their turn
_ASKED_AHEAD = 4  # microbatches that are launched on a GPU before it has done them
_ENDS = (Kind.BACKWARD, Kind.WEIGHT_GRADIENT)  # actions that end a microbatch
_RECEIVES = (Kind.RECEIVE_ACTIVATION, Kind.RECEIVE_GRADIENT)

_Piece = tuple[int, int]  # a stage, and the number of one of its microbatches


class Pace:
    """Keeps a rank from running more than a few microbatches ahead of its GPU.

    Memory for what is received is allocated when work is launched, not when the GPU comes to it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._ended: deque[torch.cuda.Event] = deque()

    def ended(self) -> None:
        """Notes that a microbatch's backward was launched; waits if too many are not yet done."""
        if self._device.type == "cuda":
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(self._device))
            self._ended.append(event)
            if len(self._ended) > _ASKED_AHEAD:
                self._ended.popleft().synchronize()


class RankRunner:
    """Runs the stages of a rank, which share one WeightStore."""

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
        self._posted: dict[Kind, set[_Piece]] = {kind: set() for kind in _RECEIVES}
        self._sizes: set[Hashable] = set()  # of the microbatches so far
        self._is_new = True  # whether the current call computes what the GPU has not computed before
        self._updated: set[int] = set()  # stages that have come to the end of an update

    def where(self) -> str:
        """Returns the action that this rank performs, for the end of a message; nothing between calls."""
        action = self.current  # read once: the watch's thread asks while this rank goes on
        return "" if action is None else f", {action.described()}"

    def draw_by(self, seed: int) -> None:
        """Sets the seed from which coming forwards draw their random numbers."""
        for stage in self._stages.values():
            stage.draws.seed = seed

    def add(self, numbers: Sequence[int], microbatches: Sequence[Microbatch], *, is_new: bool) -> None:
        """Gives each stage its microbatches. Where a stage has replicas, other ranks run some of them.

        `is_new`: no rank has computed such microbatches before. Microbatches of another size are new too.
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
        self, actions: Sequence[Action], peers: PeerActions | None = None, *, training: bool = True
    ) -> None:
        """Performs the actions in their order.

        Over gloo, receives are posted a few actions ahead, so that data arrives while this rank computes.
        Receives of gradients are posted even for the actions of the next call, since their microbatches are
        known by then.

        Over nccl (`peers` says what the other ranks do in this call), a send or receive occupies the GPU
        until its peer has come to it, and a sum until all its ranks have. Some CUDA calls wait until the GPU
        is idle: the first launch of a kernel, an allocation of more memory, torch.cuda.synchronize. So that
        ranks never wait for each other there, nothing is launched that can finish only after this rank has
        gone on:

        - a receive is launched in its turn, which comes well before the GPU gets to it;
        - a sum starts when the other ranks come to it in this call too;
        - at the end of the call, everything is received that the other ranks have sent in it.

        While much is new to the GPU (in the first updates, or with microbatches of another size), tensors go
        through the host, and sums start at the end of the call.
        """
        if peers is not None and not self._is_new:
            self._weights.allow_sums(peers.reached)
        for stage in self._stages.values():
            stage.training = training
        coming = {
            kind: self._to_post(kind, _pieces(actions, kind)) if self._posts_ahead else deque[_Piece]()
            for kind in _RECEIVES
        }
        for kind, pieces in coming.items():
            self._post(kind, pieces)
        if self._recorder is not None:
            self._recorder.begin()
        completing = _last_backwards(actions)
        for index, action in enumerate(actions):
            self.current = action
            self._weights.begin_action(completes_gradients=index in completing)
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
                self._post(action.kind, coming[action.kind])
        self.current = None
        if not self._posts_ahead:
            self._meet(actions, peers)
        elif training:
            waiting = [(stage.program.stage, k) for stage in self._stages.values() for k in stage.waiting]
            waiting.sort(key=lambda piece: piece[1])
            self._post(Kind.RECEIVE_GRADIENT, self._to_post(Kind.RECEIVE_GRADIENT, waiting))

    def _meet(self, actions: Sequence[Action], peers: PeerActions | None) -> None:
        """Receives over nccl what the peers have sent in a call, and completes the sums they have come to."""
        received = {(action.kind, action.stage, action.microbatch) for action in actions}
        for action in () if peers is None else peers.sends:
            for stage in self._stages.values():
                stage.expect_sent(action, received)
        for stage in self._stages.values():
            stage.links.read_headers()
        if peers is not None:
            self._weights.complete_sums(peers.reached, finish=self._is_new)

    def finish_update(self) -> None:
        """Makes the versions that were put off, if any were."""
        self._weights.finish_update()
        if self._recorder is not None:
            self._recorder.note_rest(self._weights.take_steps())

    def settle(self) -> None:
        """Waits until every peer has received what was sent to it."""
        for stage in self._stages.values():
            stage.links.settle()

    def _to_post(self, kind: Kind, coming: Iterable[_Piece]) -> deque[_Piece]:
        """Returns the receives that are not posted yet."""
        posted = self._posted[kind]
        return deque(
            piece for piece in coming if piece not in posted and self._stages[piece[0]].receives(kind)
        )

    def _post(self, kind: Kind, coming: deque[_Piece]) -> None:
        """Posts the first of the receives, up to the limit, and takes them out."""
        posted = self._posted[kind]
        while coming and len(posted) < _POSTED_AHEAD:
            stage, number = piece = coming.popleft()
            self._stages[stage].expect(kind, number)
            posted.add(piece)

    def _update(self, action: Action) -> None:
        """Makes the update once all stages of the rank have come to it: their weights step together."""
        self._updated.add(action.stage)
        if len(self._updated) == len(self._stages):
            self._updated.clear()
            self._weights.update(action.version)


def _last_backwards(actions: Sequence[Action]) -> set[int]:
    """Returns the positions of each stage's last backward before an update, unless it comes in two halves."""
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


def _pieces(actions: Sequence[Action], kind: Kind) -> list[_Piece]:
    return [(action.stage, action.microbatch) for action in actions if action.kind is kind]
