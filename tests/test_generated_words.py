"""Operators are printed as the public functions they are, with the arguments that those take.

What is printed is compared bit for bit with the model. `python benchmarks/operators.py` does the same with
torch's own samples of every operator.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pd2bw_fx import split
from pd2bw_fx.passes.codegen import generate
from tests.stages import case_of, compared, planned, ruff_faults

_Function = Callable[[Tensor, Tensor], Tensor]


class _Calling(nn.Module):
    """x, hidden: (batch, 4, 6, 6)"""

    def __init__(self, function: _Function) -> None:
        super().__init__()
        self.first, self.last = nn.Conv2d(4, 4, 1), nn.Linear(6, 6)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.last(self.first(x)))


def _unpooled(x: Tensor, hidden: Tensor) -> Tensor:
    largest, places = F.max_pool2d(hidden, 2, return_indices=True)
    return F.max_unpool2d(largest, places, 2)


def _partly_doubled(x: Tensor, hidden: Tensor) -> Tensor:
    parts = hidden.clone()
    parts[:, torch.tensor([0, 2])] *= 2
    return parts


@pytest.mark.parametrize(
    ("function", "line"),
    [
        (lambda x, h: F.adaptive_max_pool2d(h, 3), "F.adaptive_max_pool2d({}, 3)"),
        (_unpooled, "largest, places = F.max_pool2d({}, 2, return_indices=True)"),
        (_unpooled, "F.max_unpool2d(largest, places, 2)"),
        (
            lambda x, h: F.interpolate(h, scale_factor=2),
            'F.interpolate({}, scale_factor=2.0, mode="nearest")',
        ),
        (
            lambda x, h: F.interpolate(h, size=(9, 5), mode="bilinear", align_corners=True),
            'F.interpolate({}, size=(9, 5), mode="bilinear", align_corners=True)',
        ),
        (
            lambda x, h: F.interpolate(h, scale_factor=(0.5, 2.0), mode="bicubic", antialias=True),
            '{}, scale_factor=(0.5, 2.0), mode="bicubic", antialias=True',
        ),
        (lambda x, h: F.unfold(h, 3, stride=2), "F.unfold({}, 3, stride=2)"),
        (lambda x, h: F.fold(F.unfold(h, 2), (6, 6), 2), "F.fold(F.unfold({}, 2), (6, 6), 2)"),
        (lambda x, h: F.avg_pool2d(h, (3, 2), ceil_mode=True), "F.avg_pool2d({}, (3, 2), ceil_mode=True)"),
        (lambda x, h: F.max_pool2d(h, (3, 2), padding=(1, 0)), "F.max_pool2d({}, (3, 2), padding=(1, 0))"),
        (lambda x, h: F.max_pool3d(h, 2), "F.max_pool3d({}, 2)"),
        (
            lambda x, h: F.grid_sample(h, x[..., :2], "nearest", "border", align_corners=True),
            'mode="nearest", padding_mode="border", align_corners=True',
        ),
        (
            lambda x, h: F.affine_grid(h[:, 0, :2, :3], (len(h), 4, 6, 6), align_corners=False),
            ", 4, 6, 6), align_corners=False)",
        ),
        (
            lambda x, h: F.conv_transpose2d(h, x[0].unsqueeze(1)[..., :3], stride=2),
            "F.conv_transpose2d({}, x[0].unsqueeze(1)[:, :, :, :3], stride=2)",
        ),
        (lambda x, h: F.group_norm(h, 2) + F.selu(h), "F.group_norm({0}, 2) + F.selu({0})"),
        (lambda x, h: F.cosine_similarity(h, x), "F.cosine_similarity({}, x)"),
        (
            lambda x, h: h.to(memory_format=torch.channels_last),
            "{}.to(memory_format=torch.channels_last)",
        ),
        (lambda x, h: torch.stft(h.flatten(1), 16, return_complex=True).abs(), ", 16, center=False, "),
        (lambda x, h: torch.fft.rfft2(h).real, "torch.fft.rfft2({}).real"),
        (lambda x, h: torch.linalg.vector_norm(h, dim=-1), "torch.linalg.vector_norm({}, dim=-1)"),
        (lambda x, h: torch.special.i0e(h), "torch.special.i0e({})"),
        (lambda x, h: F.normalize(h) @ F.normalize(h, dim=-1), "F.normalize({0}) @ F.normalize({0}, dim=-1)"),
        (lambda x, h: F.normalize(h, 1, (2, 3), 1e-6), "F.normalize({}, p=1, dim=(2, 3), eps=1e-6)"),
        (lambda x, h: h / h.norm(dim=1, keepdim=True).clamp_min(1e-9).expand_as(x), ".clamp_min(1e-9)"),
        (lambda x, h: h.mT - h.mH, "{0}.mT - {0}.mH"),
        (
            lambda x, h: torch.tensordot(h, h, dims=([1, 2], [1, 2])),
            "torch.tensordot({0}, {0}, dims=((1, 2), (1, 2)))",
        ),
        (
            lambda x, h: torch.cdist(h, x, compute_mode="donot_use_mm_for_euclid_dist"),
            'torch.cdist({}, x, compute_mode="donot_use_mm_for_euclid_dist"',
        ),
        (
            lambda x, h: F.binary_cross_entropy(h.sigmoid(), x.sigmoid(), reduction="sum"),
            'F.binary_cross_entropy(sigmoid, x.sigmoid(), reduction="sum")',
        ),
        (
            lambda x, h: F.poisson_nll_loss(h, x.relu(), reduction="sum"),
            'log_input=True, full=False, eps=1e-8, reduction="sum"',
        ),
        (lambda x, h: F.softplus(h, threshold=1), "F.softplus({}, threshold=1)"),
        (lambda x, h: F.hardtanh(h, -1, 0.5), "F.hardtanh({}, max_val=0.5)"),
        (lambda x, h: F.logsigmoid(h), "F.logsigmoid({})"),
        (lambda x, h: h + torch.empty_like(h).uniform_(-0.1, 0.1), ".uniform_(-0.1, to=0.1)"),
        (lambda x, h: h * (torch.zeros(6).double().uniform_() < 0.5), ".uniform_() < 0.5"),
        (_partly_doubled, " = torch.ops.aten.index_put.default("),
        (
            lambda x, h: F.batch_norm(h, None, None, training=True).sin(),
            "F.batch_norm({}, None, None, None, None, True, 0.1, 1e-5)",
        ),
        (lambda x, h: h * x.new_empty(6).exponential_(2.0), "x.new_empty(6).exponential_(lambd=2.0)"),
    ],
)  # fmt: skip
def test_the_public_word_with_its_own_arguments(function: _Function, line: str) -> None:
    torch.manual_seed(0)
    model = _Calling(function).double()
    case = case_of(model, (torch.rand(3, 4, 6, 6, dtype=torch.float64),))

    for num_stages in (1, 2):
        plan = planned(case, num_stages)
        programs = generate(case.graph, plan)
        text = "".join(program.source for program in programs)
        assert compared(case, plan, programs).exact
        if num_stages == 1:
            text = " ".join(text.replace("self.last(self.first(x))", "last").split())
            assert line.format("last") in text


class _Linked(nn.Module):
    """A graph's nodes with their neighbours: how many edges are no loops is known when it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        for layer in (self.first, self.last):
            hidden = layer(x)
            kept = edges[:, edges[0] != edges[1]]
            loops = torch.arange(x.shape[0]).repeat(2, 1)
            source, target = torch.cat([kept, loops], dim=1)
            weights = torch.ones(source.shape[0], 1, dtype=x.dtype)
            x = x + torch.zeros_like(hidden).index_add(0, target, hidden[source] * weights).tanh()
        return x


class _Spreading(nn.Module):
    """Its edges have a line of their own name that makes a size too; it has the device of its edges."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, edges: Tensor, x: Tensor) -> Tensor:
        loops = torch.arange(x.shape[0], device=x.device).repeat(2, 1)
        edges = edges[:, edges[0] != edges[1]]
        edges = torch.cat([edges, loops], dim=1)
        weights = torch.ones(edges.size(1), dtype=x.dtype, device=edges.device)
        return torch.zeros_like(x).index_add(0, edges[1], self.layer(x)[edges[0]] * weights[:, None])


class _Spread(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = _Spreading(), _Spreading()

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        return self.last(edges, self.first(edges, x).tanh())


class _Counted(nn.Module):
    """A layer is given the number of edges before any tensor, and makes a tensor."""

    class Ratio(nn.Module):
        def forward(self, count: int, x: Tensor) -> Tensor:
            return x / torch.full((4,), count, dtype=x.dtype, device=x.device)

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.ratio = nn.Linear(4, 4), self.Ratio()

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        return self.ratio(edges[:, edges[0] != edges[1]].shape[1], self.layer(x))


@pytest.mark.parametrize("kind", [_Linked, _Spread, _Counted])
def test_a_size_that_depends_on_values_is_read_off_its_own_tensor(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    edges = torch.tensor([[0, 1, 2, 2, 4], [1, 1, 0, 3, 4]])
    case = case_of(kind().double(), (torch.randn(5, 4, dtype=torch.float64), edges))

    for num_stages in (1, 2, 3):
        plan = planned(case, num_stages)
        assert compared(case, plan, generate(case.graph, plan)).exact


class _Spectral(nn.Module):
    """Writes into parts of complex numbers, which torch's scatters have no derivative for."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.weight = nn.Parameter(torch.randn(5, 5, dtype=torch.complex128))

    def forward(self, x: Tensor) -> Tensor:
        modes = torch.fft.rfft(self.first(x))
        mixed = torch.zeros_like(modes)
        mixed[..., :3] = (modes @ self.weight)[..., :3]
        mixed[:, 0] = modes[:, 1].conj()
        mixed[:, 1].mul_(2)
        return self.last(torch.fft.irfft(mixed, n=8)).square().mean()


def test_writes_to_parts_of_complex_numbers_have_their_gradients() -> None:
    torch.manual_seed(0)
    case = case_of(_Spectral().double(), (torch.randn(3, 4, 8, dtype=torch.float64),))

    for num_stages in (1, 2):
        plan = planned(case, num_stages)
        found = compared(case, plan, generate(case.graph, plan))
        assert found.worst.relative <= 1e-14


class _Plain(nn.Module):
    """Arguments that are what they are without being given."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4, eps=1e-3, momentum=0.2)
        self.kernel = nn.Parameter(torch.randn(4, 4, 3))
        self.inner, self.head = nn.Linear(8, 8), nn.Linear(4, 7)

    def forward(self, mask: Tensor, x: Tensor, labels: Tensor) -> Tensor:
        residual = x
        inner = self.inner(x)
        angles = x.cos()
        x = F.conv1d(F.elu(self.norm(inner + angles)), self.kernel, padding=1)
        x = x + residual * mask.to(mask.device, torch.bool)
        x = F.softplus(F.max_pool1d(x, 2).float())
        labels = F.pad(labels, (0, 1), value=-100)[:, 1:]
        return F.cross_entropy(self.head(x).transpose(1, 2), labels)


def test_default_arguments_are_left_out_and_an_authors_second_names_are_kept() -> None:
    example = (torch.ones(3, 4, 1), torch.randn(3, 4, 8), torch.zeros(3, 4, dtype=torch.int64))
    source = split(_Plain(), example, cluster=1, costs="analytic").stages[0].source

    assert "self.norm = nn.BatchNorm1d(4, eps=0.001, momentum=0.2)" in source
    assert "F.conv1d(F.elu(self.norm(inner + angles)), self.kernel, padding=1)" in source
    assert "F.softplus(F.max_pool1d(x, 2))" in source
    assert ".to(torch.bool)" in source
    assert "labels = F.pad(labels, (0, 1), value=-100)[:, 1:]" in source
    names = re.findall(r"^        (\w+) = ", source[source.index("def forward") :], re.MULTILINE)
    assert names[:4] == ["residual", "inner", "angles", "x"]


class _Shifted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 7)

    def forward(self, x: Tensor, words: Tensor) -> Tensor:
        return F.cross_entropy(self.head(x).flatten(0, 1), F.pad(words, (0, 1), value=-100)[:, 1:].flatten())


def test_what_a_loss_is_held_to_is_called_its_targets() -> None:
    example = (torch.randn(3, 4, 8), torch.zeros(3, 4, dtype=torch.int64))
    source = split(_Shifted(), example, cluster=1, costs="analytic").stages[0].source

    assert "targets = F.pad(words, (0, 1), value=-100)[:, 1:].flatten()" in source


class _Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.logit_scale = nn.Parameter(torch.ones(8, 1))

    def forward(self, scale: Tensor) -> Tensor:
        most = torch.log(torch.tensor(1.0 / 0.01))
        return torch.clamp(self.logit_scale, max=most).exp() * scale.log()


class _Numbers(nn.Module):
    """Tensors of one number that the forward makes, hands to a module and to a layer, or writes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.one = nn.Linear(8, 8), nn.Linear(1, 8)
        self.scaled = nn.ModuleList([_Scaled(), _Scaled()])

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for place, scaled in enumerate(self.scaled):
            x = x @ scaled(torch.tensor(0.5 + place)).expand(8, 8)
        x = torch.atan2(x, torch.tensor([[0.1]], dtype=torch.float64)) + self.one(torch.tensor([1.5]))
        x = torch.logaddexp(x, torch.tensor(float("-inf")))
        return x.mean() + torch.bitwise_or(torch.tensor(4, dtype=torch.int16), torch.tensor([1, 2])).sum()


def test_a_tensor_of_one_number_is_made_where_it_is_read() -> None:
    torch.manual_seed(0)
    case = case_of(_Numbers(), (torch.randn(3, 8),))

    for num_stages in (1, 2):
        plan = planned(case, num_stages)
        programs = generate(case.graph, plan)
        text = "".join(program.source for program in programs)
        assert compared(case, plan, programs).exact
        assert "most = torch.log(torch.full((), 100.0, device=scale.device))" in text
        for place, number in enumerate(("0.5", "1.5")):
            assert f"self.scaled[{place}](torch.full((), {number}, device=" in text
        assert "torch.full((1, 1), 0.1, dtype=torch.float64, device=" in text
        assert "self.one(torch.full((1,), 1.5, device=" in text
        assert 'torch.full((), float("-inf"), device=' in text
        assert "torch.full((), 4, dtype=torch.int16, device=" in text
        assert "torch.tensor([1, 2]).to(" in text
        assert sum(len(program.buffers) for program in programs) == 0


class _FewNumbers(nn.Module):
    """Tensors of a few numbers, which two blocks have others of, one is read often, and one is long."""

    class Block(nn.Module):
        def __init__(self, taps: list[float]) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)
            self.taps = taps

        def forward(self, x: Tensor) -> Tensor:
            return self.layer(x) * torch.tensor(self.taps, device=x.device).sum()

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            self.Block([0.1, tap, float("inf") if tap > 9 else 3e10]) for tap in (2, 4)
        )

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        often = torch.tensor([0.485, 0.456])
        for _ in range(3):
            x = x + torch.outer(often, often).sum()
        many = torch.tensor([[n / 7 for n in range(4)] for _ in range(4)], dtype=torch.float64)
        return (x[:, :4] @ many.to(x.dtype)).mean() + torch.arange(40).sum() + torch.tensor([0.5] * 17).sum()


def test_a_tensor_of_a_few_numbers_has_them_in_the_code(tmp_path: Path) -> None:
    torch.manual_seed(0)
    case = case_of(_FewNumbers(), (torch.randn(3, 8),))

    for num_stages in (1, 2):
        plan = planned(case, num_stages)
        programs = generate(case.graph, plan)
        text = "".join(program.source for program in programs)
        assert compared(case, plan, programs).exact
        (tmp_path / f"{num_stages}.py").write_text(programs[0].source)
        assert not ruff_faults(tmp_path)
        assert "torch.tensor([0.1, " in text
        assert "[0.0, 0.14285714285714285, 0.2857142857142857, 0.42857142857142855]," in text
        assert ", torch.tensor([0.485, 0.456]))" in text
        assert "torch.empty(17)" in text
    assert "Block(2.0), Block(4.0)" in generate(case.graph, planned(case, 1))[0].source
