"""Models that torch.compile has wrapped, whole or in parts, are split as they are written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import pd2bw_fx


class Compiled(Exception):
    """Something was compiled."""


def refuse(graph: torch.fx.GraphModule, inputs: list[Tensor]) -> Callable[..., Any]:
    raise Compiled


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(8)
        self.wide = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm(x)
        return x + self.wide(normed)


class Blocks(nn.Module):
    def __init__(self, kind: Callable[[], nn.Module] = Block) -> None:
        super().__init__()
        self.first = nn.Linear(4, 8)
        self.blocks = nn.ModuleList(kind() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        for block in self.blocks:
            hidden = block(hidden)
        return hidden.square().mean()


X = torch.randn(6, 4)


def split(model: nn.Module) -> pd2bw_fx.Pipeline:
    return pd2bw_fx.split(model, X, cluster=2, costs="analytic")


def code(pipe: pd2bw_fx.Pipeline) -> list[str]:
    """The code of the stages from their first class on."""
    return [stage.source.partition("class ")[2] for stage in pipe.stages]


def compiled_as_a_whole() -> nn.Module:
    model: nn.Module = torch.compile(Blocks(), backend=refuse)  # type: ignore[assignment]
    return model


def compiled_blocks() -> nn.Module:
    return Blocks(lambda: torch.compile(Block(), backend=refuse))  # type: ignore[return-value]


def compiled_in_place() -> nn.Module:
    model = Blocks()
    for block in model.blocks:
        block.compile(backend=refuse)
    return model


def with_a_compiled_function() -> nn.Module:
    @torch.compile(backend=refuse)
    def scaled(x: Tensor) -> Tensor:
        return x * x.square().mean(-1, keepdim=True).rsqrt()

    class Scaling(Block):
        def forward(self, x: Tensor) -> Tensor:
            return scaled(x) + self.wide(x)

    return Blocks(Scaling)


MODELS = (compiled_as_a_whole, compiled_blocks, compiled_in_place, with_a_compiled_function)


@pytest.mark.parametrize("make", MODELS)
def test_nothing_is_compiled_for_a_split_and_the_model_is_as_it_was(make: Callable[[], nn.Module]) -> None:
    model = make()
    forwards = {name: vars(module).get("forward") for name, module in model.named_modules()}

    pipe = split(model)

    assert pipe.graph.batch_symbol is not None
    assert {name: vars(module).get("forward") for name, module in model.named_modules()} == forwards
    assert pipe.state_dict().keys() == model.state_dict().keys()
    with pytest.raises(Exception, match="Compiled"):
        model(X)


@pytest.mark.parametrize("make", MODELS)
def test_nothing_is_compiled_to_compare_stages_and_files_with_the_model(
    make: Callable[[], nn.Module], tmp_path: Path
) -> None:
    model = make()
    pipe = split(model)

    pipe.verify(model)
    pipe.export_onnx(tmp_path)

    with pytest.raises(Exception, match="Compiled"):
        model(X)


def test_compiled_blocks_read_as_blocks_do() -> None:
    plain, compiled = code(split(Blocks())), code(split(compiled_blocks()))

    def without_wrappers(text: str) -> str:
        return text.replace('["_orig_mod"]', "").replace("._orig_mod", "")

    assert 'hidden = block["_orig_mod"](hidden)' in compiled[0]
    first, second = map(without_wrappers, compiled)
    assert first.replace('nn.ModuleDict({"_orig_mod": Block()})', "Block()") == plain[0]
    assert second.replace('nn.ModuleDict({"_orig_mod": Block()})', "Block()") == plain[1]


def test_a_region_that_is_compiled_once_reads_as_any_forward() -> None:
    class Region(Block):
        @torch.compiler.nested_compile_region
        def forward(self, x: Tensor) -> Tensor:
            normed = self.norm(x)
            return x + self.wide(normed)

    first, _ = code(split(Blocks(Region)))

    assert "hidden = block(hidden)" in first
    assert "self.wide(" in first
    assert "test_compiled_parts.py" in first
    assert "layer_norm" not in first


@pytest.mark.parametrize("is_recursive", [False, True])
def test_what_is_not_to_be_compiled_reads_as_any_forward(is_recursive: bool) -> None:
    class LeftOut(Block):
        @torch.compiler.disable(recursive=is_recursive)
        def forward(self, x: Tensor) -> Tensor:
            normed = self.norm(x)
            return x + self.wide(normed)

    pipe = split(Blocks(LeftOut))

    assert pipe.graph.batch_symbol is not None
    assert "hidden = block(hidden)" in code(pipe)[0]
    assert "normed = self.norm(" in code(pipe)[0]


def test_a_replica_of_data_parallelism_is_open_in_its_batch_and_has_its_own_names(one_rank: None) -> None:
    model = nn.parallel.DistributedDataParallel(Blocks())

    pipe = split(model)

    assert pipe.graph.batch_symbol is not None
    assert pipe.state_dict().keys() == model.state_dict().keys()
    assert "hidden = block(hidden)" in code(pipe)[0]


def test_a_forward_that_calls_the_one_it_replaces_is_one_call_of_its_module() -> None:
    class Inheriting(Block):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x)

    class Scaling(Block):
        def forward(self, x: Tensor) -> Tensor:
            doubled = 2 * x
            return super().forward(doubled) - x

    inheriting, scaling = code(split(Blocks(Inheriting)))[0], code(split(Blocks(Scaling)))[0]

    assert inheriting.replace("Inheriting", "Block") == code(split(Blocks()))[0]
    assert "hidden = block(hidden)" in scaling
    assert "doubled = 2 * x" in scaling
    assert "normed" in scaling
