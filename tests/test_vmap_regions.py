"""torch.vmap in a forward is written out as operators on whole batches; what else runs parts of the model by
itself is refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

import pd2bw_fx
from pd2bw_fx.errors import TraceError

Middle = Callable[["Mapping", Tensor], Tensor]


class Mapping(nn.Module):
    """Two layers with `middle` between them, which maps what it likes."""

    def __init__(self, middle: Middle) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.inner = nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8))
        self.norm = nn.GroupNorm(2, 4)
        self.last = nn.Linear(8, 8)
        self.middle = middle

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.middle(self, self.first(x).tanh()))


def rows(model: Mapping, h: Tensor) -> Tensor:
    return torch.vmap(model.inner)(h)


def columns(model: Mapping, h: Tensor) -> Tensor:
    """The layer is the same function of a matrix as of a row, and yet the map of it is another one."""
    squares = torch.einsum("bi,bj->bij", h, h)
    return torch.vmap(lambda square: model.inner(square.t()).t())(squares).sum(1)


def softmax_of_a_row(model: Mapping, h: Tensor) -> Tensor:
    return torch.vmap(nn.Softmax(0))(h)


def groups(model: Mapping, h: Tensor) -> Tensor:
    return torch.vmap(model.norm)(h.view(-1, 2, 4, 1)).reshape(-1, 8)


def ensemble(model: Mapping, h: Tensor) -> Tensor:
    weights = torch.stack([model.first.weight, model.last.weight])
    biases = torch.stack([model.first.bias, model.last.bias])

    def member(weight: Tensor, bias: Tensor) -> Tensor:
        result: Tensor = functional_call(model.first, {"weight": weight, "bias": bias}, (h,))
        return result

    return torch.vmap(member)(weights, biases).mean(0)


def pairs(model: Mapping, h: Tensor) -> Tensor:
    """A map in a map, as masks of attention are made."""
    position = torch.arange(8)
    allowed = torch.vmap(torch.vmap(lambda i, j: j <= i, (None, 0)), (0, None))(position, position)
    return h @ (allowed * 1.0)


def half_without_gradient(model: Mapping, h: Tensor) -> Tensor:
    def of_row(row: Tensor) -> Tensor:
        with torch.no_grad():
            gate = model.inner(row).sigmoid()
        return gate * model.inner(row)

    return torch.vmap(of_row)(h)


def without_gradient(model: Mapping, h: Tensor) -> Tensor:
    with torch.no_grad():
        gate = torch.vmap(model.inner)(h)
    return h * gate


def in_half_precision(model: Mapping, h: Tensor) -> Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return torch.vmap(model.inner)(h).float()


def written_in_place(model: Mapping, h: Tensor) -> Tensor:
    def of_row(row: Tensor) -> Tensor:
        row = row * 2
        row.add_(1)
        row[0] = 3.0
        return row

    return torch.vmap(of_row)(h)


def dropped(model: Mapping, h: Tensor) -> Tensor:
    return torch.vmap(lambda row: F.dropout(row, 0.5), randomness="different")(h)


def several_results(model: Mapping, h: Tensor) -> Tensor:
    scaled, sums = torch.vmap(lambda row: (model.inner(row), {"sum": row.sum()}))(h)
    return scaled * sums["sum"][:, None]


def matrix_by_vectors(model: Mapping, h: Tensor) -> Tensor:
    """Multiplies by one matrix for all samples, by one for each sample, and by one with a shared vector."""
    weight, vector = model.last.weight, model.last.bias
    shared = torch.vmap(lambda row: weight @ row)(h)
    own = torch.vmap(lambda row: torch.mv(row.outer(row), row))(h)
    return shared + own + torch.vmap(lambda row: row.outer(vector).mv(vector))(h)


@pytest.mark.parametrize(
    "middle",
    [
        rows,
        matrix_by_vectors,
        columns,
        softmax_of_a_row,
        groups,
        ensemble,
        pairs,
        half_without_gradient,
        without_gradient,
        in_half_precision,
        written_in_place,
        dropped,
        several_results,
    ],
)
def test_a_mapped_function_is_the_model_s(middle: Middle) -> None:
    torch.manual_seed(0)
    pipe = pd2bw_fx.split(Mapping(middle), torch.randn(4, 8), cluster=2, costs="analytic")

    assert pipe.verify().worst.relative <= 1e-6
    code = [re.sub(r"#.*", "", stage.source) for stage in pipe.stages]  # comments name this file
    assert not any("vmap" in text or "batch_dim" in text for text in code)


def test_a_map_over_the_batch_leaves_its_size_open() -> None:
    torch.manual_seed(0)
    model = Mapping(rows)
    pipe = pd2bw_fx.split(model, torch.randn(4, 8), cluster=2, costs="analytic")

    x = torch.randn(7, 8)
    torch.testing.assert_close(pipe.run(x)["output"], model(x))


class EnsembleOfSequences(nn.Module):
    """(batch, 3, 8), multiplied by each member's matrix: torch asks flattened samples for their number."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 1)
        self.members = nn.Parameter(torch.randn(2, 8, 8))

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        averaged = torch.vmap(lambda matrix: (h @ matrix).tanh())(self.members).mean(0)
        result: Tensor = self.last(averaged)
        return result


def test_a_number_of_flattened_samples_is_made_of_the_batch_size() -> None:
    torch.manual_seed(0)
    model = EnsembleOfSequences()
    pipe = pd2bw_fx.split(model, torch.randn(4, 3, 8), cluster=3, num_stages=3, costs="analytic")

    x = torch.randn(7, 3, 8)
    torch.testing.assert_close(pipe.run(x)["output"], model(x))
    assert any("3 * batch" in stage.source for stage in pipe.stages)


def test_a_map_that_fixes_the_batch_is_traced_at_that_size() -> None:
    pipe = pd2bw_fx.split(Mapping(groups), torch.randn(4, 8), cluster=2, costs="analytic")

    assert pipe.graph.batch_symbol is None
    assert "traced at batch size 4 alone" in str(pipe.trace_report)


def test_an_exported_program_that_maps_is_refused() -> None:
    exported = torch.export.export(Mapping(rows), (torch.randn(4, 8),), strict=False)

    with pytest.raises(TraceError, match=r"torch\.vmap[\s\S]*pass the model itself"):
        pd2bw_fx.split(exported, cluster=2, costs="analytic")


def _either(model: nn.Module, x: Tensor) -> Tensor:
    result: Tensor = torch.cond(x.sum() > 0, lambda h: model(h) * 2, lambda h: model(h) - 1, (x,))
    return result


def _repeated(model: nn.Module, x: Tensor) -> Tensor:
    result: Tensor = torch.while_loop(lambda i, h: i < 3, lambda i, h: (i + 1, h * 2), (torch.tensor(0), x))[
        1
    ]
    return model(result)


@pytest.mark.parametrize(("run", "what"), [(_either, "cond"), (_repeated, "while_loop")])
def test_an_operator_that_runs_parts_of_the_model_is_refused_with_its_line(
    run: Callable[..., Tensor], what: str
) -> None:
    class Running(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            result: Tensor = run(super().forward, x)
            return result

    model = Running(nn.Linear(8, 8), nn.Linear(8, 8))
    with pytest.raises(TraceError, match=rf"torch\.{what} \(test_vmap_regions\.py:\d+: result.*torch\.where"):
        pd2bw_fx.split(model, torch.randn(4, 8), cluster=2, costs="analytic")
