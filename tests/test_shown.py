"""What an interactive session shows of results: a line, or the table that `print` gives."""

from __future__ import annotations

import pytest
import torch

import pd2bw_fx
from pd2bw_fx.metrics import Metrics
from pd2bw_fx.models import build
from pd2bw_fx.models.gpt import GPT, GPTConfig
from pd2bw_fx.runtime.local_run import TrainResult
from tests.stages import split_of_our_own


@pytest.fixture(scope="module")
def pipe() -> pd2bw_fx.Pipeline:
    torch.manual_seed(0)
    model = GPT.from_config(GPTConfig(num_layers=2, width=16, num_heads=2, sequence_length=8))
    return pd2bw_fx.split(model, model.example_inputs(), cluster=2, costs="analytic")


def test_a_line_says_what_it_is_and_how_much_of_it(pipe: pd2bw_fx.Pipeline) -> None:
    simulated = pipe.simulate(method="1f1b", microbatches_per_update=2, num_updates=1)

    assert repr(pipe.graph) == f"<OperatorGraph of GPT: {len(pipe.graph.operators)} operators, 28 parameters>"
    assert repr(pipe.costs) == f"<Costs of {len(pipe.graph.operators)} operators on cpu, analytic>"
    assert repr(pipe.schedule) == "<Schedule of 2bw: 3 updates of 4 microbatches on 2 ranks>"
    assert repr(pipe.stages[1]) == "<Stage 1: GPTStage1>"
    assert repr(pipe.programs[0]).startswith("<StageProgram of stage 0: GPTStage0, ")
    assert repr(simulated).startswith(
        f"<Timeline of 1f1b, simulated: {len(simulated.events)} actions of 2 ranks"
    )
    assert repr(pipe.draw("time")).startswith("<Picture: ")


def test_a_table_is_shown_as_it_is_printed(pipe: pd2bw_fx.Pipeline) -> None:
    for shown in (pipe.plan, pipe.explain(), pipe.verify()):
        assert repr(shown) == str(shown)


@pytest.mark.parametrize("name", ["gpt", "mlp", "resnet"])
def test_the_bottleneck_of_stages_alone_on_their_devices_is_one_of_them(name: str) -> None:
    for num_stages in (1, 2, 3):
        pipe = split_of_our_own(name, cluster=num_stages)
        slowest = max(pipe.plan.stages, key=lambda stage: stage.load_s)
        assert f"bottleneck: stage {slowest.stage} on {slowest.place}" in str(pipe)


def test_a_run_is_shown_by_its_first_and_last_loss() -> None:
    metrics = Metrics("2bw", 4, losses=(5.0, 4.0, 2.5), update_s=(0.1, 0.1, 0.1))

    assert repr(metrics) == "<Metrics of 2bw: 3 updates, loss 5 to 2.5>"
    assert repr(TrainResult(metrics.losses, {}, metrics)) == "<TrainResult: 3 updates, loss 5 to 2.5>"
    assert repr(TrainResult((), {}, Metrics("2bw", 4, (), ()))) == "<TrainResult: no updates>"


@pytest.mark.usefixtures("one_rank")
def test_an_engine_is_shown_by_its_rank_and_how_far_it_is() -> None:
    pipe = split_of_our_own("mlp", cluster=1)
    batch = build("mlp").example_inputs(batch_size=4)
    with pipe.engine(optimizer=torch.optim.SGD, microbatches_per_update=2) as engine:
        engine.step(batch)
        shown = "<Engine of rank 0 (stage 0) on cpu: 2bw, 2 microbatches an update, after 1 update>"
        assert repr(engine) == shown
    assert repr(engine) == shown  # closed
