"""Models that no stage could follow are refused by name, before or while they are traced."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.ao.quantization import get_default_qat_qconfig, prepare_qat
from torch.distributed.fsdp import fully_shard

import pd2bw_fx
from pd2bw_fx.errors import InputError, TraceError
from tests.plain_models import Plain, rows


def test_hooks_of_the_backward_are_refused() -> None:
    def hook(*gradients: Any) -> None:
        raise AssertionError("no backward is run here")

    of_parameter, of_sum, of_module = Plain(), Plain(), Plain()
    of_parameter.first.weight.register_hook(hook)
    of_sum.first.weight.register_post_accumulate_grad_hook(hook)
    of_module.second.register_full_backward_hook(hook)
    for model, whose in (
        (of_parameter, r"parameter 'first\.weight'"),
        (of_sum, r"parameter 'first\.weight'"),
        (of_module, "module 'second'"),
    ):
        with pytest.raises(InputError, match=f"^{whose} has a backward hook"):
            pd2bw_fx.split(model, rows(), cluster=2, num_stages=2, costs="analytic")


def test_a_hook_that_the_forward_gives_a_tensor_is_refused_with_its_line() -> None:
    class Clamped(Plain):
        def forward(self, x: Tensor) -> Tensor:
            hidden = self.first(x)
            hidden.register_hook(lambda gradient: gradient.clamp(-0.1, 0.1))
            return self.second(hidden).square().mean()

    with pytest.raises(InputError, match=r"^a tensor of the forward \(test_unsupported\.py:\d+: hidden\."):
        pd2bw_fx.split(Clamped(), rows(), cluster=2, num_stages=2, costs="analytic")

    seen: list[Tensor] = []
    torch.ones(1, requires_grad=True).register_hook(seen.append)  # torch's own is back


@pytest.mark.usefixtures("one_rank")
def test_parameters_that_are_sharded_are_refused() -> None:
    model = Plain()
    fully_shard(model.second)
    with pytest.raises(
        InputError, match=r"^'second\.weight' is sharded over processes .* before fully_shard"
    ):
        pd2bw_fx.split(model, rows(), cluster=2, num_stages=2, costs="analytic")


@pytest.mark.filterwarnings("ignore")  # torch.ao's words about its future
def test_an_observer_that_has_seen_no_batch_is_refused_and_left_as_it_was() -> None:
    model = Plain()
    model.second.qconfig = get_default_qat_qconfig("fbgemm")  # type: ignore[assignment]
    prepare_qat(model.train(), inplace=True)
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}

    with pytest.raises(InputError, match=r"^buffer 'second\.weight_fake_quant.* run the model once, then"):
        pd2bw_fx.split(model, rows(), cluster=2, num_stages=2, costs="analytic")

    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())
    model(*rows())
    assert pd2bw_fx.split(model, rows(), cluster=2, num_stages=2, costs="analytic").trace_report is not None


def test_batch_norm_without_momentum_is_refused_where_it_averages() -> None:
    class Averaged(Plain):
        def __init__(self, **options: Any) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(8, momentum=None, **options)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(self.norm(x))

    with pytest.raises(InputError, match=r"^module 'norm' is a BatchNorm1d with momentum=None"):
        pd2bw_fx.split(Averaged(), rows(), cluster=2, num_stages=2, costs="analytic")

    for model in (Averaged().eval(), Averaged(track_running_stats=False)):
        assert pd2bw_fx.split(model, rows(), cluster=2, num_stages=2, costs="analytic").verify().exact


def test_weights_without_data_are_planned_where_the_inputs_have_none_either() -> None:
    with torch.device("meta"):
        model, there = Plain(), torch.empty(4, 8)

    with pytest.raises(InputError, match="weights are on the meta device, and input 'x' is on cpu"):
        pd2bw_fx.split(model, rows(), cluster=2, num_stages=2, costs="analytic")
    pipe = pd2bw_fx.split(model, (there,), cluster=2, num_stages=2, costs="analytic")
    assert [stage.program.stage for stage in pipe.stages] == [0, 1]
    assert "the stages were not compared with the model" in str(pipe.trace_report)
    for use in (pipe.verify, lambda: pipe.run(rows()), lambda: pipe.save("anywhere")):
        with pytest.raises(InputError, match=r"no values for 'first\.weight' and 3 more, on the meta device"):
            use()


def test_adapters_with_values_around_weights_without_are_told() -> None:
    with torch.device("meta"):
        model, there = Plain(), torch.empty(4, 8)
    model.first.bias = nn.Parameter(torch.zeros(8))

    with pytest.raises(InputError, match=r"'first\.weight' is on the meta device, and 'first\.bias' on cpu"):
        pd2bw_fx.split(model, (there,), cluster=2, num_stages=2, costs="analytic")


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("scale", torch.arange(8.0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).relu() * self.scale).square().mean()


def test_what_was_split_without_values_is_whole_when_they_are_loaded(tmp_path: Path) -> None:
    torch.manual_seed(0)
    real = Scaled()
    with torch.device("meta"):
        pipe = pd2bw_fx.split(Scaled(), (torch.empty(4, 8),), cluster=2, costs="analytic")
    for name, tensor in real.state_dict().items():  # one after another, as from files
        pipe.load_state_dict({name: tensor})
    with pytest.raises(InputError, match=r"no values for 'scale', .*no state dict has them"):
        pipe.run(rows())
    with pytest.raises(InputError, match=r"'scale' has shape \(7,\)"):
        pipe.load_state_dict({"scale": torch.zeros(7)})
    pipe.load_state_dict(dict(real.named_buffers()))

    assert pipe.run(rows())["loss"] == real(*rows())
    assert pipe.verify(real).exact
    assert pipe.verify(real, example_args=(torch.randn(6, 8),)).exact
    pipe.save(tmp_path / "saved")
    pipe.export_onnx(tmp_path / "onnx")
    again = pd2bw_fx.split(pipe, cluster=2, method="1f1b")
    assert again.verify(real).exact


def test_a_submodule_that_hides_a_method_is_named() -> None:
    class Collecting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = [nn.Linear(8, 8), nn.Linear(8, 1)]
            self.parameters: Any = []
            self.parameters = nn.ParameterList(p for block in self.blocks for p in block.parameters())

        def forward(self, x: Tensor) -> Tensor:
            return self.blocks[1](self.blocks[0](x)).square().mean()  # type: ignore[no-any-return]

    with pytest.raises(InputError, match="the model has a submodule called 'parameters', which is a method"):
        pd2bw_fx.split(Collecting(), rows(), cluster=2, costs="analytic")


def test_a_part_under_inference_mode_is_refused_with_its_line() -> None:
    class Partly(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            with torch.inference_mode():
                hidden = self.first(x)
            return self.last(hidden.clone()).square().mean()

    model, x = Partly(), torch.randn(3, 4)
    with pytest.raises(InputError, match=r"torch.inference_mode \(test_unsupported.py:\d+: with .*no_grad"):
        pd2bw_fx.split(model, x, cluster=2, costs="analytic")
    assert pd2bw_fx.split(model.requires_grad_(False), x, cluster=2, costs="analytic").run(x)


class Mixed(nn.Module):
    """Rows mixed by a sparse matrix: what a graph network does with its adjacency."""

    def __init__(self, matrix: Tensor, held: str) -> None:
        super().__init__()
        if held == "buffer":
            self.register_buffer("matrix", matrix)
        elif held == "parameter":
            self.matrix = nn.Parameter(matrix, requires_grad=False)
        else:
            self.matrix = matrix

    def forward(self, hidden: Tensor) -> Tensor:
        return torch.sparse.mm(self.matrix, hidden)


class Graph(Plain):
    def __init__(self, mixed: nn.Module) -> None:
        super().__init__()
        self.mixed = mixed

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.mixed(self.first(x)).relu()).square().mean()


class GraphOfInput(Plain):
    def forward(self, x: Tensor, matrix: Tensor) -> Tensor:
        return self.second(torch.sparse.mm(matrix, self.first(x))).square().mean()


class Unmixed(Graph):
    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).relu()).square().mean()


def matrix(layout: torch.layout = torch.sparse_coo) -> Tensor:
    return torch.eye(4).roll(1, 0).to_sparse(layout=layout)


@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
@pytest.mark.parametrize("held", ["buffer", "parameter", "attribute"])
def test_a_sparse_matrix_that_the_model_computes_with_is_refused_by_name(
    held: str, layout: torch.layout
) -> None:
    said = r"the sparse tensor 'mixed\.matrix' \(test_unsupported\.py:\d+.*its indices and values instead"
    with pytest.raises(TraceError, match=said):
        pd2bw_fx.split(Graph(Mixed(matrix(layout), held)), rows(), cluster=2, costs="analytic")


def test_a_sparse_input_is_refused_by_name() -> None:
    with pytest.raises(InputError, match=r"^input 'matrix' is a sparse tensor, expected a dense one"):
        pd2bw_fx.split(GraphOfInput(), (*rows(), matrix()), cluster=2, costs="analytic")


@pytest.mark.parametrize("held", ["buffer", "parameter"])
def test_a_sparse_tensor_that_the_forward_leaves_alone_can_only_be_an_attribute(held: str) -> None:
    with pytest.raises(TraceError, match=r"^'mixed\.matrix' is a sparse tensor, .* can be a plain attribute"):
        pd2bw_fx.split(Unmixed(Mixed(matrix(), held)), rows(), cluster=2, costs="analytic")

    model = Unmixed(Mixed(matrix(), "attribute"))
    pipeline = pd2bw_fx.split(model, rows(), cluster=2, num_stages=2, costs="analytic")
    assert torch.equal(pipeline.run(*rows())["loss"], model(*rows()))


def test_an_untraced_part_may_have_a_sparse_matrix_in_an_attribute(tmp_path: Path) -> None:
    model = Graph(pd2bw_fx.untraced(Mixed(matrix(), "attribute"), returns=torch.empty_like))

    pipeline = pd2bw_fx.split(model, rows(), cluster=2, num_stages=2, costs="analytic")
    pipeline.save(tmp_path / "graph")

    loaded = pd2bw_fx.load(tmp_path / "graph")
    assert torch.equal(loaded.run(*rows())["loss"], model(*rows()))
