"""With less work torch notes, caches and computes the same (`pd2bw_fx/less_work.py`)."""

from __future__ import annotations

import operator
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import Dim
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from pd2bw_fx.less_work import do_less_work


def test_torch_notes_the_same_of_each_operator() -> None:
    class Pairs(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            pairs = x.reshape(-1, 2, x.shape[1])
            return torch.cat([pairs, pairs.flip(1)]).sum()

    def noted() -> list[tuple[str, str, str]]:
        batch = {0: 2 * Dim("half")}
        exported = torch.export.export(Pairs(), (torch.randn(6, 4),), strict=False, dynamic_shapes=(batch,))
        nodes = [node for node in exported.graph.nodes if node.op == "call_function"]
        return [(node.name, node.meta["stack_trace"], str(node.meta["val"])) for node in nodes]

    with do_less_work():
        found = noted()

    assert found == noted()
    assert any("pairs.flip(1)" in trace for _, trace, _ in found)


def test_torch_caches_the_same_results() -> None:
    def twice(x: Tensor) -> Tensor:
        waves = torch.fft.rfft(x)
        parts = waves.conj().imag, waves.real.transpose(0, 1), *x.topk(2), x.clone().add_(1)[1:]
        return torch.stack([part.float().sum() for part in parts])

    def cached() -> dict[object, object]:
        FakeTensorMode.cache_clear()
        # Torch compares each result that it takes from the cache with one of the operator.
        with FakeTensorMode() as mode, patch.object(mode, "cache_crosscheck_enabled", True):
            x = torch.randn(6, 4, requires_grad=True)
            for _ in range(2):
                twice(x).sum().backward()
        return dict(FakeTensorMode.cache)

    with do_less_work():
        found, info = cached(), FakeTensorMode.cache_info()

    assert found == cached()
    assert info == FakeTensorMode.cache_info()
    assert info.hits > 10


def test_sizes_make_the_same_sizes() -> None:
    example = torch.randn(6, 4)
    is_open = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * 2)
    with FakeTensorMode(shape_env=ShapeEnv()) as mode:
        rows, columns = mode.from_tensor(example, symbolic_context=is_open).shape
        unknown = mode.shape_env.create_unbacked_symint()

    def made() -> list[Any]:
        pairs = (rows, columns), (columns, rows), (rows * 2, 12), (rows, rows), (unknown, rows), (rows + 1, 6)
        combining = (operator.add, operator.mul, operator.sub, operator.eq, operator.lt, operator.ge)
        return [method(*pair).node for pair in pairs for method in (*combining, torch.sym_max)]

    def told(nodes: list[Any]) -> list[Any]:
        return [
            (node.expr, node.pytype, node.hint, node.constant, node._optimized_summation) for node in nodes
        ]

    with do_less_work():
        first, second = made(), made()

    assert told(first) == told(second) == told(made())
    assert not {id(node) for node in first} & {id(node) for node in second}
