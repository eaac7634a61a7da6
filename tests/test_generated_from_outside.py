"""Modules that another than their holder calls: `self.encoder(x)`, and then `self.encoder.norm(x)`."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from pd2bw_fx import split


class Encoder(nn.Module):
    """Holds more than its forward calls."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.scale = nn.Parameter(torch.rand(8))

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).tanh()


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = Encoder()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(self.encoder(x))


class Holder(Block):
    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


class Listed(nn.ModuleList):
    def forward(self, x: Tensor) -> Tensor:
        return self[0](x)


class Model(nn.Module):
    """Classifies what `part` and then `inside` make of the input."""

    def __init__(self, part: nn.Module) -> None:
        super().__init__()
        self.part = part
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.inside(self.part(x))), y)

    def inside(self, x: Tensor) -> Tensor:
        raise NotImplementedError


class OfNothing(Model):
    def inside(self, x: Tensor) -> Tensor:
        return x


class OfAClass(Model):
    def inside(self, x: Tensor) -> Tensor:
        x = self.part.norm(x)
        for block in self.part.blocks:
            x = block(x).relu()
        return x * self.part.scale


class OfAClassInAClass(Model):
    def inside(self, x: Tensor) -> Tensor:
        x = self.part.encoder.norm(self.part.encoder(x))
        return self.part.encoder.blocks[1](x) * self.part.encoder.scale


class OfASequence(Model):
    def inside(self, x: Tensor) -> Tensor:
        return self.part[0].encoder.norm(self.part[2].encoder(x))


class OfAList(Model):
    def inside(self, x: Tensor) -> Tensor:
        x = self.part[2].encoder(x)
        for block in self.part:
            x = block.encoder.norm(x)
        return x


class Listing(nn.Module):
    """A list of parameters under two names, of which torch reaches the members by their numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Module()
        self.inner.scales = nn.ParameterList([nn.Parameter(torch.rand(8)) for _ in range(2)])
        self.again = self.inner
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(self.head((x * self.again.scales[0]).tanh() + self.inner.scales[1]), y)


def test_parameters_of_a_list_that_has_two_names() -> None:
    torch.manual_seed(0)
    pipe = split(Listing(), (torch.randn(4, 8), torch.randint(0, 4, (4,))), cluster=2, check="full")
    assert any("scales = nn.ParameterList(" in stage.source for stage in pipe.stages)


@pytest.mark.parametrize(
    ("model", "called"),
    [
        pytest.param(lambda: OfAClass(Encoder()), "self.part.norm(", id="a layer of a class"),
        pytest.param(lambda: OfAClassInAClass(Block()), "self.part.encoder.norm(", id="a class in a class"),
        pytest.param(
            lambda: OfAClassInAClass(Holder()), "self.part.encoder(", id="one that nobody else calls"
        ),
        pytest.param(
            lambda: OfASequence(nn.Sequential(Block(), nn.ReLU(), Block())), "norm", id="of a sequence"
        ),
        pytest.param(lambda: OfAList(Listed(Block() for _ in range(3))), '["encoder"].norm(', id="of a list"),
    ],
)
def test_what_a_class_holds_and_others_call(model, called):
    torch.manual_seed(0)
    example = torch.randn(4, 8), torch.randint(0, 4, (4,))
    pipe = split(model(), example, cluster=2, costs="analytic", check="full")
    assert any(called in stage.source for stage in pipe.stages)


class Filtered(nn.Module):
    """Calls a sequence that its holder has given it, and which is the holder's first."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: Tensor) -> Tensor:
        return x * self.net(x)


class Interaction(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8))
        self.filtered = Filtered(self.mlp)

    def forward(self, x: Tensor) -> Tensor:
        return self.filtered(x).tanh()


@pytest.mark.parametrize("tracer", ["export", "fx"])
def test_a_sequence_that_is_called_by_its_second_holder(tracer: str) -> None:
    torch.manual_seed(0)
    model = OfNothing(nn.Sequential(Interaction(), Interaction()))
    example = torch.randn(4, 8), torch.randint(0, 4, (4,))
    pipe = split(model, example, cluster=2, costs="analytic", check="full", tracer=tracer)
    assert any("return x * self.net(x)" in stage.source for stage in pipe.stages)


class InParts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh())

    def forward(self, x: Tensor) -> Tensor:
        half: Tensor = self.layers[:2](x)
        return half + self.layers[2:](half)


@pytest.mark.parametrize("example", [None, (torch.randn(4, 8),)], ids=["torch.fx", "torch.export"])
def test_parts_of_a_sequence(example: tuple[Tensor] | None) -> None:
    model, x = InParts(), torch.randn(4, 8)
    pipe = split(model, example, cluster=2, costs="analytic")

    first, second = (stage.module for stage in pipe.stages)
    given = first(x)
    torch.testing.assert_close(second(*given) if isinstance(given, tuple) else second(given), model(x))
