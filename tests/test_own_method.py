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
from pd2bw_fx.passes.schedule.streamed import PipelinedBackpropagation
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


@pytest.mark.parametrize("given", [None, [("F", 0)], [(Kind.FORWARD, None)], [Kind.FORWARD]])
def test_turns_that_are_none_are_told(given: Any) -> None:
    method = Given()
    method.given = given
    register_method(method)

    with pytest.raises(InputError, match=r"the turns of the method 'given' have .*; expected pairs such as"):
        pd2bw_fx.split(MLP(MLPConfig()), cluster=2, costs="analytic", method="given")


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
