"""Values that cross between stages, or outlive their names, have names that tell them apart."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor, nn

from pd2bw_fx import Constraints, split


class _Skipping(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoders = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.decoders = nn.ModuleList(nn.Linear(16, 8) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for encoder in self.encoders[:-1]:
            x = encoder(x)
            skips.append(x)
            x = torch.tanh(x)
        x = self.encoders[-1](x)
        for decoder in self.decoders:
            x = decoder(torch.cat([x, skips.pop()], dim=1))
        return x.square().mean()


def test_a_value_that_is_needed_longer_than_its_name_is_called_after_the_list_that_it_is_put_into() -> None:
    halves = Constraints(stage_of={"encoders.2": 0, "decoders.0": 1})
    pipe = split(_Skipping(), torch.randn(4, 8), cluster=2, costs="analytic", constraints=halves)
    texts = [re.sub(r"  #.*", "", program.source) for program in pipe.stages]

    assert """
        skip = self.encoders[0](x)
        x = torch.tanh(skip)
        skip_2 = self.encoders[1](x)
        x = torch.tanh(skip_2)
        x = self.encoders[2](x)
        joined = torch.cat([x, skip_2], dim=1)
        return skip, joined
""" in texts[0]
    assert "x = self.decoders[1](torch.cat([x, skip], dim=1))" in texts[1]


def test_values_of_one_name_that_cross_are_told_apart_by_the_modules_that_make_them() -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            hidden = torch.tanh(self.first(x))
            return self.second(hidden)  # type: ignore[no-any-return]

    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder, self.decoder = Half(), Half()

        def forward(self, x: Tensor) -> Tensor:
            return (self.encoder(x) + self.decoder(x)).square().mean()

    firsts = {"encoder.first": 0, "decoder.first": 0, "encoder.second": 1, "decoder.second": 1}
    pipe = split(
        Both(), torch.randn(4, 8), cluster=2, costs="analytic", constraints=Constraints(stage_of=firsts)
    )
    assert "return encoder_hidden, decoder_hidden" in pipe.stages[0].source
    assert "forward(self, encoder_hidden: Tensor, decoder_hidden: Tensor) -> Tensor:" in pipe.stages[1].source


def test_a_cut_within_a_module_gives_values_the_names_that_they_have_there() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.gate = nn.LayerNorm(8), nn.Linear(8, 8)
            self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

        def forward(self, hidden: Tensor) -> Tensor:
            residual = hidden
            hidden = self.norm(hidden)
            gate = self.gate(hidden)
            hidden = torch.tanh(self.up(hidden))
            hidden = self.down(hidden)
            hidden = residual + hidden * gate
            return hidden

    class Blocks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(3))

        def forward(self, x: Tensor) -> Tensor:
            hidden = torch.tanh(x)
            for block in self.blocks:
                hidden = block(hidden)
            return hidden.square().mean()

    within = Constraints(stage_of={"blocks.1.gate": 0, "blocks.1.up": 0, "blocks.1.down": 1})
    pipe = split(Blocks(), torch.randn(4, 8), cluster=2, costs="analytic", constraints=within)
    first, second = [re.sub(r"  #.*", "", program.source) for program in pipe.stages]
    assert (
        """
        residual = self.blocks[0](hidden)
        gate, hidden = self.blocks[1](residual)
        return residual, gate, hidden
"""
        in first
    )
    assert (
        """
    def forward(self, hidden: Tensor, gate: Tensor, residual: Tensor) -> Tensor:
        hidden = self.blocks["1"](residual, hidden, gate)
        hidden = self.blocks["2"](hidden)
"""
        in second
    )


class _Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.act = nn.LayerNorm(8), nn.Tanh()

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        return self.act(x)  # type: ignore[no-any-return]


class _NormedShortcut(_Normed):
    def forward(self, x: Tensor) -> Tensor:
        shortcut = self.norm(x)
        return self.act(shortcut)  # type: ignore[no-any-return]


class _Around(nn.Module):
    """Reads the shortcut as it is, or through `project`."""

    def __init__(self, inner: nn.Module, project: nn.Module) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(8, 8), inner, nn.Linear(8, 8)
        self.project = project

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        shortcut = x
        x = self.inner(x)
        x = self.last(x)
        x = x + self.project(shortcut)
        return x.square().mean()


def test_a_second_name_does_not_hide_a_value_of_that_name_from_within_a_module() -> None:
    model, x = _Around(_NormedShortcut(), nn.Identity()).double(), torch.randn(4, 8, dtype=torch.float64)
    within = Constraints(stage_of={"inner.norm": 0, "inner.act": 1})
    pipe = split(model, x, cluster=2, costs="analytic", constraints=within, check="full")
    assert torch.equal(pipe.run(x)["loss"], model(x))


def test_a_value_from_within_a_module_has_no_second_name_of_the_caller() -> None:
    model, x = _Around(_Normed(), _Normed()).double(), torch.randn(4, 8, dtype=torch.float64)
    within = Constraints(stage_of={"inner.norm": 0, "project.norm": 0, "inner.act": 1, "project.act": 1})
    pipe = split(model, x, cluster=2, costs="analytic", constraints=within, check="full")
    assert "shortcut" not in pipe.stages[1].source
    assert torch.equal(pipe.run(x)["loss"], model(x))


class _Crossing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.up = nn.ModuleList(nn.Linear(16, 8) for _ in range(3))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        skips = []
        for layer in self.down:
            x = torch.relu(layer(x))
            skips.append(x)
        for layer in self.up:
            x = layer(torch.cat([x, skips.pop()], dim=-1))
        losses = {"far": x.square().mean(), "near": x.abs().mean()}
        losses["loss"] = losses["far"] + losses["near"]
        return losses


def test_what_crosses_has_one_name_in_all_stages_and_results_are_called_what_they_are() -> None:
    operators = [f"{name}.{at}" for name in ("down", "up") for at in range(3)]
    constraints = Constraints(stage_of={name: at // 3 for at, name in enumerate(operators)})
    pipe = split(_Crossing(), (torch.randn(4, 8),), cluster=2, costs="analytic", constraints=constraints)

    first, last = pipe.programs
    given = {port.value: port.name for port in first.outputs}
    taken = {port.value: port.name for port in last.inputs}
    assert given == taken
    assert len({*given.values()}) == 3
    assert f"return {', '.join(port.name for port in first.outputs)}" in first.source
    assert "return far, near, loss" in last.source
    assert "loss = far + near" in last.source


def test_the_head_of_a_stage_calls_what_passes_it_by_as_the_others_do() -> None:
    operators = [f"{name}.{at}" for name in ("down", "up") for at in range(3)]
    constraints = Constraints(stage_of={name: at // 2 for at, name in enumerate(operators)})
    pipe = split(_Crossing(), torch.randn(4, 8), cluster=3, costs="analytic", constraints=constraints)

    first, middle, _ = pipe.programs
    head = " ".join(middle.source.partition('"""\n\n')[0].split())
    passing = re.findall(r"(\w+) \(passing by\)", head)
    assert passing
    assert set(passing) <= {port.name for port in first.outputs}


class _Beginning(nn.Module):
    """What it begins with is x for the first layer, and x0 for all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        x = x0 = torch.tanh(self.first(x))
        for layer in self.layers:
            x = layer(x) + x0
        return x.square().mean()


@pytest.mark.parametrize("stages", [{}, {"first": 0, "layers.0": 1}])
def test_a_value_with_two_names_has_the_one_that_it_keeps(stages: dict[str, int]) -> None:
    constraints = Constraints(stage_of=stages) if stages else None
    count = max(len(stages), 1)
    pipe = split(_Beginning(), torch.randn(4, 8), cluster=count, constraints=constraints, costs="analytic")
    texts = "\n".join(re.sub(r"  #.*", "", program.source) for program in pipe.programs)

    assert "        x0 = torch.tanh(self.first(x))\n" in texts
    assert """
        x = x0
        for layer in self.layers:
            x = layer(x) + x0
""" in re.sub(r"\.values\(\)", "", texts)


class Returning(nn.Module):
    """It returns an input too, and has names for what it returns that another value has in its code."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(3))

    def forward(self, image: Tensor, noise: Tensor) -> dict[str, Tensor]:
        x = self.layers[0](image + noise)
        hidden = x
        x = self.layers[1](x)
        return {"loss": (self.layers[2](x) - image).square().mean(), "hidden": hidden, "target": image}


def test_an_input_that_is_returned_keeps_its_name() -> None:
    pipe = split(Returning(), (torch.randn(3, 8), torch.randn(3, 8)), cluster=2, costs="analytic")

    for stage in pipe.stages:
        assert "    image: float32 (batch, 8), an input of the model" in stage.source
        assert "target: " not in stage.source
    returned = "".join(stage.source for stage in pipe.stages)
    assert "    image: float32 (batch, 8), the target of the model" in returned


def test_what_is_returned_has_no_name_of_another_value_that_the_stage_gives() -> None:
    apart = Constraints(stage_of={"layers.1": 0, "layers.2": 1})
    batch = (torch.randn(3, 8), torch.randn(3, 8))
    source = split(Returning(), batch, cluster=2, costs="analytic", constraints=apart).stages[0].source

    assert "    hidden: float32 (batch, 8), the hidden of the model\n    x: float32 (batch, 8)" in source
    assert "        return hidden, x\n" in source
