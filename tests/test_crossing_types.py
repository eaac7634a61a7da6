"""Values of any type and number of dimensions cross a cut, through shared memory and between processes."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import pd2bw_fx
from pd2bw_fx.errors import InputError
from pd2bw_fx.runtime.channel import Outbox, Route

TYPES = [
    torch.bool, torch.uint8, torch.uint16, torch.uint32, torch.uint64,
    torch.int8, torch.int16, torch.int32, torch.int64,
    torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz,
    torch.float8_e8m0fnu, torch.float16, torch.bfloat16, torch.float32, torch.float64,
    torch.complex32, torch.complex64, torch.complex128,
]  # fmt: skip


class Parts(nn.Module):
    """Returns a value of every type, and one of which only a flag says that it is a conjugate."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[list[Tensor], Tensor]:
        hidden = self.linear(x)
        parts = [(3 * hidden).detach().abs().to(dtype) for dtype in TYPES]
        parts.append(hidden.detach().reshape(-1, *[1] * 12, 4).transpose(0, -1))
        return parts, torch.complex(hidden, x).conj()


class Sum(nn.Module):
    def forward(self, parts: list[Tensor], turned: Tensor) -> Tensor:
        for part in parts[:-1]:
            turned = turned + (part.to(torch.complex128) if part.is_complex() else part.double())
        turned = turned * parts[-1].transpose(0, -1).reshape(-1, 4)
        return torch.view_as_real(turned).square().mean()


class Typed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts, self.sum = Parts(), Sum()

    def forward(self, x: Tensor) -> Tensor:
        return self.sum(*self.parts(x))


@pytest.mark.filterwarnings("ignore:ComplexHalf support")
def test_values_of_every_type_cross_a_cut() -> None:
    torch.manual_seed(0)
    model, batch = Typed().double(), torch.randn(8, 4, dtype=torch.float64)
    batches = [batch, batch[:6]]  # microbatches of another size do not go through shared memory
    expected = [torch.stack([model(part) for part in whole.chunk(2)]).mean().item() for whole in batches]
    pipe = pd2bw_fx.split(
        model, batch[:4], cluster=2, method="1f1b", microbatches_per_update=2, costs="analytic",
        constraints=pd2bw_fx.Constraints(stage_of={"parts": 0, "sum": 1}),
    )  # fmt: skip
    assert len([port for port in pipe.stages[1].program.inputs if port.source == 0]) == len(TYPES) + 2

    result = pipe.train_local(batches, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.0))

    assert result.losses == pytest.approx(expected, rel=1e-12)


def test_more_values_than_a_link_has_tags_for_are_refused() -> None:
    cpu = torch.device("cpu")
    route = Route(1, dist.ProcessGroup(0, 2), cpu, cpu, first_tag=0)
    with pytest.raises(InputError, match=r"1,100 values go .* up to 1,022: cut where fewer cross"):
        Outbox(route, tuple(map(str, range(1100))), window=1)
