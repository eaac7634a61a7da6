"""Random numbers of a run: new for every microbatch, and the same however the model is cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pd2bw_fx
from pd2bw_fx.drawing import function_draws, operator_draws
from pd2bw_fx.errors import TraceError
from pd2bw_fx.models.gpt import GPT, GPTConfig
from pd2bw_fx.runtime.draws import Draws
from pd2bw_fx.runtime.local_run import TrainResult
from tests.trained import sgd

CPU = torch.device("cpu")
UPDATES, M = 3, 4
X = torch.ones(4, 2, 8)
LSTM = nn.LSTM(8, 8, num_layers=2, dropout=0.5)
PLAIN = nn.LSTM(8, 8)
ATTENTION = nn.MultiheadAttention(8, 2, dropout=0.5)

DRAWING: dict[str, Callable[[], Any]] = {
    "dropout": lambda: F.dropout(X, 0.5),
    "a dropout layer": lambda: nn.Dropout1d(0.5)(X),
    "alpha dropout": lambda: F.alpha_dropout(X, 0.5, training=True),
    "attention": lambda: F.scaled_dot_product_attention(X, X, X, dropout_p=0.5),
    "an attention layer": lambda: ATTENTION(X, X, X)[0],
    "a recurrent layer": lambda: LSTM(X)[0],
    "packed": lambda: LSTM(nn.utils.rnn.pack_padded_sequence(X, torch.tensor([4, 3])))[0].data,
    "a factory": lambda: torch.rand(3),
    "in place": lambda: torch.empty(3).bernoulli_(0.5) + torch.empty(3).uniform_(),
    "noise": lambda: torch.randn_like(X),
    "rrelu": lambda: F.rrelu(-X, training=True),
    "an rrelu layer": lambda: nn.RReLU()(-X),
    "counts": lambda: torch.poisson(3 * X),
    "trials": lambda: torch.binomial(9 * X, X / 2),
    "a geometric one": lambda: torch.empty(3).geometric_(0.3),
    "heavy tails": lambda: torch.empty(3).cauchy_(),
    "of a logarithm": lambda: torch.empty(3).log_normal_(),
    "a gamma distribution": lambda: torch._standard_gamma(X),
    "a dirichlet distribution": lambda: torch._sample_dirichlet(X),
    "gumbel": lambda: F.gumbel_softmax(X),
    "a pool": lambda: nn.FractionalMaxPool2d(2, output_size=2)(torch.arange(64.0).view(1, 8, 8)),
    "an operator": lambda: torch.ops.aten.poisson.default(3 * X),
    "an operator without its overload": lambda: torch.ops.aten.native_dropout(X, 0.5, True)[0],
}
STILL: dict[str, Callable[[], Any]] = {
    "nothing to drop": lambda: F.dropout(X, 0.0),
    "not in training": lambda: F.dropout(X, 0.5, training=False),
    "attention": lambda: F.scaled_dot_product_attention(X, X, X),
    "a recurrent layer": lambda: PLAIN(X)[0],
    "rrelu": lambda: F.rrelu(-X),
    "an operator of attention": lambda: torch.ops.aten._scaled_dot_product_attention_math(X, X, X)[0],
}


@pytest.mark.parametrize("name", DRAWING)
def test_an_operator_draws_the_same_on_whichever_stage_it_is(name: str) -> None:
    draw = DRAWING[name]
    times = 2 if name == "in place" else 1
    whole = Draws(0, range(3 + times), CPU)
    alone = Draws(1, range(3, 3 + times), CPU)

    with whole.of(microbatch=5):
        before = [torch.rand(3) for _ in range(3)]
        expected = draw()
    with alone.of(microbatch=5):
        drawn = draw()

    assert len({tuple(t.tolist()) for t in before}) == 3
    torch.testing.assert_close(drawn, expected, rtol=0, atol=0)


def test_every_function_of_torch_that_may_draw_is_known() -> None:
    names = {name.partition("::")[2].partition(".")[0] for name in torch._C._dispatch_get_all_op_names()}
    overloads = [
        getattr(packet, overload)
        for packet in (getattr(torch.ops.aten, name) for name in names if hasattr(torch.ops.aten, name))
        for overload in packet.overloads()
        if hasattr(torch, packet.__name__) or hasattr(Tensor, packet.__name__)
    ]
    drawing = [o for o in overloads if operator_draws(o, (), {"dropout": 0.5, "dropout_p": 0.5, "p": 0.5})]

    told = {"dropout": 0.5, "training": True}
    unknown = {o._opname for o in drawing if not function_draws(o._opname, (), told)}
    assert len(drawing) > 60
    assert {name for name in unknown if not name.startswith("_")} == {"miopen_rnn"}  # of AMD's devices


@pytest.mark.parametrize("name", STILL)
def test_what_draws_nothing_is_not_counted(name: str) -> None:
    draws = Draws(0, [0], CPU)

    with draws.of(microbatch=0):
        expected = torch.rand(3)
    with draws.of(microbatch=0):
        STILL[name]()
        drawn = torch.rand(3)

    assert torch.equal(drawn, expected)


def test_microbatches_and_seeds_draw_differently_and_again_the_same() -> None:
    draws = Draws(0, [0], CPU)

    def drawn(seed: int, microbatch: int) -> tuple[float, ...]:
        draws.seed = seed
        with draws.of(microbatch):
            return tuple(torch.rand(4).tolist())

    places = [(seed, microbatch) for seed in range(3) for microbatch in range(50)]
    assert len({drawn(*place) for place in places}) == len(places)
    assert [drawn(*place) for place in places] == [drawn(*place) for place in places]


def test_the_program_s_own_generator_is_left_alone() -> None:
    before = torch.get_rng_state()

    with Draws(0, [0, 1], CPU).of(microbatch=0):
        F.dropout(X)

    assert torch.equal(torch.get_rng_state(), before)


def gpt_run(num_stages: int, **options: Any) -> TrainResult:
    torch.manual_seed(0)
    model = GPT.from_config(GPTConfig(num_layers=3, width=32, num_heads=2, dropout=0.2)).double()
    pipe = pd2bw_fx.split(model, cluster=num_stages, num_stages=num_stages, costs="analytic", **options)
    drawn = model.example_inputs(batch_size=UPDATES * M)
    batches = list(zip(*(tensor.split(M) for tensor in drawn), strict=True))
    return pipe.train_local(batches, optimizer=sgd, microbatches_per_update=M, threads_per_worker=1, seed=3)


@pytest.fixture(scope="module")
def whole() -> TrainResult:
    return gpt_run(1)


@pytest.mark.parametrize(("num_stages", "recompute"), [(2, True), (3, False)])
def test_dropout_is_the_same_on_any_number_of_stages(
    whole: TrainResult, num_stages: int, recompute: bool
) -> None:
    result = gpt_run(num_stages, recompute=recompute)

    assert result.losses == pytest.approx(whole.losses, rel=1e-12)
    for name, tensor in whole.tensors.items():
        assert_equal(result.tensors[name], tensor)


def assert_equal(one: Tensor, other: Tensor) -> None:
    torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-12)


def test_a_generator_of_the_models_own_is_refused_by_line() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.generator = torch.Generator().manual_seed(0)

        def forward(self, x: Tensor) -> Tensor:
            return (self.linear(x) * torch.rand(4, generator=self.generator)).mean()

    with pytest.raises(pd2bw_fx.TraceError, match=r"Generator of its own \(test_draws.py:\d+: return"):
        pd2bw_fx.split(Model(), torch.randn(2, 4), cluster=1, costs="analytic")


class Mixing(nn.Module):
    def __init__(self, draw: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.draw = nn.Linear(4, 4), nn.Linear(4, 4), draw

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.draw(self.first(x).exp())).square().mean()


def dirichlet_of_gammas(concentration: Tensor) -> Tensor:
    drawn = torch.distributions.Gamma(concentration, torch.ones(())).rsample()
    return drawn / drawn.sum(-1, keepdim=True)


@pytest.mark.parametrize("validates", [True, False])
def test_shares_are_drawn_by_gammas(validates: bool) -> None:
    def dirichlet(concentration: Tensor) -> Tensor:
        return torch.distributions.Dirichlet(concentration, validate_args=validates).rsample()

    x = torch.randn(3, 4)
    with pytest.raises(TraceError, match="it made of Gammas, since torch traces no gradient"):
        pd2bw_fx.split(Mixing(dirichlet), x, cluster=2, costs="analytic")
    assert pd2bw_fx.split(Mixing(dirichlet_of_gammas), x, cluster=2, costs="analytic").run(x)
