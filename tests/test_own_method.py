"""A training method that a user writes is planned, simulated, checked and trained as ours are."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import pd2bw_fx
from pd2bw_fx.actions import Kind, Shape
from pd2bw_fx.errors import InputError, ScheduleError
from pd2bw_fx.models.mlp import MLP, MLPConfig
from pd2bw_fx.passes.schedule import Method, StageMethod, method_of, register_method
from pd2bw_fx.passes.schedule.flushed import GPipe
from pd2bw_fx.passes.schedule.interleaved import Interleaved
from pd2bw_fx.passes.schedule.streamed import PipelinedBackpropagation, TwoBuffered
from pd2bw_fx.runtime.reference import train_reference


class InWaves(StageMethod):
    """GPipe in two waves."""

    name = "waves"

    def turns(
        self, shape: Shape, stage: int, updates: range, *, drain: bool, empty_before: int
    ) -> Iterator[tuple[Kind, int]]:
        m = self.turns_per_update(shape, stage)
        for update in updates:
            for begin, end in ((0, m // 2), (m // 2, m)):
                wave = range(update * m + begin, update * m + end)
                for microbatch in wave:
                    yield Kind.FORWARD, microbatch
                for microbatch in reversed(wave):
                    yield Kind.BACKWARD, microbatch
            yield Kind.UPDATE, update


class Crossed(InWaves):
    """The second stage begins with the microbatch that the first one sends last."""

    name = "crossed"

    def turns(
        self, shape: Shape, stage: int, updates: range, *, drain: bool, empty_before: int
    ) -> Iterator[tuple[Kind, int]]:
        for kind, turn in super().turns(shape, stage, updates, drain=drain, empty_before=empty_before):
            swapped = stage == 1 and kind is not Kind.UPDATE
            yield kind, turn ^ 3 if swapped else turn


class Streaming(PipelinedBackpropagation):
    """Counted, where pb knows a formula."""

    name = "streaming"

    def in_flight(self, shape: Shape, stage: int) -> int:
        return Method.in_flight(self, shape, stage)


class BreadthFirst(Interleaved):
    """Every stage of a device takes all microbatches before the next one does (arXiv 2211.05953)."""

    name = "breadth-first"

    def order(
        self, shape: Shape, rank: int, updates: range, *, drain: bool, empty_before: int
    ) -> Iterator[tuple[Kind, int, int]]:
        m, stages = shape.microbatches_per_update, self.stages_of(shape, rank)
        for update in updates:
            microbatches = range(update * m, (update + 1) * m)
            for kind, turns in ((Kind.FORWARD, stages), (Kind.BACKWARD, stages[::-1])):
                yield from ((kind, stage, microbatch) for stage in turns for microbatch in microbatches)
            yield from ((Kind.UPDATE, stage, update) for stage in stages)


pytestmark = pytest.mark.usefixtures("methods_kept")


def test_a_method_of_the_users_is_planned_simulated_and_trained() -> None:
    register_method(InWaves())
    torch.manual_seed(0)
    model = MLP(MLPConfig(8, 16, 3, 4)).double()
    batches = [(torch.randn(8, 8).double(), torch.randint(0, 4, (8,))) for _ in range(4)]

    pipe = pd2bw_fx.split(
        model, (batches[0][0][:2], batches[0][1][:2]), cluster=2, costs="analytic", method="waves"
    )
    assert pipe.plan.method == "waves"
    assert max(pipe.simulate().in_flight_peak) == pipe.plan.microbatches_per_update // 2
    assert pipe.simulate().throughput < pipe.simulate(method="gpipe").throughput

    def sgd(parameters: object) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1)  # type: ignore[arg-type]

    expected = train_reference(model, batches, optimizer=sgd, microbatches_per_update=4, method="synchronous")
    found = pipe.train_local(batches, optimizer=sgd, microbatches_per_update=4)
    assert found.losses == pytest.approx(expected.losses, rel=1e-12)
    for name, tensor in pipe.state_dict().items():
        torch.testing.assert_close(tensor, expected.state_dict[name], rtol=1e-12, atol=0)


@pytest.mark.parametrize("shape", [Shape(6, 1), Shape(13, 2), Shape(3, 6, replicas=(2,) * 3)])
def test_microbatches_in_flight_are_counted_until_there_are_no_more(shape: Shape) -> None:
    """pb's own formula."""
    expected, counted = (
        [method.kept(shape, stage) for stage in range(shape.num_stages)]
        for method in (PipelinedBackpropagation(), Streaming())
    )
    assert counted == expected


def test_stages_of_one_go_round_the_devices() -> None:
    register_method(BreadthFirst())
    torch.manual_seed(0)
    model = MLP(MLPConfig(8, 16, 3, 4)).double()
    batches = [(torch.randn(8, 8).double(), torch.randint(0, 4, (8,))) for _ in range(3)]

    pipe = pd2bw_fx.split(
        model,
        (batches[0][0][:2], batches[0][1][:2]),
        cluster=2,
        costs="analytic",
        method="breadth-first",
        microbatches_per_update=4,
    )
    assert [stage.device for stage in pipe.plan.stages] == [0, 1, 0, 1]
    assert pipe.check_plan(pipe.plan) == pipe.plan
    with pytest.raises(InputError, match="breadth-first has several stages on a device"):
        pipe.explain()

    def sgd(parameters: object) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=0.1)  # type: ignore[arg-type]

    expected = train_reference(model, batches, optimizer=sgd, microbatches_per_update=4, method="synchronous")
    found = pipe.train_local(batches, optimizer=sgd, microbatches_per_update=4)
    assert found.losses == pytest.approx(expected.losses, rel=1e-12)


def test_a_schedule_that_cannot_run_is_refused() -> None:
    register_method(Crossed())

    with pytest.raises(ScheduleError, match=r"rank 0, action 4, RB1.*it waits for ever for SB1 of stage 1"):
        pd2bw_fx.split(MLP(MLPConfig()), cluster=2, costs="analytic", method="crossed")
    pipe = pd2bw_fx.split(MLP(MLPConfig()), cluster=2, costs="analytic")
    with pytest.raises(ScheduleError, match="it waits for ever"):
        pipe.train_local([], optimizer=torch.optim.Adam, method="crossed")


class Given(InWaves):
    """Whose turns are these, which a user got wrong."""

    name = "given"
    given: Any = ()

    def turns(self, *_: Any, **__: Any) -> Any:
        return self.given


class Elsewhere(InWaves):
    """Its backwards are of a stage that there is not."""

    name = "elsewhere"

    def order(
        self, shape: Shape, rank: int, updates: range, *, drain: bool, empty_before: int
    ) -> Iterator[tuple[Kind, int, int]]:
        cells = super().order(shape, rank, updates, drain=drain, empty_before=empty_before)
        yield from ((kind, 7 if kind is Kind.BACKWARD else stage, number) for kind, stage, number in cells)


class Cramped(InWaves):
    """Says that it holds fewer microbatches than it does."""

    name = "cramped"

    def in_flight(self, shape: Shape, stage: int) -> int:
        return 1


class Swapped(InWaves):
    """Two versions, of which its backwards run on the one that their forwards did not run on."""

    name = "swapped"

    def num_versions(self, shape: Shape, stage: int) -> int:
        return 2

    def backward_version(self, shape: Shape, stage: int, microbatch: int, *, empty_before: int = 0) -> int:
        return max(0, microbatch // shape.microbatches_per_update - 1)


class SaidToBeEmpty(TwoBuffered):
    """Leaves microbatches in flight, and says that it does not."""

    name = "said to be empty"
    is_synchronous = True


class FillsAgain(TwoBuffered):
    """Begins each range of updates as if the pipeline were empty, and forgets what is in flight."""

    name = "fills again"

    def turns(
        self, shape: Shape, stage: int, updates: range, *, drain: bool, empty_before: int
    ) -> Iterator[tuple[Kind, int]]:
        begun = updates.start if updates else empty_before
        return super().turns(shape, stage, updates, drain=drain, empty_before=begun)


class NeverEmpty(TwoBuffered):
    """Goes on after a flush as if microbatches were still in flight."""

    name = "never empty"

    def turns(
        self, shape: Shape, stage: int, updates: range, *, drain: bool, empty_before: int
    ) -> Iterator[tuple[Kind, int]]:
        return super().turns(shape, stage, updates, drain=drain, empty_before=0)


class WrongLater(InWaves):
    """Leaves out a backward of its seventh update."""

    name = "wrong later"

    def turns(
        self, shape: Shape, stage: int, updates: range, *, drain: bool, empty_before: int
    ) -> Iterator[tuple[Kind, int]]:
        left_out = (Kind.BACKWARD, 6 * shape.microbatches_per_update)
        turns = super().turns(shape, stage, updates, drain=drain, empty_before=empty_before)
        yield from (turn for turn in turns if turn != left_out)


@pytest.mark.parametrize(
    ("method", "complaint"),
    [
        (Elsewhere(), r"rank 0, action 4, B1\(stage 7, W0\): there are stages 0 to 1"),
        (Cramped(), r"F1\(stage 0, W0\): 1 microbatch is in flight, and its memory holds 1"),
        (Swapped(), r"B5\(stage 0, W0\): its forward ran on W1"),
        (SaidToBeEmpty(), r"is_synchronous says that no update leaves anything in flight: rank 0 ends"),
        (FillsAgain(), r"asked for one update after another: rank 0, action 10, F4.*: 3 microbatches"),
        (NeverEmpty(), r"and flushed after the first: rank 0, action 17, RB1\(stage 0.*: it was done before"),
        (WrongLater(), r"F27\(stage 0, W6\): 2 microbatches are in flight"),
    ],
    ids=lambda given: given.name if isinstance(given, StageMethod) else "",
)
def test_a_method_that_an_engine_cannot_run_is_refused_at_once(method: StageMethod, complaint: str) -> None:
    register_method(method)

    pipe = pd2bw_fx.split(MLP(MLPConfig()), cluster=2, costs="analytic", method="1f1b")
    with pytest.raises(ScheduleError, match=complaint):
        pipe.train_local([], optimizer=torch.optim.Adam, method=method.name)
    with pytest.raises(ScheduleError):
        pd2bw_fx.split(pipe, cluster=2, costs="analytic", method=method.name)


@pytest.mark.parametrize(
    "given",
    [
        None,
        [("F", 0)],
        [(Kind.FORWARD, None)],
        [Kind.FORWARD],
        [(Kind.FORWARD, 0.0)],
        [(Kind.UPDATE, "0")],
        [(Kind.SEND_GRADIENT, 0)],
    ],
)
def test_turns_that_are_none_are_told(given: Any) -> None:
    method = Given()
    method.given = given
    register_method(method)

    with pytest.raises(InputError, match=r"the turns of the method 'given' have .*; expected pairs such as"):
        pd2bw_fx.split(MLP(MLPConfig()), cluster=2, costs="analytic", method="given")


def test_an_order_without_stages_is_told() -> None:
    class Stageless(InWaves):
        name = "stageless"

        def order(self, *_: Any, **__: Any) -> Any:
            return [(Kind.FORWARD, 0)]

    register_method(Stageless())
    with pytest.raises(InputError, match=r"the order of the method 'stageless' has .*; expected a comp"):
        pd2bw_fx.split(MLP(MLPConfig()), cluster=2, costs="analytic", method="stageless")


def test_a_method_that_does_nothing_is_refused() -> None:
    register_method(Given())

    with pytest.raises(ScheduleError, match="update 0 of stage 0 was not made"):
        pd2bw_fx.split(MLP(MLPConfig()), cluster=2, costs="analytic", method="given")


def test_names_of_ours_stay_ours() -> None:
    with pytest.raises(InputError, match="'gpipe' is one of ours"):
        register_method(GPipe())
    with pytest.raises(InputError, match="an object of a subclass of Method"):
        register_method(GPipe)  # type: ignore[arg-type]
    assert type(method_of("gpipe")) is GPipe
