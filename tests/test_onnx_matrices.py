"""Linear algebra of small matrices in ONNX files, which have products and determinants alone."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import orthogonal

from pd2bw_fx import split
from pd2bw_fx.errors import ExportError
from pd2bw_fx.passes.export_onnx import run_onnx


def _positive(a: Tensor) -> Tensor:
    return a @ a.mT + torch.eye(a.shape[-1])


def _density(a: Tensor) -> Tensor:
    mean = torch.zeros(3)
    return torch.distributions.MultivariateNormal(mean, _positive(a), validate_args=False).log_prob(a[:, 0])


FUNCTIONS: list[Callable[[Tensor], Tensor]] = [
    lambda a: torch.linalg.inv(a),
    lambda a: a[0].inverse() @ torch.linalg.matrix_power(a, -2),
    lambda a: torch.linalg.solve(a, a[:, :, :2] * 2),
    lambda a: torch.linalg.solve(a, a[:, :2], left=False),
    lambda a: torch.linalg.solve(_positive(a[0]), a[:, :, :1]) + torch.linalg.solve(a, a[:, :, 0])[..., None],
    lambda a: torch.linalg.slogdet(a).logabsdet * torch.slogdet(a)[0],
    lambda a: torch.linalg.cholesky(_positive(a)) + torch.linalg.cholesky(_positive(a), upper=True),
    lambda a: torch.cholesky_solve(a[:, :, :2], torch.linalg.cholesky(_positive(a))),
    lambda a: torch.cholesky_inverse(torch.linalg.cholesky(_positive(a), upper=True), upper=True),
    lambda a: torch.linalg.solve_triangular(a.tril(), a, upper=False),
    lambda a: torch.linalg.solve_triangular(a.triu(), a[:, :2], upper=True, left=False, unitriangular=True),
    lambda a: torch.linalg.matrix_exp(a) + torch.matrix_exp(a * 3),
    lambda a: torch.linalg.householder_product(a[:, :, :2], a[:, 0, :2]),
    _density,
]


class Matrices(nn.Module):
    def __init__(self, *functions: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.functions = nn.Linear(3, 3), functions

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        a = self.first(x)
        return tuple(function(a) for function in self.functions)


@pytest.mark.parametrize("functions", [FUNCTIONS[:7], FUNCTIONS[7:]])
def test_the_file_computes_the_same(functions: list[Callable[[Tensor], Tensor]], tmp_path: Path) -> None:
    """Pivots are needed for the second matrix, whose first entry is 0."""
    torch.manual_seed(0)
    model = Matrices(*functions).eval()
    model.first.weight.data += 2 * torch.eye(3)
    x = torch.randn(3, 3, 3)
    x[1] = torch.linalg.solve(model.first.weight.data.T.double(), torch.eye(3).flip(0).double()).float()
    pipe = split(model, (x,), cluster=1, costs="analytic", check=False)

    pipe.export_onnx(tmp_path / "onnx")


@pytest.mark.parametrize("by", ["matrix_exp", "cayley", "householder"])
def test_orthogonal_weights_are_in_the_file(by: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    layer = orthogonal(nn.Linear(8, 8), orthogonal_map=by)
    model, x = nn.Sequential(layer, nn.ReLU()).eval(), torch.randn(3, 8)
    split(model, (x,), cluster=1, costs="analytic").export_onnx(tmp_path / "onnx")

    (found,) = run_onnx(tmp_path / "onnx", {"input": x}).values()

    torch.testing.assert_close(torch.from_numpy(found), model(x).detach())


def test_what_would_take_too_many_steps_is_refused_by_name(tmp_path: Path) -> None:
    model = Matrices(lambda a: torch.linalg.inv(a)).eval()
    model.first = nn.Linear(3, 40)
    pipe = split(model, (torch.randn(3, 40, 3),), cluster=1, costs="analytic", check=False)

    with pytest.raises(ExportError, match="linalg_inv"):
        pipe.export_onnx(tmp_path / "onnx")
