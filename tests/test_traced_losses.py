"""Which result of a model, or of a loss function behind it, is trained on."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pd2bw_fx
from pd2bw_fx.errors import InputError, TraceError
from pd2bw_fx.passes.normalise import normalise
from pd2bw_fx.passes.trace import trace
from pd2bw_fx.runtime.reference import train_reference


def _mlp() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))


@pytest.mark.parametrize(
    ("output", "names", "loss"),
    [
        (lambda h: h.sum(), ("loss",), "loss"),
        (lambda h: h, ("output",), None),
        (lambda h: (h.sum(), h), ("loss", "output_1"), "loss"),
        (lambda h: (h, h.sum()), ("loss", "output_0"), "loss"),
        (lambda h: (h, h.sum(), h.mean()), ("output_0", "output_1", "output_2"), None),
        (lambda h: (h.sum(), h.mean()), ("loss", "output_1"), "loss"),
        (lambda h: (h.sum().detach(), h), ("output_0", "output_1"), None),
        (lambda h: {"logits": h, "loss": h.sum()}, ("loss", "logits"), "loss"),
        (lambda h: {"a": [h, {"b": h}]}, ("a_0", "a_1_b"), None),
    ],
)
def test_the_loss_is_found_by_the_documented_rule(
    output: Any, names: tuple[str, ...], loss: str | None
) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> Any:
            return output(self.linear(x))

    traced = trace(Model(), (torch.randn(3, 2),))

    assert (traced.outputs, traced.loss) == (names, loss)
    assert traced.call is not None
    with torch.no_grad():  # which a run without gradients cannot tell by itself
        assert tuple(traced.call(traced.examples)) == names


class _Penalty(nn.Module):
    def forward(self, output: Tensor) -> Tensor:
        return output.square().mean()


@pytest.mark.parametrize("loss_fn", [_Penalty(), lambda output: output.square().mean()])
def test_a_loss_without_targets_takes_the_output_alone(loss_fn: Callable[..., Tensor]) -> None:
    model, x, batches = _mlp(), torch.randn(4, 4), [torch.randn(8, 4) for _ in range(3)]

    pipe = pd2bw_fx.split(model, (x,), cluster=2, costs="analytic", loss_fn=loss_fn)
    without_example = trace(model, loss_fn=loss_fn)

    assert pipe.run(x)["loss"] == _Penalty()(model(x))
    assert (without_example.inputs, without_example.loss) == (("input",), "loss")
    options: dict[str, Any] = {"optimizer": functools.partial(torch.optim.SGD, lr=0.1)}
    alone = train_reference(model, batches, microbatches_per_update=2, loss_fn=loss_fn, **options)
    with_zeros = train_reference(
        model,
        [(batch, torch.zeros(8, 3)) for batch in batches],
        microbatches_per_update=2,
        loss_fn=F.mse_loss,
        **options,
    )
    torch.testing.assert_close(alone.losses, with_zeros.losses)


def test_a_builtin_function_of_torchs_takes_as_many_tensors_as_its_operator() -> None:
    x, options = torch.randn(4, 4), {"cluster": 2, "costs": "analytic"}

    of_output = pd2bw_fx.split(_mlp(), x, loss_fn=torch.mean, **options)

    assert of_output.run(x)["loss"] == _mlp()(x).mean()
    with pytest.raises(InputError, match="loss_fn was given without example_targets"):
        pd2bw_fx.split(_mlp(), x, loss_fn=torch.dist, **options)


@pytest.mark.parametrize(
    ("pairs", "expected"),
    [
        (lambda h: h @ h.t(), True),
        (lambda h: torch.cdist(torch.cat([h, h]), h), True),
        (lambda h: h[:, :, None] * h[:, None], False),
    ],
)
def test_samples_that_are_compared_with_one_another_are_told_of(pairs: Any, *, expected: bool) -> None:
    class Pairs(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 3)

        def forward(self, x: Tensor) -> Tensor:
            return pairs(self.linear(x)).mean()

    notes = trace(Pairs(), (torch.randn(3, 2),)).report.notes

    told = [note for note in notes if note.startswith("samples of a batch are compared with one another")]
    assert [bool(re.search(r"microbatch: test_traced_losses\.py:\d+: .*pairs", note)) for note in told] == [
        True
    ] * expected


def test_a_second_loss_of_a_tuple_is_not_trained_in_silence() -> None:
    class Adversaries(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(2, 2)

        def forward(self, x: Tensor) -> tuple[Tensor, ...]:
            hidden = self.linear(x)
            return hidden.sum(), -hidden.sum(), hidden.sum().detach(), hidden

    (note,) = trace(Adversaries(), (torch.randn(3, 2),)).report.notes

    assert "what has a gradient too, output_1, is reported and not trained" in note


def test_a_loss_function_is_traced_behind_the_model_whose_names_stay_as_they_were() -> None:
    model, x, y = _mlp(), torch.randn(4, 4), torch.randint(0, 3, (4,))

    graph = normalise(trace(model, (x,), loss_fn=nn.CrossEntropyLoss(label_smoothing=0.1), targets=y))

    assert list(graph.inputs) == ["input", "targets"]
    assert list(graph.parameters) == list(model.state_dict())
    assert graph.fx is not None
    assert torch.equal(graph.fx(x, y)[0], F.cross_entropy(model(x), y, label_smoothing=0.1))


def test_a_loss_of_one_element_is_a_scalar_as_backward_takes_it() -> None:
    def added_up(output: Tensor, targets: Tensor) -> Tensor:
        loss = torch.zeros(1)
        for rows in output.split(2, dim=1):
            loss += F.cross_entropy(rows, targets)
        return loss

    traced = trace(_mlp(), (torch.randn(4, 4),), loss_fn=added_up, targets=torch.randint(0, 2, (4,)))

    graph = normalise(traced)
    assert graph.loss == "loss"
    (loss,) = (graph.operators[output.value] for output in graph.outputs if output.name == "loss")
    assert loss.outputs[0].shape == ()


@pytest.mark.parametrize("batch_size", [1, 4])
def test_so_is_the_models_own_and_a_value_for_each_sample_is_none(batch_size: int) -> None:
    class Returning(nn.Module):
        def __init__(self, result: Callable[[Tensor], Any]) -> None:
            super().__init__()
            self.mlp, self.result = _mlp(), result

        def forward(self, x: Tensor) -> Any:
            return self.result(self.mlp(x))

    for result, expected in (
        (lambda out: torch.zeros(1) + out.mean(), {"loss": ()}),
        (lambda out: {"out": out, "loss": out.mean().view(1)}, {"loss": (), "out": ("batch", 3)}),
        (lambda out: out.sum(1), {"output": ("batch",)}),
        (lambda out: {"loss": out.sum(1)}, {"output_loss": ("batch",)}),
    ):
        x = torch.randn(batch_size, 4)
        traced = trace(Returning(result), (x,))
        graph = normalise(traced)
        found = {o.name: graph.operators[o.value].outputs[0].shape for o in graph.outputs}
        assert found == expected
        assert traced.call is not None
        assert list(traced.call({"x": x})) == list(expected)


def test_a_loss_function_must_give_a_scalar_and_own_nothing_trainable() -> None:
    x, y = torch.randn(4, 4), torch.randint(0, 3, (4,))

    with pytest.raises(InputError, match=r"float32 tensor of 1 dimension, expected a floating-point scalar"):
        trace(_mlp(), (x,), loss_fn=nn.CrossEntropyLoss(reduction="none"), targets=y)
    told = r"returned a dict of 'loss', 'size', expected .*; return the entry that is the loss alone"
    with pytest.raises(InputError, match=told):
        trace(_mlp(), (x,), loss_fn=lambda out, y: {"loss": out.mean(), "size": out.std()}, targets=y)
    with pytest.raises(InputError, match=r"returned a tuple of 2, expected .*; return the entry that is the"):
        trace(_mlp(), (x,), loss_fn=lambda out, y: (out.mean(), {"size": out.std()}), targets=y)

    class Learned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.temperature = nn.Parameter(torch.ones(()))

        def forward(self, output: Tensor, targets: Tensor) -> Tensor:
            return F.cross_entropy(output / self.temperature, targets)

    with pytest.raises(InputError, match="trainable parameter 'temperature'"):
        trace(_mlp(), (x,), loss_fn=Learned(), targets=y)


LOGGED: list[Any] = []
NUMBERS: dict[str, Callable[[Tensor], Any]] = {
    "item": lambda loss: loss.item(),
    "detached": lambda loss: loss.detach().cpu().item(),
    "float": lambda loss: float(loss),
    "text": lambda loss: f"{loss:.3f}",
    "numpy": lambda loss: loss.detach().cpu().numpy(),
}


@pytest.mark.parametrize("kind", NUMBERS)
def test_a_loss_function_that_makes_numbers_to_log_is_told_in_one_line(kind: str) -> None:
    def logging(output: Tensor, targets: Tensor) -> Tensor:
        loss = F.mse_loss(output, targets)
        LOGGED.append(NUMBERS[kind](loss))
        return loss

    x, options = torch.randn(4, 4), {"loss_fn": logging, "targets": torch.randn(4, 3)}
    line = r"test_traced_losses.py:\d+: .*: lambda loss: "

    if kind in ("item", "detached"):
        (note,) = trace(_mlp(), (x,), **options).report.notes
        assert re.match(rf"loss_fn makes a number .* while it is traced, and never in training: {line}", note)
        return
    with pytest.raises(TraceError, match=rf"^loss_fn makes a Python number of .* at {line}.*untraced"):
        trace(_mlp(), (x,), **options)


def test_a_number_that_the_loss_is_computed_with_needs_no_note() -> None:
    def scaled(output: Tensor, targets: Tensor) -> Tensor:
        size = targets.sum().item()
        return F.mse_loss(output, targets) / (size * size + 1)

    assert trace(_mlp(), (torch.randn(4, 4),), loss_fn=scaled, targets=torch.randn(4, 3)).report.notes == ()
    with pytest.raises(InputError, match=r"returned a Python number, .* the tensor itself, without item\(\)"):
        trace(_mlp(), (torch.randn(4, 4),), loss_fn=lambda output: output.mean().item())


class Noisy(nn.Module):
    """Draws in evaluation too, as an autoencoder's code is drawn; dropout does not then."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.drop = _mlp(), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.drop(self.inner(x))
        return hidden + 0.3 * torch.randn_like(hidden)


@pytest.mark.parametrize("kind", [_mlp, Noisy])
@pytest.mark.parametrize("reduction", ["sum", "mean"])
def test_a_loss_that_is_a_sum_over_the_batch_is_told_of(
    kind: Callable[[], nn.Module], reduction: str
) -> None:
    x, y = torch.randn(6, 4), torch.randint(0, 3, (6,))

    pipe = pd2bw_fx.split(
        kind(),
        x,
        loss_fn=nn.CrossEntropyLoss(reduction=reduction),
        example_targets=y,
        cluster=2,
        costs="analytic",
    )

    assert pipe.trace_report is not None
    told = [note for note in pipe.trace_report.notes if note.startswith("the loss doubles with the batch")]
    assert len(told) == (reduction == "sum")
    assert all("of 4 of them, a loss and gradients 4 times smaller" in note for note in told)


def test_a_sum_that_is_divided_by_a_number_of_the_batch_needs_no_note() -> None:
    class Divided(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = _mlp()

        def forward(self, x: Tensor, num_items: Tensor) -> Tensor:
            return self.inner(x).square().sum() / num_items

    pipe = pd2bw_fx.split(Divided(), (torch.randn(4, 4), torch.tensor(4.0)), cluster=2, costs="analytic")

    assert pipe.trace_report is not None
    assert not any("doubles" in note for note in pipe.trace_report.notes)
