"""What a module does in evaluation, of which a trace in training mode has nothing: kept right, or refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pd2bw_fx
from pd2bw_fx.errors import ExportError, TraceError
from pd2bw_fx.modes import passes_through_in_evaluation
from tests.torchrun import torchrun_of_forks


class StochasticDepth(nn.Module):
    def __init__(self, rate: float) -> None:
        super().__init__()
        self.rate = rate

    def forward(self, hidden: Tensor) -> Tensor:
        if not self.training or self.rate == 0.0:
            return hidden
        keep = 1 - self.rate
        size = (hidden.shape[0],) + (1,) * (hidden.ndim - 1)
        drawn = torch.rand(size, dtype=hidden.dtype, device=hidden.device)
        return hidden / keep * (drawn < keep)


class Block(nn.Module):
    def __init__(self, width: int, rate: float) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.depth = StochasticDepth(rate)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.depth(torch.relu(self.linear(x)))


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(8, 0.1 * number) for number in range(6)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


class Scaled(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x if self.training else 3 * x


def split(model: nn.Module, *, num_stages: int = 2) -> pd2bw_fx.Pipeline:
    return pd2bw_fx.split(model, (torch.randn(4, 8),), cluster=num_stages, costs="analytic")


def run(pipe: pd2bw_fx.Pipeline, x: Tensor, *, training: bool) -> Tensor:
    values = {"x": x}
    for stage in pipe.stages:
        returned = stage.module.train(training)(*(values[port.value] for port in stage.program.inputs))
        results = (returned,) if isinstance(returned, Tensor) else returned
        values |= {port.value: r for port, r in zip(stage.program.outputs, results, strict=True)}
    return values[pipe.stages[-1].program.outputs[0].value]


def test_stochastic_depth_draws_in_training_and_does_nothing_in_evaluation() -> None:
    model, x = Residual(), torch.randn(7, 8)
    pipe = split(model)

    source = pipe.programs[1].source
    assert "        if not self.training:\n            return hidden\n" in source
    assert source.count("class StochasticDepth") == 1
    for training in (True, False):
        torch.manual_seed(3)
        expected = model.train(training)(x)
        torch.manual_seed(3)
        assert torch.equal(run(pipe, x, training=training), expected)
    assert pipe.trace_report is not None
    assert pipe.trace_report.evaluation == ""


def test_a_cut_never_goes_through_what_evaluation_leaves_out() -> None:
    pipe = split(Residual())

    for number in range(1, 6):
        own = [n for n, o in pipe.graph.operators.items() if o.module_path == f"blocks.{number}.depth"]
        assert len(own) > 1
        assert len({pipe.graph.operators[name].memory_group for name in own}) == 1
        assert len({pipe.plan.stage_of[name] for name in own}) == 1


def test_only_what_gives_its_input_back_passes_through() -> None:
    assert passes_through_in_evaluation(StochasticDepth(0.5))
    assert not passes_through_in_evaluation(StochasticDepth(0.5).eval())
    assert not passes_through_in_evaluation(Scaled())
    assert not passes_through_in_evaluation(nn.Dropout())
    assert not passes_through_in_evaluation(Block(8, 0.5))


def test_a_module_without_a_length_may_be_within_another() -> None:
    class Compiled(nn.Linear):
        def __len__(self) -> int:  # as torch.compile's asks the module that it wraps
            raise TypeError("has no len()")

    assert not passes_through_in_evaluation(nn.Sequential(Compiled(2, 2)).train())
    holder = StochasticDepth(0.5)
    holder.inner = Compiled(2, 2)
    assert not passes_through_in_evaluation(holder)


def test_another_branch_in_evaluation_is_told_and_not_evaluated(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 8), Scaled(), nn.Linear(8, 1), Mean())
    pipe = split(model)

    assert pipe.trace_report is not None
    assert "Scaled at 1 asks for the mode" in pipe.trace_report.evaluation
    pipe.save(tmp_path / "folder")
    loaded = pd2bw_fx.load(tmp_path / "folder")
    assert loaded.trace_report == pipe.trace_report
    ran = torchrun_of_forks(2, "evaluates.py", tmp_path / "folder", tmp_path / "result.txt")
    assert ran.returncode == 0, ran.stderr[-2000:]
    told = (tmp_path / "result.txt").read_text()
    assert told.startswith("InputError: the stages are not for evaluation: in evaluation mode")
    assert "Scaled at 1" in told


class Mean(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean()


class PatchDropout(nn.Module):
    """(batch, 8 patches, 8) -> (batch, 6 patches, 8) of them, drawn; all in evaluation (arXiv 2208.07220)."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        kept = torch.rand(x.shape[:2]).topk(6).indices
        return x[torch.arange(x.shape[0])[:, None], kept]


class Flattened(nn.Module):
    """Rows of one patch after another, however many there are."""

    def forward(self, x: Tensor) -> Tensor:
        batch, patches, width = x.shape
        return x.reshape(batch, width, patches).sum(2)


def test_stages_that_evaluation_has_other_sizes_in_are_told_of_and_not_exported(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 8), PatchDropout(), Flattened(), nn.Linear(8, 1), Mean())

    pipe = pd2bw_fx.split(model, torch.randn(4, 8, 8), cluster=2, num_stages=2, costs="analytic")

    assert pipe.trace_report is not None
    assert "the stages cannot be run on the example inputs: shape" in pipe.trace_report.evaluation
    with pytest.raises(ExportError, match=r"not for evaluation: .* split model.eval\(\) to evaluate, or"):
        pipe.export_onnx(tmp_path / "onnx")
    assert not (tmp_path / "onnx").exists()


def test_a_model_in_evaluation_mode_is_taken_as_it_is() -> None:
    model = Residual().eval()
    pipe = split(model)

    x = torch.randn(5, 8)
    assert torch.equal(run(pipe, x, training=True), model(x))


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm, self.dropout = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.dropout(self.norm(self.linear(x)))
        return hidden


class Freezing(nn.Module):
    """Puts its encoder in evaluation mode by itself, and sets a rate, in every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.norm = Encoder(), nn.BatchNorm1d(8)
        self.dropout, self.last = nn.Dropout(0.1), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        self.encoder.eval()
        self.dropout.p = 0.7
        with torch.no_grad():
            hidden = self.encoder(x)
        last: Tensor = self.last(self.dropout(self.norm(hidden)))
        return last


def test_a_mode_and_a_rate_that_the_forward_sets_are_the_stages() -> None:
    torch.manual_seed(0)
    model = Freezing()
    pipe = pd2bw_fx.split(model, torch.randn(4, 8), cluster=2, costs="analytic")

    assert pipe.verify(model).exact
    with pytest.raises(TraceError, match=r"keeps the layer .*norm whole, which is in another mode.*'export'"):
        pd2bw_fx.split(model, torch.randn(4, 8), cluster=2, costs="analytic", tracer="fx")
    assert model.encoder.training
    assert model.dropout.p == 0.1
    text = "".join(stage.source for stage in pipe.stages)
    assert "self.encoder.linear = nn.Linear(8, 8)" in text or "self.linear = nn.Linear(8, 8)" in text
    assert "self.norm = nn.BatchNorm1d(8)" in text
    assert "F.dropout(input_, 0.7, training=self.training)" in text
    notes = [note for note in pipe.trace_report.notes if "forward" in note]  # type: ignore[union-attr]
    assert notes == [
        "the forward puts encoder in evaluation mode, and so do the stages",
        "attribute dropout.p (0.1 before the forward, 0.7 after): the stages have it as it is after the "
        "forward",
    ]


class InBothModes(nn.Module):
    """Its targets are what it says in evaluation itself, as those of virtual adversarial training are."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), layer, nn.Linear(8, 1))

    def forward(self, x: Tensor) -> Tensor:
        self.layers.eval()
        with torch.no_grad():
            targets = self.layers(x)
        self.layers.train()
        return F.mse_loss(self.layers(x), targets)


@pytest.mark.parametrize("layer", [nn.Dropout(), nn.BatchNorm1d(8), nn.RReLU()], ids=repr)
def test_each_call_of_a_layer_is_in_the_mode_that_the_forward_has_put_it_in(layer: nn.Module) -> None:
    torch.manual_seed(0)
    pipe = split(InBothModes(layer))

    assert pipe.verify().exact
    with pytest.raises(TraceError, match=r"(?s)layers.1 whole, which is in another mode.*test_modes.py:\d+"):
        pd2bw_fx.split(InBothModes(layer), torch.randn(4, 8), cluster=2, costs="analytic", tracer="fx")


class Following(nn.Module):
    """Moves a counter, a mean and a teacher while it trains; nothing that it returns shows it."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 1)
        self.teacher = nn.Linear(4, 4).requires_grad_(False)
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x).tanh() + self.teacher(x)
        if self.training:
            self.steps += 1
            self.mean.lerp_(hidden.detach().mean(0), 0.1)
            with torch.no_grad():
                self.teacher.weight.lerp_(self.first.weight, 0.1)
        return self.last(hidden).square().mean()


@pytest.mark.usefixtures("one_rank")
def test_what_training_alone_writes_stays_in_an_evaluation() -> None:
    torch.manual_seed(0)
    model, x = Following(), torch.randn(4, 4, 4)
    pipe = pd2bw_fx.split(model, x[0, :2], cluster=1, costs="analytic")

    assert pipe.trace_report is not None
    assert pipe.trace_report.training_writes == ("mean", "steps", "teacher.weight")
    options = {"optimizer": lambda parameters: torch.optim.SGD(parameters, lr=0.1), "method": "1f1b"}
    with pipe.engine(microbatches_per_update=2, **options) as engine:
        engine.step(x[0])
        before = engine.state_dict()
        found = float(engine.eval(x[1]))
        engine.outputs(x[2])
        after = engine.state_dict()

    assert before["steps"] == 2
    for name, tensor in before.items():
        assert torch.equal(after[name], tensor), name
    model.load_state_dict(before)
    model.eval()
    assert found == pytest.approx(sum(model(half).item() for half in x[1].chunk(2)) / 2)


class Bent(nn.Module):
    """A bend that is learned, of nothing at first."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 1)
        self.strength = nn.Parameter(torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        if self.training:
            hidden = hidden + self.strength * hidden.sin()
        return self.last(hidden.tanh()).square().mean()


class Centred(nn.Module):
    """Subtracts a mean in training, which is zero at first (DINO's centre, arXiv 2104.14294)."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 1)
        self.register_buffer("centre", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        if self.training:
            hidden = hidden - self.centre
            self.centre.lerp_(hidden.detach().mean(0), 0.1)
        return self.last(hidden.tanh()).square().mean()


@pytest.mark.parametrize("kind", [Bent, Centred])
def test_a_branch_that_does_nothing_yet_is_told_too(kind: type[nn.Module]) -> None:
    pipe = pd2bw_fx.split(kind(), torch.randn(4, 4), cluster=1, costs="analytic")

    assert pipe.trace_report is not None
    assert "with other weights than it has now, 'loss' is another one" in pipe.trace_report.evaluation
    assert f"{kind.__name__} at the top asks for the mode" in pipe.trace_report.evaluation


class Guided(nn.Module):
    """Labels are left out in training (classifier-free guidance, arXiv 2207.12598), at a rate here that
    hits no example."""

    def __init__(self) -> None:
        super().__init__()
        self.labels = nn.Embedding(6, 8)
        self.wide, self.last = nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        first, second = self.dropped(y), self.dropped(y)
        hidden = self.wide(x).relu() + self.labels(second)
        return self.last(hidden + self.labels(first)).square().mean()

    def dropped(self, y: Tensor) -> Tensor:
        return torch.where(torch.rand(y.shape) < 1e-6, 5, y) if self.training else y


@pytest.mark.parametrize(("check", "in_order"), [("fast", True), (False, True), ("fast", False)])
def test_draws_of_training_alone_are_told_though_they_change_nothing_yet(check: Any, in_order: bool) -> None:
    model, inputs = Guided(), (torch.randn(4, 8), torch.randint(5, (4,)))
    options = {"cluster": 2, "num_stages": 2, "costs": "analytic", "check": check}
    pipe = pd2bw_fx.split(model, inputs, **options)
    if not in_order:
        data = pipe.plan.to_json()
        names = [name for stage in data["stages"] for name in stage["operators"]]
        later = ["rand", "lt", "where", *names[names.index("embedding_1") :]]
        for stage, own in zip(data["stages"], ([n for n in names if n not in later], later), strict=True):
            stage["operators"] = own
        pipe = pd2bw_fx.split(model, inputs, plan=pd2bw_fx.Plan.from_json(data), **options)

    assert pipe.trace_report is not None
    told = pipe.trace_report.evaluation
    assert told.startswith("in evaluation mode the stages draw random numbers (test_modes.py:")
    assert "and the model does not" in told


class Prenet(nn.Module):
    """Tacotron's: it drops in evaluation too, the last one does not."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = F.dropout(self.layers[0](x).relu(), p=0.5, training=True)
        x = F.dropout(self.layers[1](x).relu())
        x = F.dropout(self.layers[2](x).relu(), 0.1, self.training)
        return x.square().mean()


def test_what_always_drops_does_so_in_the_stages_of_a_model_in_training() -> None:
    model, x = Prenet(), torch.randn(4, 8)
    pipe = pd2bw_fx.split(model, x, cluster=2, num_stages=2, costs="analytic")

    source = "".join(stage.source for stage in pipe.stages)
    assert (source.count("training=True"), source.count("training=self.training")) == (2, 1)
    assert not pipe.trace_report.evaluation
    for stage in pipe.stages:
        stage.module.eval()
    torch.manual_seed(0)
    found = pipe.run(x)["loss"]
    torch.manual_seed(0)
    assert torch.equal(found, model.eval()(x))


def test_a_hook_that_asks_for_the_mode_is_named_and_what_it_keeps_rules_out_a_file_of_training(
    tmp_path: Path,
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(torch.nn.utils.spectral_norm(nn.Linear(8, 8)), nn.ReLU(), nn.Linear(8, 1))
    pipe = pd2bw_fx.split(model, torch.randn(4, 8), cluster=1, costs="analytic")

    assert pipe.trace_report is not None
    assert "SpectralNorm, a hook of Linear at 0, asks for the mode" in pipe.trace_report.evaluation
    with pytest.raises(
        ExportError, match=r"split `model\.eval\(\)`: in training the forward computes with 0\.weight_"
    ):
        pipe.export_onnx(tmp_path / "onnx", training=True)


def _doubled_in_training(module: nn.Module, given: tuple[Tensor]) -> tuple[Tensor]:
    return (given[0] * 2 if module.training else given[0],)


def _shifted_in_training(module: nn.Module, given: tuple[Tensor]) -> tuple[Tensor]:
    return (given[0] + 1 if module.training else given[0],)


def test_each_function_that_is_a_hook_and_asks_for_the_mode_is_named() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    model[0].register_forward_pre_hook(_doubled_in_training)
    model[1].register_forward_pre_hook(_shifted_in_training)
    pipe = pd2bw_fx.split(model, torch.randn(4, 8), cluster=1, costs="analytic")

    assert pipe.trace_report is not None
    assert "_doubled_in_training, a hook of Linear at 0," in pipe.trace_report.evaluation
    assert "_shifted_in_training, a hook of Linear at 1," in pipe.trace_report.evaluation
