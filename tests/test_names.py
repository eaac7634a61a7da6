"""A model's own names may be ones that torch.fx has for itself."""

from __future__ import annotations

from pathlib import Path

import onnx
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import pd2bw_fx

INPUTS = (torch.linspace(-1, 1, 48).view(8, 6), torch.arange(8) % 4)


class _Graphs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.graph = nn.Linear(6, 6)
        self.code = nn.Parameter(torch.randn(6))
        self.register_buffer("meta", torch.rand(6))
        self.head = nn.Linear(6, 4)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        hidden = self.graph(x) * self.code + self.meta
        return F.cross_entropy(self.head(hidden.relu()), labels)


class _Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.print_readable = nn.Sequential(nn.Linear(6, 6), nn.Tanh())
        self._graph = nn.Linear(6, 4)
        self.recompile = _Graphs()

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        hidden = self.print_readable(x)
        return F.cross_entropy(self._graph(hidden), labels) + self.recompile(hidden, labels)


class _Transposing(nn.Module):
    """Its layers and parameters have the names of torch's operators."""

    def __init__(self) -> None:
        super().__init__()
        self.add = nn.Linear(6, 6)
        self.t = nn.Parameter(torch.randn(6, 4))

    def forward(self, t: Tensor, relu: Tensor) -> Tensor:
        return F.cross_entropy(self.add(t.t().t()).relu() @ self.t.t().t(), relu)


def test_inputs_and_weights_are_called_as_operators_are() -> None:
    torch.manual_seed(0)
    pipe = pd2bw_fx.split(_Transposing(), INPUTS, cluster=2, costs="analytic")

    assert pipe.verify().exact


@pytest.mark.parametrize("kind", [_Graphs, _Inner])
@pytest.mark.parametrize("tracer", ["export", "fx"])
def test_a_model_has_what_a_graph_module_has_too(kind: type[nn.Module], tracer: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = kind()
    pipe = pd2bw_fx.split(model, INPUTS, cluster=2, costs="analytic", tracer=tracer)

    pipe.verify()
    assert pipe.state_dict().keys() == model.state_dict().keys()
    pipe.save(tmp_path / "saved")
    loaded = pd2bw_fx.load(tmp_path / "saved")
    assert torch.equal(next(iter(loaded.run(INPUTS).values())), next(iter(pipe.run(INPUTS).values())))


def test_onnx_files_have_its_names(tmp_path: Path) -> None:
    pipe = pd2bw_fx.split(_Graphs(), INPUTS, cluster=2, costs="analytic")
    manifest = pipe.export_onnx(tmp_path / "onnx")

    files = [onnx.load(tmp_path / "onnx" / stage["file"]) for stage in manifest["stages"]]
    names = {weight.name for file in files for weight in file.graph.initializer}
    assert {"graph.weight", "graph.bias", "code", "meta", "head.weight", "head.bias"} <= names


def test_an_export_leaves_the_modes_of_layers_alone(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.BatchNorm1d(6), nn.Linear(6, 1))
    model[1].eval()  # frozen statistics, in a model that is in training
    pipe = pd2bw_fx.split(model, (INPUTS[0],), cluster=1, costs="analytic")
    modes = [part.training for part in pipe.stages[0].module.modules()]

    pipe.export_onnx(tmp_path / "onnx", training=True)

    assert [part.training for part in pipe.stages[0].module.modules()] == modes


def test_a_line_of_several_statements_gives_no_name_to_the_wrong_value() -> None:
    class Several(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

        # fmt: off
        def forward(self, x: Tensor) -> Tensor:
            query = self.first(x).sin(); keys = self.last(x).cos()  # noqa: E702
            return query * keys
        # fmt: on

    pipe = pd2bw_fx.split(Several(), torch.randn(2, 4), cluster=1, costs="analytic", check=False)
    assert "query = self.last" not in pipe.stages[0].source
    assert "query = self.first" not in pipe.stages[0].source


def test_values_that_a_line_makes_one_by_one_have_the_names_that_it_gives_them() -> None:
    class Attending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.to_q, self.to_k, self.to_v = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor, context: Tensor) -> Tensor:
            q, k, v = self.to_q(x), self.to_k(context), self.to_v(context)
            q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in (q, k, v))
            scaled, _ = q * 0.5, k.sum()
            weights = torch.softmax(scaled @ k.transpose(-2, -1), dim=-1)
            return (weights @ v).transpose(1, 2).flatten(2)

    model = Attending()
    pipe = pd2bw_fx.split(model, (torch.randn(2, 3, 8),) * 2, cluster=1, costs="analytic")

    source = pipe.stages[0].source
    assert "q, k, v = self.to_q(x), self.to_k(context), self.to_v(context)" in source
    for name in "qkv":
        assert f"{name} = {name}.unflatten(-1, (2, -1)).transpose(1, 2)" in source


def test_torchs_attention_has_its_own_names_for_queries_keys_and_values() -> None:
    class Reading(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.own = nn.MultiheadAttention(8, 2, batch_first=True)
            self.other = nn.MultiheadAttention(8, 2, batch_first=True)
            for attention in (self.own, self.other):  # is written out with a hook
                attention.register_forward_hook(lambda *_: None)

        def forward(self, x: Tensor, memory: Tensor) -> Tensor:
            x = self.own(x, x, x, need_weights=False)[0]
            return self.other(x, memory, memory, need_weights=False)[0]

    example = torch.randn(2, 3, 8), torch.randn(2, 5, 8)
    pipe = pd2bw_fx.split(Reading(), example, cluster=1, costs="analytic")

    own, other = pipe.stages[0].source.split("class ")[1:3]
    assert "q, k, v = proj[0], proj[1], proj[2]" in own
    assert "k, v = kv_proj[0], kv_proj[1]" in other
    for source in (own, other):
        assert "attn_output = F.scaled_dot_product_attention(q, k, v)" in source
        assert "functional.py" not in source


class _Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        residual = x
        x = self.norm(x)
        x = self.linear(x)
        x = residual + x
        residual = x
        x = x.sin()
        return residual * x


class _Residuals(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Residual() for _ in range(2))
        self.norms, self.layers = (
            nn.ModuleList(kind(8) for _ in range(3))
            for kind in (nn.LayerNorm, lambda size: nn.Linear(size, 8))
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        for norm, layer in zip(self.norms, self.layers, strict=True):
            kept = x
            x = norm(x)
            x = layer(x)
            x = kept + x
        return x


def test_a_second_name_that_an_author_gives_a_value_is_kept_in_blocks_and_loops() -> None:
    pipe = pd2bw_fx.split(_Residuals(), torch.randn(2, 8), cluster=1, costs="analytic")

    lines = [line.partition("#")[0].strip() for line in pipe.stages[0].source.splitlines()]
    block = ["residual = x", "x = self.norm(x)", "x = self.linear(x)", "x = residual + x"]
    assert _stand_in(lines, [*block, "residual = x", "x = x.sin()", "return residual * x"])
    looped = ["kept = x", "x = norm(x)", "x = layer(x)", "x = kept + x"]
    assert _stand_in(lines, ["for norm, layer in zip(self.norms, self.layers, strict=True):", *looped])


def _stand_in(lines: list[str], wanted: list[str]) -> bool:
    return any(lines[at : at + len(wanted)] == wanted for at in range(len(lines)))


def test_a_second_name_is_not_taken_where_its_value_is_another_by_then() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor, residual: Tensor) -> Tensor:
            kept = x
            x = self.first(x)
            other = x
            x = self.last(x)
            kept = kept * residual
            return kept + other + x

    model, inputs = Twice(), (torch.randn(2, 8), torch.randn(2, 8))
    pipe = pd2bw_fx.split(model, inputs, cluster=1, costs="analytic")

    [result] = pipe.run(inputs).values()
    assert torch.equal(result, model(*inputs))
    assert "kept = kept * residual" in pipe.stages[0].source
