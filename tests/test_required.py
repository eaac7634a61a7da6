"""Models that no stage could follow are refused by name, before or while they are traced."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.ao.quantization import get_default_qat_qconfig, prepare_qat
from torch.distributed.fsdp import fully_shard

import pd2bw_fx
from pd2bw_fx.errors import InputError
from tests.test_user_models import Plain, rows


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

    with pytest.raises(InputError, match=r"^a tensor of the forward \(test_required\.py:\d+: hidden\."):
        pd2bw_fx.split(Clamped(), rows(), cluster=2, num_stages=2, costs="analytic")

    seen: list[Tensor] = []
    torch.ones(1, requires_grad=True).register_hook(seen.append)  # torch's own is back


def test_parameters_that_are_sharded_are_refused() -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = Plain()
        fully_shard(model.second)
        with pytest.raises(
            InputError, match=r"^'second\.weight' is sharded over processes .* before fully_shard"
        ):
            pd2bw_fx.split(model, rows(), cluster=2, num_stages=2, costs="analytic")
    finally:
        dist.destroy_process_group()


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
    with pytest.raises(InputError, match="no values to compare; split the model with check=False"):
        pd2bw_fx.split(model, (there,), cluster=2, num_stages=2, costs="analytic")
    pipe = pd2bw_fx.split(model, (there,), cluster=2, num_stages=2, costs="analytic", check=False)
    assert [stage.program.stage for stage in pipe.stages] == [0, 1]
