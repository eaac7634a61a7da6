"""Values are called what the author's statements call them, over however many lines these go."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor, nn

import pd2bw_fx
from pd2bw_fx import split


def _statements(model: nn.Module, x: Tensor, *, tracer: str = "auto") -> dict[str, int]:
    """Of the only stage: what each line says, and the line of this file that its comment names."""
    pipe = split(model, (x,), cluster=2, num_stages=1, costs="analytic", tracer=tracer)
    line = re.compile(r"^ {8,12}(\S.*?)  # test_generated_names\.py:(\d+)", re.MULTILINE)
    found = line.findall(pipe.stages[0].source)
    return {text: int(number) for text, number in found}


# fmt: off
class _Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        query = (
            self.q(x)
            .unflatten(-1, (2, 4))
            .transpose(1, 2)
        )
        key = self.k(
            x
        ).unflatten(
            -1, (2, 4)
        ).transpose(1, 2)
        value: Tensor = (
            self.v(x).unflatten(-1, (2, 4)).transpose(1, 2)
        )
        weights = torch.softmax(
            query @ key.mT
            / 2,
            dim=-1,
        )
        mixed = (
            (weights @ value).flatten(1)
        )
        return (
            (mixed + mixed).square()
            .mean()
        )
# fmt: on


def test_a_statement_of_several_lines_is_named_by_what_it_assigns() -> None:
    first = _Attending.forward.__code__.co_firstlineno
    found = _statements(_Attending(), torch.randn(4, 3, 8))

    assert found == {
        "query = self.q(x).unflatten(-1, (2, 4)).transpose(1, 2)": first + 1,
        "key = self.k(x).unflatten(-1, (2, 4)).transpose(1, 2)": first + 6,
        "value = self.v(x).unflatten(-1, (2, 4)).transpose(1, 2)": first + 11,
        "weights = F.softmax(query @ key.mT / 2, dim=-1)": first + 14,
        "mixed = (weights @ value).flatten(1)": first + 19,
        "return (mixed + mixed).square().mean()": first + 22,
    }


class _Adding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.side = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        skip = x * 0.5
        for layer in self.layers:
            x = layer(x).tanh()
            skip += self.side(x) * 0.1
        skip -= skip.mean()
        return skip.square().mean()


def test_what_is_added_to_a_name_keeps_it() -> None:
    found = _statements(_Adding(), torch.randn(4, 8))

    assert "skip = skip + self.side(x) * 0.1" in found
    assert "skip = skip - skip.mean()" in found


class _Helped(nn.Module):
    """Functions on a line give the parts of what they compute changed, or in another order."""

    def __init__(self) -> None:
        super().__init__()
        self.recurrent, self.head = nn.GRU(8, 8, batch_first=True), nn.Linear(8, 16)

    def encoded(self, x: Tensor) -> tuple[Tensor, Tensor]:
        output, hidden = self.recurrent(x)
        return hidden[-1], output

    def spread(self, x: Tensor) -> tuple[Tensor, Tensor]:
        mean, logarithm = self.head(x).chunk(2, dim=-1)
        return mean, logarithm.exp()

    def forward(self, x: Tensor) -> Tensor:
        last, sequence = self.encoded(x)
        mean, deviation = self.spread(last)
        left, right = self.head(mean).chunk(2, dim=-1)
        return (sequence.sum(1) + mean * deviation + left * right).mean()


def test_names_of_what_a_function_gives_are_not_those_of_what_it_takes_apart() -> None:
    found = _statements(_Helped(), torch.randn(4, 3, 8))

    assert "output, hidden = self.recurrent(x)" in found
    assert "last = hidden[-1]" in found
    assert "mean, logarithm = self.head(last).chunk(2, dim=-1)" in found
    assert "left, right = self.head(mean).chunk(2, dim=-1)" in found


def _in_heads(x: Tensor) -> Tensor:
    return x.unflatten(-1, (2, 4)).transpose(1, 2)


class _Parted(nn.Module):
    """A forward in methods and functions of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.last = (nn.Linear(8, 8) for _ in range(3))

    def both(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.q(x), self.k(x)

    def attended(self, query: Tensor, key: Tensor) -> Tensor:
        scores = query @ key.mT
        weights = scores.softmax(-1)
        return weights @ key

    def steps(self, x: Tensor) -> Tensor:
        query, key = self.both(x)
        query = _in_heads(query)
        context = self.attended(query, _in_heads(key))
        return self.last(context.transpose(1, 2).flatten(2))

    def forward(self, x: Tensor) -> Tensor:
        result = self.steps(x)
        return result.square().mean()


@pytest.mark.parametrize("tracer", ["export", "fx"])
def test_what_functions_of_the_forward_make_is_called_as_they_call_it(tracer: str) -> None:
    first = _Parted.both.__code__.co_firstlineno
    found = _statements(_Parted(), torch.randn(4, 3, 8), tracer=tracer)

    targets = [text if "," in text.split()[0] else text.split()[0] for text in found]
    assert list(zip(targets, (number - first for number in found.values()), strict=True)) == [
        ("query, key = self.q(x), self.k(x)", 1),
        ("query", -10),
        ("turned", -10),  # what the call of another is given has no name
        ("scores", 4),
        ("weights", 5),
        ("context", 6),
        ("result", 12),
        ("return", 16),
    ]


def _masked(x: Tensor, reset: Tensor) -> Tensor:
    for _ in range(x.dim() - 1):
        reset = reset.unsqueeze(-1)
    return torch.where(reset, torch.zeros_like(x), x)


class _Stepping(nn.Module):
    """A world model's cell, before which one line of the forward makes three values of the inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.Bilinear(4, 8, 8), nn.Linear(10, 4)

    def forward(self, stoch: Tensor, deter: Tensor, action: Tensor, reset: Tensor) -> Tensor:
        return self.step(stoch, deter, action, reset).square().mean()

    def step(self, stoch: Tensor, deter: Tensor, action: Tensor, reset: Tensor) -> Tensor:
        stoch = _masked(stoch, reset)
        deter = _masked(deter, reset)
        action = _masked(action, reset)
        deter = self.cell(stoch, deter)
        return self.head(torch.cat([deter, action], -1))  # type: ignore[no-any-return]


def test_what_a_function_of_ours_makes_is_called_by_its_own_names() -> None:
    example = (torch.randn(3, 4), torch.randn(3, 8), torch.randn(3, 2), torch.rand(3) < 0.5)
    pipe = split(_Stepping(), example, cluster=1, costs="analytic")

    source = pipe.stages[0].source
    assert "forward(self, stoch: Tensor, deter: Tensor, action: Tensor, reset: Tensor) -> Tensor:" in source
    assert "stoch, deter, action = make_action(" in source
    assert "deter = self.cell(stoch, deter)" in source


class _Filling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.step = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        out = torch.zeros(x.shape[0], 2, 8)
        for t in range(2):
            x = torch.tanh(self.step(x))
            out[:, t] = x
        heads = [x, x]
        heads[1] = self.step(x)
        out[out > 0.5] = 0.0
        return out.square().mean() + heads[1].mean()


def test_what_is_filled_in_place_keeps_its_name() -> None:
    pipe = pd2bw_fx.split(_Filling(), torch.randn(4, 8), cluster=1, costs="analytic", check="full")
    source = pipe.stages[0].source

    assert "out[:, t] = x" in source
    assert "out = out.masked_fill(out > 0.5, 0.0)" in source
    assert "heads" not in source


def test_what_is_put_into_another_needs_no_copy() -> None:
    class Turned(_Filling):
        def forward(self, x: Tensor) -> Tensor:
            out = torch.zeros(x.shape[0], 2, 8)
            out[:, 0] = self.step(x).t().contiguous().t()
            return out.square().mean()

    pipe = pd2bw_fx.split(Turned(), torch.randn(4, 8), cluster=1, costs="analytic", check="full")
    assert "clone" not in pipe.stages[0].source


class _Augmenting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        y[:, 0] += 1
        y[:, 1:3] *= x[:, :2]
        return y.square().mean()


def test_what_is_added_to_a_part_is_put_in_its_place_once() -> None:
    pipe = pd2bw_fx.split(_Augmenting(), torch.randn(4, 8), cluster=1, costs="analytic", check="full")
    source = pipe.stages[0].source

    assert source.count(".select_scatter(") == 1
    assert source.count(".slice_scatter(") == 1


class _Tagging(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.recurrent, self.cell = nn.LSTM(4, 4, batch_first=True), nn.GRUCell(4, 4)
        self.embed = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        out, (h_n, c_n) = self.recurrent(x)
        h = h_n[-1] + c_n[-1]
        states = []
        for t in range(6):
            h = self.cell(self.embed(x[:, t]), h)
            states.append(h)
        return (torch.stack(states, 1) + out).mean()


def test_states_of_a_recurrent_layer_and_of_a_cell_have_the_authors_names() -> None:
    found = _statements(_Tagging(), torch.randn(2, 6, 4))

    assert {"out, (h_n, c_n) = self.recurrent(x)", "h = h_n[-1] + c_n[-1]"} <= found.keys()
    assert "h = self.cell(self.embed(x[:, t]), h)" in found


class _Subtracting(nn.Module):
    """Inner operations are of the outermost one's kind, and too many for one line."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        h = h.sigmoid().square() - (h.square().square() - (-(self.b(h).tanh().square() - self.a(h.square()))))
        return h.mean()


def test_an_inner_operation_of_the_outermost_ones_kind_has_not_the_statements_name() -> None:
    found = _statements(_Subtracting(), torch.randn(2, 4))

    assert [text for text in found if text.startswith("h = ")] == [
        "h = self.a(x)",
        "h = square - difference",
    ]


class _Residual(nn.Module):
    """What one way of a statement assigns is a part of what the other way assigns."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.fused = nn.Conv1d(2, 2, 3, padding=1), False

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv(x) if self.fused else x + self.conv(x)
        return x.mean()


def test_what_the_other_way_of_a_statement_would_assign_has_not_the_statements_name() -> None:
    assert list(_statements(_Residual(), torch.randn(2, 2, 8))) == ["x = x + self.conv(x)", "return x.mean()"]


def _distance(found: Tensor, wanted: Tensor) -> Tensor:
    error = found - wanted
    return error.square().mean()


def _with_penalty(output: Tensor, target: Tensor) -> Tensor:
    distance = _distance(output, target)
    penalty = torch.exp(0.5 * output).mean()
    return distance + 0.1 * penalty


def test_a_loss_outside_the_model_has_its_authors_names_and_lines() -> None:
    first = _distance.__code__.co_firstlineno
    example = torch.randn(4, 8)
    pipe = split(
        nn.Linear(8, 8), example, loss_fn=_with_penalty, example_targets=example, cluster=1, costs="analytic"
    )
    place = "# test_generated_names.py"
    assert (
        f"""
        error = projected - targets  {place}:{first + 1}
        distance = error.square().mean()  {place}:{first + 2}
        penalty = torch.exp(0.5 * projected).mean()  {place}:{first + 7}
        loss = distance + 0.1 * penalty  {place}:{first + 8}
"""
        in pipe.stages[0].source
    )


def test_a_cast_is_not_called_after_its_method() -> None:
    class Adding(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.f, self.g = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor, places: Tensor) -> Tensor:
            f, g = self.f, self.g
            out = torch.zeros(6, 8)
            out.index_add_(0, places, (f(x) * torch.sigmoid(g(x)) + torch.tanh(g(x * 2) + f(x))).type_as(out))
            return out

    pipe = split(Adding(), (torch.randn(4, 8), torch.tensor([0, 2, 2, 5])), cluster=1, costs="analytic")

    assert "        cast = (self.f(x) * " in pipe.stages[0].source


class _Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.start = torch.nn.utils.weight_norm(nn.Linear(8, 8))
        self.end = nn.Linear(8, 8)

    def forward(self, audio: Tensor) -> Tensor:
        audio = self.start(audio)
        end: Tensor = self.end(audio.tanh())
        return end.square().mean()


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
def test_what_a_hook_computes_is_not_called_what_the_call_returns() -> None:
    pipe = split(_Normed(), torch.randn(4, 8), cluster=1, costs="analytic")
    lines = [line.partition("  # ")[0].strip() for line in pipe.stages[0].source.splitlines()]

    assert "audio = self.start(audio)" in lines
    assert (
        "F.linear(input_, torch._weight_norm(self.weight_v, self.weight_g), self.bias)"
        in pipe.stages[0].source
    )
