"""Experts whose rows are multiplied in groups (F.grouped_mm) are traced, priced and exported."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.library import custom_op
from torch.utils.flop_counter import flop_registry, register_flop_formula
from transformers import MixtralConfig, MixtralForCausalLM
from transformers.integrations import moe

import pd2bw_fx
from pd2bw_fx.errors import ExportError
from pd2bw_fx.passes.trace.patches.experts import multiply_experts_as_in_a_run
from pd2bw_fx.stage import run_in_turn
from tests.onnx_exports import assert_alike, exported

NUM_EXPERTS, WIDTH, HIDDEN = 4, 8, 16


class Experts(nn.Module):
    """Each row goes to one expert; the last expert gets none. x: (batch, 6, WIDTH)"""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype = dtype
        self.router = nn.Linear(WIDTH, NUM_EXPERTS)
        self.up = nn.Parameter(torch.randn(NUM_EXPERTS, WIDTH, HIDDEN) / 3)
        self.down = nn.Parameter(torch.randn(NUM_EXPERTS, WIDTH, HIDDEN) / 4)
        with torch.no_grad():
            self.router.bias[-1] = -100.0

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, WIDTH)
        gate, expert = self.router(rows).softmax(-1).max(-1)
        expert, order = expert.sort(stable=True)
        ends = (expert <= torch.arange(NUM_EXPERTS).unsqueeze(1)).sum(1, dtype=torch.int32)
        hidden = F.gelu(F.grouped_mm(rows[order].to(self.dtype), self.up.to(self.dtype), offs=ends))
        found = F.grouped_mm(hidden, self.down.to(self.dtype).transpose(1, 2), offs=ends)
        return (rows + torch.empty_like(rows).index_copy(0, order, found.to(rows)) * gate[:, None]).view_as(x)


class Model(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.experts = nn.ModuleList(Experts(dtype) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.experts:
            x = layer(x)
        return self.last(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_model_is_traced_whatever_type_its_experts_compute_in(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model, x = Model(dtype), torch.randn(3, 6, WIDTH)

    pipe = pd2bw_fx.split(model, (x,), loss_fn=_squares, cluster=2, costs="analytic", check="full")

    assert pipe.trace_report is not None
    assert pipe.trace_report.tracer == "export"
    assert "F.grouped_mm(hidden, " in pipe.stages[0].source
    assert "F.grouped_mm(hidden, " in pipe.stages[1].source
    more = torch.randn(7, 6, WIDTH)
    assert torch.equal(run_in_turn(pipe.stages, {"x": more}, pipe.graph)["output"], model(more))


def test_a_product_costs_what_it_computes() -> None:
    pipe = pd2bw_fx.split(Model(torch.float32), (torch.randn(3, 6, WIDTH),), cluster=2, costs="analytic")

    work = [
        (cost.forward_work, cost.backward_work)
        for name, cost in pipe.costs.operators.items()
        if pipe.graph.operators[name].target.startswith("aten._grouped_mm")
    ]

    product = 2 * (3 * 6) * WIDTH * HIDDEN
    assert [(forward[0], backward[0]) for forward, backward in work] == [(product, 2 * product)] * 4


@custom_op("tests_of_pd2bw_fx::powers", mutates_args=())
def powers(x: Tensor) -> Tensor:
    return x**3


@powers.register_fake
def _(x: Tensor) -> Tensor:
    return torch.empty_like(x)


def _keep(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


powers.register_autograd(lambda ctx, gradient: 3 * ctx.saved_tensors[0] ** 2 * gradient, setup_context=_keep)


def test_a_formula_that_the_user_has_registered_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    class Powers(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return powers(x)

    monkeypatch.delitem(flop_registry, torch.ops.tests_of_pd2bw_fx.powers, raising=False)
    register_flop_formula(torch.ops.tests_of_pd2bw_fx.powers)(lambda shape, **_: 2 * shape.numel())
    model = nn.Sequential(nn.Linear(4, 4), Powers(), nn.Linear(4, 4))

    pipe = pd2bw_fx.split(model, (torch.ones(3, 4),), cluster=2, costs="analytic", check=False)

    assert [
        cost.forward_work and cost.forward_work[0]
        for name, cost in pipe.costs.operators.items()
        if "powers" in pipe.graph.operators[name].target
    ] == [2 * 3 * 4]


def mixtral() -> MixtralForCausalLM:
    torch.manual_seed(0)
    return MixtralForCausalLM(
        MixtralConfig(
            vocab_size=64, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=2, num_local_experts=3, use_cache=False,
        )
    )  # fmt: skip


def test_hugging_faces_experts_compute_as_in_a_run_and_need_only_torch(tmp_path: Path) -> None:
    words = torch.randint(64, (3, 8))
    asked = moe.is_torchdynamo_compiling

    pipe = pd2bw_fx.split(
        mixtral(),
        example_kwargs={"input_ids": words, "labels": words},
        cluster=2,
        costs="analytic",
        check="full",
    )

    assert moe.is_torchdynamo_compiling is asked
    assert all(
        "F.grouped_mm(" in stage.source and "transformers" not in stage.source for stage in pipe.stages
    )
    pipe.export_onnx(tmp_path / "files")


@pytest.mark.parametrize(("capability", "is_changed"), [((7, 5), False), ((8, 0), True)])
def test_an_older_gpu_keeps_hugging_faces_operator(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], is_changed: bool
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    asked = moe.is_torchdynamo_compiling

    with multiply_experts_as_in_a_run():
        assert (moe.is_torchdynamo_compiling is not asked) == is_changed


def test_compiled_stages_multiply_groups_too() -> None:
    torch.manual_seed(0)
    pipe = pd2bw_fx.split(
        Model(torch.float32), (torch.randn(3, 6, WIDTH),), loss_fn=_squares, cluster=1, costs="analytic"
    )
    batches = [torch.randn(4, 6, WIDTH) for _ in range(2)]

    plain, compiled = (
        pipe.train_local(batches, optimizer=partial(torch.optim.SGD, lr=0.0), **options)
        for options in ({}, {"compile": {"backend": "aot_eager"}})
    )

    assert compiled.losses == pytest.approx(plain.losses, rel=1e-6)


def _squares(y: Tensor) -> Tensor:
    return y.square().mean()


class Columns(nn.Module):
    """Groups of columns in place of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(8, 2)
        self.weights = nn.Parameter(torch.randn(2, HIDDEN, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        ends = torch.tensor([4, 8], dtype=torch.int32)
        return self.last(F.grouped_mm(self.weights, self.first(x).t(), offs=ends))


def test_what_no_opset_has_is_refused_without_the_advice_to_try_another(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"translated for rows in groups.*F\.grouped_mm.*no opset has it"):
        exported(Columns(), tmp_path / "files", torch.randn(8, WIDTH))
    assert not (tmp_path / "files").exists()


class Given(nn.Module):
    """Groups of rows that end where the caller says, multiplied by Hugging Face's operator."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(HIDDEN, 2)
        self.weights = nn.Parameter(torch.randn(NUM_EXPERTS, WIDTH, HIDDEN))

    def forward(self, rows: Tensor, ends: Tensor) -> Tensor:
        return self.last(torch.ops.transformers.grouped_mm_fallback(self.first(rows), self.weights, ends))


@pytest.mark.parametrize("ends", [[2, 2, 5, 9], [0, 0, 0, 0], [9, 9, 9, 9], [0, 3, 4, 6]])
def test_groups_may_be_empty_in_the_files_and_rows_behind_them_are_zeros(
    tmp_path: Path, ends: list[int]
) -> None:
    torch.manual_seed(0)
    model = Given()
    folder = exported(model, tmp_path / "files", torch.randn(9, WIDTH), torch.tensor([2, 4, 4, 8]))

    assert_alike(folder, model, rows=torch.randn(9, WIDTH), ends=torch.tensor(ends))
