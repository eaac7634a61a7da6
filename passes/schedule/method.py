"""`Method`, the interface of every training method, and how its computations become a rank's actions.

A method gives the order of each rank's computations (`order`). Receives and sends follow from it: a receive
is right before the computation that needs it, a send right after the one that makes it. The engine posts
receives ahead of time by itself.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from enum import Enum, auto
from functools import lru_cache
from numbers import Integral
from typing import Any

from pd2bw_fx.actions import Action, Kind, Shape
from pd2bw_fx.costs import Kept
from pd2bw_fx.errors import InputError

from .times import Times

_FEWEST_UPDATES, _MOST_UPDATES = 3, 768  # to count microbatches in flight over

Cell = tuple[Kind, int, int]  # a computation: kind, stage, microbatch (or number of the update)
_COMPUTATIONS = (Kind.FORWARD, Kind.BACKWARD, Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT, Kind.UPDATE)


class Placing(Enum):
    """Where a method puts its stages."""

    ROW = auto()  # stage s on device s, or on as many devices as it has replicas
    ROUND = auto()  # stage s of d v on device s mod d: v = `chunks` stages on each device
    BOTH_WAYS = auto()  # stage s on devices s and d - 1 - s
    WHOLE = auto()  # the one stage on every device


class Method(ABC):
    """One training method. Ranks of a shape count from 0, and those of a replicated stage are neighbours.

    `is_synchronous`: every microbatch of update t runs on W(t), and nothing is in flight between updates.
    `keeps_versions`: a backward runs on the version that its forward ran on, stashed where necessary; if
    False, it runs on whatever version is newest then.
    `trains`: there are backwards and updates; False for inference.
    `updates_often`: by default an update follows each microbatch.
    `fills_slack`: `slack="auto"` takes as much slack as two weight versions and the devices' memory allow.
    """

    name: str
    is_synchronous: bool = True
    keeps_versions: bool = True
    trains: bool = True
    updates_often: bool = False
    fills_slack: bool = False
    placing: Placing = Placing.ROW

    @abstractmethod
    def check(self, shape: Shape) -> None:
        """Raises InputError, with what to do about it, for a shape that the method cannot use."""

    def prepared(self, shape: Shape) -> Shape:
        """Returns the shape with all that the method searches for by itself, for equal times at all stages.

        Prepare a shape once, and give the result to all ranks.
        """
        return shape

    def prepared_for(self, shape: Shape, times: Times) -> Shape:
        """Returns what `prepared` does, for the times of a plan's stages."""
        return self.prepared(shape)

    @property
    def planned_as(self) -> Method:
        """The method to plan memory by: another one if this one's is only known for a plan."""
        return self

    @abstractmethod
    def num_ranks(self, shape: Shape) -> int: ...

    @abstractmethod
    def stages_of(self, shape: Shape, rank: int) -> tuple[int, ...]:
        """Returns the stages whose weights a rank holds, in ascending order."""

    @abstractmethod
    def rank_of(self, shape: Shape, stage: int, microbatch: int) -> int:
        """Returns the rank that runs this microbatch at this stage, forward and backward."""

    @abstractmethod
    def order(
        self, shape: Shape, rank: int, updates: range, *, drain: bool, empty_before: int
    ) -> Iterator[Cell]:
        """Yields the rank's computations, with an update for each of its stages among them."""

    def ranks_of(self, shape: Shape, stage: int) -> tuple[int, ...]:
        """Returns all ranks that hold the stage; their gradients together make its updates."""
        ranks = range(self.num_ranks(shape))
        return tuple(rank for rank in ranks if stage in self.stages_of(shape, rank))

    def num_versions(self, shape: Shape, stage: int) -> int:
        """Returns how many weight versions of a stage are alive at a time."""
        return 1

    def forward_version(self, shape: Shape, stage: int, microbatch: int, *, empty_before: int = 0) -> int:
        """Returns the version that a forward runs on: W(t) for a microbatch of update t.

        `empty_before` (see `actions`) matters only to methods that keep no versions.
        """
        return microbatch // shape.microbatches_per_update

    def backward_version(self, shape: Shape, stage: int, microbatch: int, *, empty_before: int = 0) -> int:
        """Returns the version that the backward runs on: the forward's, where versions are kept."""
        return self.forward_version(shape, stage, microbatch, empty_before=empty_before)

    def in_flight(self, shape: Shape, stage: int) -> int:
        """Returns the most microbatches of this stage between forward and backward on one rank.

        A backward in halves ends with its second half. They are counted in the method's own lists, unless the
        method overrides this with a formula.
        """
        return _counted_in_flight(self, shape, stage)

    def kept(self, shape: Shape, stage: int) -> Kept:
        """Returns what the stage's memory has to hold for this method."""
        return Kept(
            weight_versions=self.num_versions(shape, stage),
            in_flight=self.in_flight(shape, stage),
            gradients_wait=_gradients_wait(self, shape, stage),
            updates_each=shape.microbatches_per_update == shape.replicas_of(stage),
            flushes=_flushes(self, shape, stage),
        )

    def actions(
        self, shape: Shape, rank: int, *, updates: range, drain: bool, empty_before: int = 0
    ) -> tuple[Action, ...]:
        """Returns a rank's actions for `updates`. Lists of consecutive ranges, joined, equal that of the
        whole.

        `drain` appends the backwards and updates that are still to come (none if the method is synchronous).
        `empty_before` is the update before which the pipeline was empty for the last time: 0, or where a
        drained segment ended. Raises InputError as `check` does, and for updates that cannot be.
        """
        self.check(shape)
        if updates.step != 1 or not 0 <= empty_before <= updates.start:
            raise InputError(
                f"updates is {updates}, empty before update {empty_before}; expected consecutive updates "
                "that do not begin before the pipeline was empty"
            )
        cells = _cells(self, shape, rank, updates, drain=drain, empty_before=empty_before)
        return tuple(self._with_transfers(shape, cells, empty_before))

    def _with_transfers(self, shape: Shape, cells: Iterator[Cell], empty_before: int) -> Iterator[Action]:
        last = shape.num_stages - 1
        for kind, stage, number in cells:
            if kind is Kind.UPDATE:
                yield Action(kind, stage, -1, number + 1)
            elif kind is Kind.FORWARD:
                version = self.forward_version(shape, stage, number, empty_before=empty_before)
                if stage > 0:
                    yield Action(Kind.RECEIVE_ACTIVATION, stage, number, version)
                yield Action(kind, stage, number, version)
                if stage < last:
                    yield Action(Kind.SEND_ACTIVATION, stage, number, version)
            else:
                version = self.backward_version(shape, stage, number, empty_before=empty_before)
                if stage < last and kind is not Kind.WEIGHT_GRADIENT:
                    yield Action(Kind.RECEIVE_GRADIENT, stage, number, version)
                yield Action(kind, stage, number, version)
                if stage > 0 and kind is not Kind.WEIGHT_GRADIENT:
                    yield Action(Kind.SEND_GRADIENT, stage, number, version)


def _cells(
    method: Method, shape: Shape, rank: int, updates: range, *, drain: bool, empty_before: int = 0
) -> Iterator[Cell]:
    """Yields the rank's computations. Raises InputError for what is none."""
    for cell in method.order(shape, rank, updates, drain=drain, empty_before=empty_before):
        if not _is_computation(cell, num_numbers=2):
            raise InputError(
                f"the order of the method {method.name!r} has {cell!r}; expected a computation such as "
                f"(Kind.FORWARD, 0, 0): its kind ({', '.join(kind.name for kind in _COMPUTATIONS)}), stage "
                "and microbatch or update"
            )
        yield cell


def _is_computation(found: Any, *, num_numbers: int) -> bool:
    if not isinstance(found, tuple) or len(found) != 1 + num_numbers:
        return False
    kind, *numbers = found
    known = isinstance(kind, Kind) and kind in _COMPUTATIONS
    return known and all(isinstance(number, Integral) for number in numbers)


@lru_cache(maxsize=1024)
def _counted_in_flight(method: Method, shape: Shape, stage: int) -> int:
    """Counts over enough updates for the pipeline to fill: twice as many give the same number."""
    updates = _FEWEST_UPDATES
    found = _most_in_flight(method, shape, stage, updates)
    while not method.is_synchronous and updates < _MOST_UPDATES:
        updates *= 2
        before, found = found, _most_in_flight(method, shape, stage, updates)
        if found == before:
            break
    return found


def _most_in_flight(method: Method, shape: Shape, stage: int, num_updates: int) -> int:
    moments = _moments(method, shape, stage, range(num_updates))
    return max((in_flight for _, in_flight, _ in moments), default=0)


@lru_cache(maxsize=1024)
def _gradients_wait(method: Method, shape: Shape, stage: int) -> bool:
    """Returns whether the stage holds no gradients whenever most microbatches are in flight."""
    moments = list(_moments(method, shape, stage, _until_steady(method, shape, stage)))
    most = max((in_flight for _, in_flight, _ in moments), default=0)
    return all(in_flight < most for _, in_flight, has_gradients in moments if has_gradients)


@lru_cache(maxsize=1024)
def _flushes(method: Method, shape: Shape, stage: int) -> bool:
    """Returns whether no microbatch is in flight at any update of the stage."""
    moments = _moments(method, shape, stage, _until_steady(method, shape, stage))
    return not any(in_flight for kind, in_flight, _ in moments if kind is Kind.UPDATE)


def _until_steady(method: Method, shape: Shape, stage: int) -> range:
    """Returns enough updates for the most microbatches that are ever in flight."""
    filling = method.in_flight(shape, stage) * max(shape.replicas or (1,)) // shape.microbatches_per_update
    return range(filling + 3)


def _moments(method: Method, shape: Shape, stage: int, updates: range) -> Iterator[tuple[Kind, int, bool]]:
    """Yields, after each computation of the stage, its kind, the microbatches in flight, and whether the
    stage holds gradients."""
    for rank in method.ranks_of(shape, stage):
        in_flight, has_gradients = 0, False
        for kind, of_stage, _ in _cells(method, shape, rank, updates, drain=True):
            if of_stage != stage:
                continue
            if kind is Kind.FORWARD:
                in_flight += 1
            elif kind in (Kind.BACKWARD, Kind.WEIGHT_GRADIENT):
                in_flight -= 1
                has_gradients = True
            elif kind is Kind.UPDATE:
                has_gradients = False
            yield kind, in_flight, has_gradients


class StageMethod(Method):
    """A method with one stage on each rank, and perhaps several ranks (replicas) for a stage.

        replicas (2, 1)    stage 0   rank 0   F0 F2 F4 ..      a microbatch k goes to replica k mod r, forward
                                     rank 1   F1 F3 F5 ..      and backward alike; each replica counts its own
                           stage 1   rank 2   F0 F1 F2 ..      ("turns": 0, 1, 2, ..)

    `may_be_unequal`: stages may have different numbers of replicas. `plans_replicas`: `partition_replicated`
    can choose them, because it is known before planning what a stage keeps.
    """

    may_be_unequal = False
    plans_replicas = True

    def check(self, shape: Shape) -> None:
        d, m, replicas = shape.num_stages, shape.microbatches_per_update, shape.replicas
        if d < 1 or m < 1:
            raise InputError(f"found {d} stages and {m} microbatches an update; both must be 1 or more")
        if shape.chunks != 1:
            raise InputError(
                f"{self.name} has one stage on a rank, and chunks={shape.chunks}; try method='interleaved'"
            )
        if shape.vertical_sync and self.name != "pipedream":
            raise InputError(f"vertical_sync is an option of pipedream, not of {self.name}; leave it out")
        if replicas is None:
            return
        if len(replicas) != d or min(replicas) < 1:
            raise InputError(f"replicas is {replicas}; expected {d} numbers of 1 or more, one for each stage")
        if not self.may_be_unequal and len(set(replicas)) > 1:
            raise InputError(
                f"replicas is {replicas}; {self.name} needs as many at every stage; pipedream takes "
                "unequal ones"
            )
        uneven = next((count for count in replicas if m % count), None)
        if uneven is not None:
            raise InputError(
                f"{m} microbatches an update cannot be shared equally by {uneven} replicas; try "
                f"microbatches_per_update={-(-m // uneven) * uneven}"
            )

    def num_ranks(self, shape: Shape) -> int:
        return shape.num_stages if shape.replicas is None else sum(shape.replicas)

    def stages_of(self, shape: Shape, rank: int) -> tuple[int, ...]:
        return (self.place_of(shape, rank)[0],)

    def ranks_of(self, shape: Shape, stage: int) -> tuple[int, ...]:
        first = self.first_rank(shape, stage)
        return tuple(range(first, first + shape.replicas_of(stage)))

    def rank_of(self, shape: Shape, stage: int, microbatch: int) -> int:
        return self.first_rank(shape, stage) + microbatch % shape.replicas_of(stage)

    def first_rank(self, shape: Shape, stage: int) -> int:
        return stage if shape.replicas is None else sum(shape.replicas[:stage])

    def place_of(self, shape: Shape, rank: int) -> tuple[int, int]:
        """Returns the stage of a rank, and which replica of it the rank is."""
        if shape.replicas is None:
            return rank, 0
        for stage, count in enumerate(shape.replicas):
            if rank < count:
                return stage, rank
            rank -= count
        raise AssertionError(f"rank {rank} is beyond the replicas {shape.replicas}")

    def turns_per_update(self, shape: Shape, stage: int) -> int:
        """Returns how many microbatches of an update one replica of the stage runs."""
        return shape.microbatches_per_update // shape.replicas_of(stage)

    def order(
        self, shape: Shape, rank: int, updates: range, *, drain: bool, empty_before: int
    ) -> Iterator[Cell]:
        stage, replica = self.place_of(shape, rank)
        count = shape.replicas_of(stage)
        turns = self.turns(shape, stage, updates, drain=drain, empty_before=empty_before)
        for turn in turns if isinstance(turns, Iterable) else (turns,):
            if not isinstance(turn, tuple) or not _is_computation(turn, num_numbers=1):
                raise InputError(
                    f"the turns of the method {self.name!r} have {turn!r}; expected pairs such as "
                    "(Kind.FORWARD, 0): a computation's kind "
                    f"({', '.join(kind.name for kind in _COMPUTATIONS)}), and a microbatch or update"
                )
            kind, number = turn
            yield kind, stage, number if kind is Kind.UPDATE else number * count + replica

    @abstractmethod
    def turns(
        self, shape: Shape, stage: int, updates: range, *, drain: bool, empty_before: int
    ) -> Iterator[tuple[Kind, int]]:
        """Yields the order of every replica of a stage; each replica counts its own microbatches."""
