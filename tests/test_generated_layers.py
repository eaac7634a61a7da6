"""Layers of torch.nn are printed as what they are, with the arguments that they were built with."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pd2bw_fx import Constraints, split


def _source(
    model: nn.Module, batch: tuple[Tensor, ...], tmp_path: Path | None = None, *, check: str = "full"
) -> str:
    pipe = split(model, batch, cluster=2, num_stages=1, costs="analytic", check=check)
    assert pipe.trace_report is not None
    assert not pipe.trace_report.evaluation
    if tmp_path is not None:
        pipe.export_onnx(tmp_path / "onnx")
    return pipe.stages[0].source


class Images(nn.Module):
    """A layer between two convolutions, whose mean is the loss."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.first, self.layer = nn.Conv2d(4, 4, 1), layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.first(x)).square().mean()


@pytest.mark.parametrize(
    "text",
    [
        "nn.InstanceNorm2d(4, affine=True)",
        "nn.InstanceNorm2d(4, track_running_stats=True)",
        "nn.BatchNorm2d(4, affine=False)",
        "nn.LayerNorm((8, 8))",
        "nn.LayerNorm((4, 8, 8), elementwise_affine=False)",
        "nn.LayerNorm(8, bias=False)",
        "nn.LocalResponseNorm(2, 0.001)",
        "nn.PReLU(4)",
        "nn.CELU(2.0)",
        "nn.GLU(1)",
        "nn.Softmin(1)",
        "nn.Threshold(0.1, 0.0)",
        "nn.RReLU(0.2, 0.4)",
        "nn.AlphaDropout(0.1)",
        "nn.LPPool2d(2, 2)",
        "nn.AdaptiveMaxPool2d((2, None))",
        "nn.ZeroPad2d((1, 2, 3, 4))",
        "nn.ConstantPad2d(1, 3.5)",
        "nn.ReflectionPad2d(2)",
        "nn.CircularPad2d(1)",
        'nn.Upsample(scale_factor=2.0, mode="bilinear", align_corners=True)',
        "nn.Upsample((4, 6))",
        "nn.PixelShuffle(2)",
        "nn.PixelUnshuffle(2)",
        "nn.ChannelShuffle(2)",
        "nn.Unflatten(1, (2, 2))",
        "nn.Unfold(2, padding=1)",
    ],
)
def test_layers_of_one_tensor(text: str) -> None:
    torch.manual_seed(0)
    layer = eval(text, {"nn": nn})
    source = _source(Images(layer), (torch.randn(3, 4, 8, 8),))
    assert f"        self.layer = {text}\n" in source
    assert "self.layer(self.first(x))" in source


def test_a_layer_that_gives_its_indices_too_is_its_operators() -> None:
    class Pooled(Images):
        def forward(self, x: Tensor) -> Tensor:
            values, _ = self.layer(self.first(x))
            return values.square().mean()

    source = _source(Pooled(nn.MaxPool2d(2, return_indices=True)), (torch.randn(3, 4, 8, 8),))
    assert "return_indices=True)" in source


@pytest.mark.parametrize(
    "text", ["nn.CrossEntropyLoss(label_smoothing=0.1)", 'nn.HuberLoss("sum")', "nn.MSELoss()"]
)
def test_losses(text: str) -> None:
    class Compared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.loss = nn.Linear(8, 8), eval(text, {"nn": nn})

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return self.loss(self.linear(x), y)

    torch.manual_seed(0)
    source = _source(Compared(), (torch.randn(4, 8), torch.rand(4, 8)))
    assert f"self.loss = {text}\n" in source
    assert "return self.loss(self.linear(x), y)" in source


def test_a_loss_with_weights_or_of_one_tensor_is_its_operator() -> None:
    class Weighed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 4)
            self.loss, self.other = nn.CrossEntropyLoss(weight=torch.rand(4)), nn.MSELoss()

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            scores = self.linear(x)
            return self.loss(scores, y) + self.other(scores, scores)

    torch.manual_seed(0)
    source = _source(Weighed(), (torch.randn(4, 8), torch.randint(0, 4, (4,))))
    assert "nn.CrossEntropyLoss" not in source
    assert "nn.MSELoss" not in source


@pytest.mark.parametrize("has_offsets", [False, True])
def test_bags_of_embeddings(tmp_path: Path, has_offsets: bool) -> None:
    class Bags(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bag, self.head = nn.EmbeddingBag(10, 8, mode="sum"), nn.Linear(8, 4)

        def forward(self, words: Tensor, offsets: Tensor | None = None) -> Tensor:
            return self.head(self.bag(words, offsets)).square().mean()

    torch.manual_seed(0)
    words = torch.randint(0, 10, (12,) if has_offsets else (4, 3))
    offsets = (torch.tensor([0, 2, 2, 7]),) if has_offsets else ()
    source = _source(Bags(), (words, *offsets), tmp_path)
    assert 'self.bag = nn.EmbeddingBag(10, 8, mode="sum")' in source
    assert f"self.bag(words{', offsets' * has_offsets})" in source


class Translator(nn.Module):
    """Each recurrent layer begins where another one has ended."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.encoder = nn.LSTM(8, 8, 2, dropout=0.1, batch_first=True)
        self.decoder = nn.LSTM(8, 8, 2, batch_first=True)
        self.both = nn.GRU(8, 8, batch_first=True, bidirectional=True)
        self.plain = nn.RNN(16, 8, nonlinearity="relu", batch_first=True)
        self.head = nn.Linear(8, 20)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        _, state = self.encoder(self.embedding(x))
        decoded, (hidden, _) = self.decoder(self.embedding(y), state)
        decoded, last = self.both(decoded, hidden)
        decoded, _ = self.plain(decoded, last[:1])
        return F.cross_entropy(self.head(decoded).flatten(0, 1), y.flatten())


def test_recurrent_layers_with_first_states(tmp_path: Path) -> None:
    torch.manual_seed(0)
    batch = torch.randint(0, 20, (4, 6)), torch.randint(0, 20, (4, 5))
    source = _source(Translator(), batch, tmp_path)
    for line in (
        'self.plain = nn.RNN(16, 8, batch_first=True, nonlinearity="relu")',
        "_, (hidden, cell) = self.encoder(self.embedding(x))",
        "decoded, (hidden, _) = self.decoder(self.embedding(y), (hidden, cell))",
        "decoded, last = self.both(decoded, hidden)",
        "decoded, _ = self.plain(decoded, last[:1])",
    ):
        assert line in source


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.RNN])
def test_what_crosses_from_a_recurrent_layer_is_called_as_its_author_did(layer: type[nn.RNNBase]) -> None:
    class Reader(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.reader, self.head = nn.Linear(8, 8), layer(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            heard, _ = self.reader(self.first(x))
            return self.head(heard).square().mean()

    apart = Constraints(stage_of={"reader": 0, "head": 1})
    pipe = split(Reader(), (torch.randn(4, 6, 8),), cluster=2, costs="analytic", constraints=apart)
    first, second = (stage.source for stage in pipe.stages)
    assert "heard, _ = self.reader(self.first(x))" in first
    assert "heard: float32 (4, 6, 8), to stage 1" in first
    assert "def forward(self, heard: Tensor) -> Tensor:" in second


def test_elements_of_a_result_are_called_as_torch_names_them() -> None:
    class Highest(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            x = self.linear(x)
            highest = x.max(-1, keepdim=True)[0]
            spread = x.aminmax()
            return (highest + x.topk(8, -1)[1] + spread.max - spread.min).square().mean()

    source = _source(Highest(), (torch.randn(4, 6, 8),))
    for line in (
        "highest, _ = x.max(-1, keepdim=True)",
        "_, indices = x.topk(8)",
        "min_, max_ = x.aminmax()",
    ):
        assert line in source


class Recurrent(nn.LSTM):
    """Written out, as any class of somebody's own is."""


def test_what_drops_by_itself_stops_in_evaluation() -> None:
    class Dropping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.recurrent = nn.Linear(8, 8), Recurrent(8, 8, 2, dropout=0.2)
            self.register_buffer("mean", torch.zeros(6))
            self.register_buffer("variance", torch.ones(6))

        def forward(self, x: Tensor) -> Tensor:
            x = F.alpha_dropout(self.linear(x), 0.1, self.training)
            x = F.feature_alpha_dropout(F.dropout1d(x, 0.2, self.training), 0.1, self.training)
            x = F.rrelu(x, training=self.training)
            x = F.instance_norm(x, self.mean, self.variance, use_input_stats=self.training)
            first = x.new_zeros(2, x.shape[1], 8)
            x, _ = self.recurrent(x, (first, first))
            return x.square().mean()

    torch.manual_seed(0)
    source = _source(Dropping(), (torch.randn(4, 6, 8),))
    assert source.count("training=self.training") == 4
    assert source.count(" train=self.training") == 1
    assert "use_input_stats=self.training" in source


def test_shifts_of_whole_numbers(tmp_path: Path) -> None:
    class Shifted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            return (self.linear(x) * ((y << 2) >> 1)).square().mean()

    torch.manual_seed(0)
    source = _source(Shifted(), (torch.randn(4, 8), torch.randint(0, 9, (4, 8))), tmp_path)
    assert "(y << 2 >> 1)" in source


def test_cells_with_and_without_their_states(tmp_path: Path) -> None:
    class Stepping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gated, self.plain = nn.GRUCell(8, 6), nn.RNNCell(6, 6, bias=False, nonlinearity="relu")
            self.cell, self.pair = nn.LSTMCell(6, 6), nn.Bilinear(6, 6, 3)
            self.twice, self.both = nn.RNNCell(3, 3), nn.LSTMCell(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            state = self.gated(x[:, 0])
            hidden, memory = self.cell(state)
            for step in range(1, 3):
                state = self.gated(x[:, step], state)
                state = self.plain(state, hidden)
                hidden, memory = self.cell(state, (hidden, memory))
            mixed = self.pair(hidden, memory)
            zeros = x.new_zeros(x.shape[0], 3)
            last, _ = self.both(self.twice(mixed, mixed), (zeros, zeros))
            return last.square().mean()

    source = _source(Stepping(), (torch.randn(4, 3, 8),), tmp_path)
    for line in (
        "self.gated = nn.GRUCell(8, 6)",
        'self.plain = nn.RNNCell(6, 6, bias=False, nonlinearity="relu")',
        "self.cell = nn.LSTMCell(6, 6)",
        "self.pair = nn.Bilinear(6, 6, 3)",
        "state = self.gated(x[:, 0])",
        "hidden, memory = self.cell(state)",
        "for step in range(1, 3):",
        "state = self.gated(x[:, step], state)",
        "state = self.plain(state, hidden)",
        "hidden, memory = self.cell(state, (hidden, memory))",
        "mixed = self.pair(hidden, memory)",
        "last, _ = self.both(self.twice(mixed, mixed), (zeros, zeros))",  # one tensor twice
    ):
        assert line in source


def test_sizes_may_be_numpys() -> None:
    class Sized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            sizes = np.array([8, 6, 3])
            self.first = nn.Linear(sizes[0], sizes[1], bias=np.bool_(True))
            self.last = nn.Linear(np.prod(sizes[1:2]), sizes[-1])

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.first(x)).square().mean()

    source = _source(Sized(), (torch.randn(4, 8),))
    assert "self.first = nn.Linear(8, 6)" in source
    assert "self.last = nn.Linear(6, 3)" in source


def test_a_layer_whose_weight_is_computed_in_every_call_is_written_out() -> None:
    class Dropped(nn.Module):
        """DropConnect, as Merity's AWD-LSTM has it."""

        def __init__(self, inner: nn.Module, name: str) -> None:
            super().__init__()
            self.inner, self.name = inner, name
            self.inner.register_parameter(f"{name}_raw", inner._parameters.pop(name))

        def forward(self, x: Tensor) -> Tensor:
            raw: Tensor = getattr(self.inner, f"{self.name}_raw")
            setattr(self.inner, self.name, F.dropout(raw, 0.5, self.training))
            found = self.inner(x)
            return found[0] if isinstance(found, tuple) else found

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.recurrent = Dropped(nn.LSTM(4, 6), "weight_hh_l0")
            self.linear = Dropped(nn.Linear(6, 3), "weight")

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(self.recurrent(x)).square().mean()

    source = _source(Net(), (torch.randn(4, 5, 4),), check="fast")
    assert "torch.lstm(" in source
    assert "F.linear(" in source


def test_a_layer_whose_weight_has_another_size_than_it_says_is_written_out() -> None:
    class Extended(nn.Module):
        """More words, and an image of one channel, for layers that were there before."""

        def __init__(self) -> None:
            super().__init__()
            self.words, self.image = nn.Embedding(10, 8), nn.Conv2d(3, 8, 3)
            self.norm, self.head = nn.BatchNorm1d(8), nn.Linear(8, 10, bias=False)
            self.words.weight = nn.Parameter(torch.cat([self.words.weight.data, torch.randn(2, 8)]))
            self.image.weight = nn.Parameter(self.image.weight.data.sum(1, keepdim=True))
            self.norm.running_mean = self.norm.running_var = None
            self.head.weight = self.words.weight

        def forward(self, x: Tensor, y: Tensor) -> Tensor:
            seen = self.image(x).mean((2, 3))
            return F.cross_entropy(self.head(self.norm(self.words(y) + seen)), y)

    torch.manual_seed(0)
    source = _source(Extended(), (torch.randn(4, 1, 8, 8), torch.tensor([1, 11, 3, 10])))
    for line in ("F.embedding(", "F.conv2d(", "F.batch_norm(", "F.linear(", "torch.empty(12, 8)"):
        assert line in source


def test_a_number_that_a_forward_sets_for_one_call_and_puts_back_is_that_calls() -> None:
    class Annealed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)
            self.drop, self.leaky = nn.Dropout(0.1), nn.LeakyReLU(0.2)

        def forward(self, x: Tensor) -> Tensor:
            self.drop.p, self.leaky.negative_slope = 0.7, 0.01
            h = self.drop(self.leaky(self.a(x)))
            self.drop.p, self.leaky.negative_slope = 0.1, 0.2
            return self.drop(self.leaky(self.b(h))).square().mean()

    text = _source(Annealed(), (torch.randn(4, 8),))
    assert "F.dropout(input_, 0.7, training=self.training)" in text, text
    assert "F.dropout(input_, 0.1, training=self.training)" in text, text
    assert "F.leaky_relu(input_)\n" in text, text  # 0.01 is torch's own
    assert "F.leaky_relu(input_, negative_slope=0.2)" in text, text
