"""Functions of the author's that a forward calls more than once are functions of the stage too."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from pd2bw_fx import Constraints, split


def rotate_half(x: Tensor) -> Tensor:
    x1, x2 = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return torch.cat((-x2, x1), dim=-1)


def rotated(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    q_embed = (q * cos) + (rotate_half(q) * sin)
    k_embed = (k * cos) + (rotate_half(k) * sin)
    return q_embed, k_embed


def scaled(x: Tensor, factor: float) -> Tensor:
    y = x.tanh() * factor
    return y.cos() + x


def noisy(x: Tensor) -> Tensor:
    y = x * torch.rand_like(x)
    return y.cos().tanh()


class _Attention(nn.Module):
    """Queries of more heads than the keys have."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(8, 16), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q = self.q(x).view(batch, length, 4, 4).transpose(1, 2)
        k = self.k(x).view(batch, length, 2, 4).transpose(1, 2)
        angles = torch.arange(length, device=x.device)[:, None] * torch.ones(4, device=x.device)
        q, k = rotated(q, k, angles.cos(), angles.sin())
        return (q.mean(1) @ k.mean(1).mT).mean()


def _source(model: nn.Module, *inputs: Tensor) -> str:
    pipe = split(model, inputs, cluster=1, costs="analytic")
    assert pipe.verify().exact
    return pipe.stages[0].source


def test_a_function_that_is_called_twice_is_written_once_and_called_twice() -> None:
    source = _source(_Attention(), torch.randn(3, 5, 8))

    assert source.count("def rotate_half(x: Tensor) -> Tensor:") == 1
    assert "    return torch.cat([-x2, x1], dim=-1)" in source
    assert "    q_embed = q * cos + rotate_half(q) * sin" in source
    assert "    k_embed = k * cos + rotate_half(k) * sin" in source


def test_a_long_function_is_one_of_the_stage_too_though_it_is_called_once() -> None:
    source = _source(_Attention(), torch.randn(3, 5, 8))

    assert "def rotated(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:" in source
    assert "    return q_embed, k_embed" in source
    assert "        q, k = rotated(q, k, angles.cos(), angles.sin())" in source


def turned(x: Tensor, table: Tensor) -> Tensor:
    cos, sin = table.chunk(2, dim=0)
    return x * cos + rotate_half(x) * sin


class _Tabled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("table", torch.rand(10, 8))

    def forward(self, x: Tensor) -> Tensor:
        q = turned(self.q(x), self.table)
        k = turned(self.k(x), self.table)
        return (q * k).mean()


def test_a_function_may_be_given_a_buffer() -> None:
    source = _source(_Tabled(), torch.randn(3, 5, 8))

    assert "def turned(x: Tensor, table: Tensor) -> Tensor:" in source
    assert "        q = turned(self.q(x), self.table)" in source
    assert "        k = turned(self.k(x), self.table)" in source


def swapped(x: Tensor, number: float) -> tuple[Tensor, Tensor]:
    more = x.tanh().cos() * number + x.sin()
    less = x.tanh().sin() * number - x.cos()
    return less, more


class _Swapped(nn.Module):
    def __init__(self, *numbers: float) -> None:
        super().__init__()
        self.first, self.second, self.numbers = nn.Linear(8, 8), nn.Linear(8, 8), numbers

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        a, b = swapped(x, self.numbers[0])
        x = self.second(a / b.exp())
        for number in self.numbers[1:]:
            c, d = swapped(x, number)
            x = d - c
        return x.mean()


def test_results_of_a_function_are_in_the_order_in_which_the_author_returns_them() -> None:
    source = _source(_Swapped(0.5), torch.randn(4, 8))

    assert "    return less, more\n" in source
    assert "        a, b = swapped(x)" in source


def test_a_long_function_whose_calls_do_different_things_is_written_where_it_stands() -> None:
    assert "def swapped" not in _source(_Swapped(0.5, 1.5), torch.randn(4, 8))
    assert "def swapped" in _source(_Swapped(0.5, 0.5), torch.randn(4, 8))


def test_a_function_that_is_cut_is_written_where_it_stands() -> None:
    x, within = torch.randn(4, 8), Constraints(stage_of={"add": 0, "sub": 1})
    pipe = split(_Swapped(0.5), x, cluster=2, costs="analytic", constraints=within, check="full")

    assert pipe.verify().exact
    assert all("def swapped" not in stage.source for stage in pipe.stages)


def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    return x * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)


class _Modulated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.first, self.second, self.modulation = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 32)

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        shift, scale, other_shift, other_scale = self.modulation(c).chunk(4, dim=1)
        x = x + self.first(modulate(self.norm(x), shift, scale))
        x = x + self.second(modulate(self.norm(x), other_shift, other_scale))
        return x.mean()


def test_arguments_stand_in_the_order_of_the_authors_parameters() -> None:
    source = _source(_Modulated(), torch.randn(3, 5, 8), torch.randn(3, 8))

    assert "def modulate(x: Tensor, shift: Tensor, scale: Tensor) -> Tensor:" in source
    assert "        x = x + self.first(modulate(self.norm(x), shift, scale))" in source
    assert "        x = x + self.second(modulate(self.norm(x), other_shift, other_scale))" in source


class _Modulating(nn.Module):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.norm, self.act, self.modulation = nn.LayerNorm(8), kind(), nn.Linear(8, 16)

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        shift, scale = self.modulation(c).chunk(2, dim=1)
        x = modulate(self.norm(x), shift, scale)
        return self.act(x)  # type: ignore[no-any-return]


class _OfUnlike(nn.Module):
    def __init__(self, *kinds: type[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Modulating(kind) for kind in kinds)

    def forward(self, x: Tensor, c: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x, c)
        return x.mean()


def test_a_function_that_unlike_modules_call_once_each_is_one_of_the_stage() -> None:
    inputs = torch.randn(3, 5, 8), torch.randn(3, 8)

    source = _source(_OfUnlike(nn.Tanh, nn.Sigmoid), *inputs)
    assert source.count("        x = modulate(self.norm(x), shift, scale)") == 2
    assert "modulate" not in _source(_OfUnlike(nn.Tanh, nn.Tanh), *inputs)


class _Turning(nn.Module):
    """What it turns has no name of its own: both lines that make it assign two values."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k = torch.tanh(self.q(x)), torch.tanh(self.k(x))
        q, k = rotated_by(q, cos, sin), rotated_by(k, cos, sin)
        return (q * k).mean()


def rotated_by(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    x1, x2 = x[..., :4], x[..., 4:]
    return torch.cat([x1 * cos - x2 * sin, x1 * sin + x2 * cos], dim=-1)


def test_an_argument_without_a_name_is_the_one_that_is_left() -> None:
    source = _source(_Turning(), torch.randn(3, 8), torch.randn(3, 4), torch.randn(3, 4))

    assert "def rotated_by(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:" in source


def norm_of(vectors: Tensor) -> Tensor:
    squares = vectors.pow(2).sum(-1, keepdim=True)
    norm = squares.pow(0.5)
    return norm


class _Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.images, self.words = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        embeddings_of_the_pictures, words = self.images(x), self.words(x)
        embeddings_of_the_pictures = embeddings_of_the_pictures / norm_of(embeddings_of_the_pictures)
        words = words / norm_of(words)
        return (embeddings_of_the_pictures * words).mean()


def test_a_call_that_is_part_of_a_statement_does_not_take_its_name() -> None:
    source = _source(_Normed(), torch.randn(3, 8))

    assert "        norm = norm_of(embeddings_of_the_pictures)" in source
    assert "        embeddings_of_the_pictures = embeddings_of_the_pictures / norm" in source
    assert "        words = words / norm_of(words)" in source


class _Calling(nn.Module):
    """Calls the function twice, with these numbers if it takes any; in one line if there are none."""

    def __init__(self, called: object, *numbers: float) -> None:
        super().__init__()
        self.called, self.numbers = called, numbers
        self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        q, k = self.a(x), self.b(x)
        if self.numbers:
            q = self.called(q, self.numbers[0])
            k = self.called(k, self.numbers[1])
        else:
            q, k = self.called(q), self.called(k)
        return (q * k).mean()


def test_both_calls_may_stand_in_one_line() -> None:
    source = _source(_Calling(rotate_half), torch.randn(4, 8))

    assert "q, k = rotate_half(q), rotate_half(k)" in source
    assert source.count("torch.cat") == 1


def test_a_function_holds_the_numbers_that_all_of_its_calls_give_it() -> None:
    source = _source(_Calling(scaled, 2.5, 2.5), torch.randn(4, 8))

    assert "def scaled(x: Tensor) -> Tensor:\n    y = x.tanh() * 2.5" in source
    assert "q = scaled(q)" in source
    assert "k = scaled(k)" in source


def test_calls_that_do_different_things_are_written_where_they_stand() -> None:
    assert "def scaled" not in _source(_Calling(scaled, 2.5, 0.5), torch.randn(4, 8))
    assert "def noisy" not in _source(_Calling(noisy), torch.randn(4, 8))


def dropped(x: Tensor, training: float) -> Tensor:
    y = torch.nn.functional.dropout(x, 0.0, training=bool(training))
    return y.cos().tanh()


def test_a_function_that_does_something_else_in_evaluation_is_written_where_it_stands() -> None:
    assert "def dropped" not in _source(_Calling(dropped, 1.0, 1.0), torch.randn(4, 8))


def test_a_stage_with_such_a_function_compiles_as_one_graph() -> None:
    pipe = split(_Attention(), torch.randn(3, 5, 8), cluster=1, costs="analytic")
    stage, x = pipe.stages[0].module.eval(), torch.randn(3, 5, 8)

    compiled = torch.compile(stage, backend="eager", fullgraph=True)

    assert torch.equal(compiled(x), stage(x))


def scanned(u: Tensor, D: Tensor, *, z: Tensor) -> Tensor:
    mixed = u.tanh() * z + u
    return mixed * D + D * z


def scanned_long(u: Tensor, D: Tensor, *, z: Tensor) -> Tensor:
    mixed = u.tanh() * z.cos() + u
    return mixed * D + D.sin() * mixed.sum(-1, keepdim=True) * z


class _Scanning(nn.Module):
    def __init__(self, scan: Callable[..., Tensor]) -> None:
        super().__init__()
        self.layer, self.skip, self.scan = nn.Linear(8, 8), nn.Parameter(torch.ones(8)), scan

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        if self.scan is scanned:
            out = scanned(y.transpose(1, 2), self.skip.double(), z=x.transpose(1, 2))
        else:
            out = scanned_long(y.transpose(1, 2), self.skip.double(), z=x.transpose(1, 2))
        return (out * out.tanh()).mean()


def test_what_a_function_is_given_without_a_name_is_called_as_its_parameter() -> None:
    source = _source(_Scanning(scanned), torch.randn(3, 8, 8))

    assert "        u = y.transpose(1, 2)" in source
    assert "        D = self.skip.double()" in source
    assert "        z = x.transpose(1, 2)" in source


def test_arguments_without_a_name_stand_in_the_order_of_the_parameters_too() -> None:
    source = _source(_Scanning(scanned_long), torch.randn(3, 8, 8))

    assert "def scanned_long(u: Tensor, D: Tensor, z: Tensor) -> Tensor:" in source
    assert "        out = scanned_long(y.transpose(1, 2), self.skip.double(), x.transpose(1, 2))" in source


def gated(u: Tensor, k: Tensor, D: Tensor) -> Tensor:
    y = torch.tanh(u * k).cos()
    y = torch.sigmoid(y + D).sin()
    return y * u - k


class _Gate(nn.Module):
    """Both are called with values that their callers name, or do not name at all."""

    def forward(self, x: Tensor, k: Tensor, bias: Tensor) -> Tensor:
        h = x
        x = x.relu()
        mixed = gated(x, h, bias)
        return gated(scaled(mixed, 0.5), scaled(k, 0.5), bias)


class _Gates(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.gate = nn.Linear(8, 24), _Gate()

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.first(x).chunk(3, -1)
        result: Tensor = self.gate(query.exp(), key, value)
        return result.mean()


def test_parameters_have_the_authors_names_whatever_a_forward_is_given_and_functions_make() -> None:
    source = _source(_Gates(), torch.randn(3, 8))

    assert "def gated(u: Tensor, k: Tensor, D: Tensor) -> Tensor:" in source
    assert "        mixed = gated(x, h, bias)" in source
    assert "        return gated(scaled(mixed), scaled(k), bias)" in source
