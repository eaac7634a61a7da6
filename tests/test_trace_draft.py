"""What stops torch.export is named by line and cause, whether or not another front end carries the model."""

from __future__ import annotations

import linecache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from pd2bw_fx import split
from pd2bw_fx.errors import TraceError
from pd2bw_fx.passes.normalise import normalise
from pd2bw_fx.passes.trace import trace


def test_the_error_names_every_line_that_depends_on_values() -> None:
    class Choosy(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(4, 4)
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            y = self.head(x)
            self.calls += 1
            if y.sum() > 0:
                y = y * 2
            if x.mean() > 0:
                y = y + 1
            return y.mean()

    model = Choosy()
    before = torch.get_rng_state()

    with pytest.raises(TraceError) as raised:
        trace(model, (torch.randn(3, 4, generator=torch.Generator().manual_seed(0)),))

    assert "depends on the values of a tensor: if y.sum() > 0:" in str(raised.value)
    assert "depends on the values of a tensor: if x.mean() > 0:" in str(raised.value)
    assert model.calls == 0
    assert torch.equal(torch.get_rng_state(), before)


def test_the_report_names_the_line_that_fixes_the_batch_size() -> None:
    class Even(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            scale = 2.0 if x.shape[0] == 6 else 1.0
            return (self.head(x) * scale).mean()

    report = trace(Even(), (torch.randn(6, 4),)).report

    assert report.tracer == "export-static"
    assert [attempt.tracer for attempt in report.attempts] == ["export"]  # no values are asked for
    assert any("x.shape[0] == 6" in note and "fixes it" in note for note in report.notes)


def test_values_that_the_front_end_has_known_are_no_reason() -> None:
    class Segments(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(4, 4)
            self.lengths = torch.tensor([2, 1])

        def forward(self, x: Tensor) -> Tensor:
            parts = self.head(x).split(self.lengths.repeat_interleave(self.lengths).tolist(), 1)
            return sum(row.mean() for part in parts for row in list(part))

    report = trace(Segments(), (torch.randn(6, 5, 4),)).report

    assert report.tracer == "export-static"
    assert len(report.notes) == 2
    assert report.notes[0].endswith(
        "depends on the batch size, and fixes it: "
        "return sum(row.mean() for part in parts for row in list(part))"
    )


def test_an_index_by_an_element_of_a_tensor_is_named_and_nothing_printed_besides(
    capfd: pytest.CaptureFixture[str],
) -> None:
    class Permuted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(3, 3)
            self.register_buffer("order", torch.tensor([2, 0, 1]))

        def forward(self, x: Tensor) -> Tensor:
            parts = self.head(x)
            slots = [x] * 3
            for place in self.order:
                slots[place] = parts[..., place]
            return torch.stack(slots, -1).square().mean()

    with pytest.raises(TraceError, match=r"stopped at test_trace_draft\.py:\d+: slots\[place\] = "):
        normalise(trace(Permuted(), (torch.randn(4, 3),)))
    assert capfd.readouterr().err == ""


_BESIDE_TORCH = """
from torch import nn

class Choosing(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        h = self.linear(x)
        return h.mean() if h.sum() > 0 else h.sum()
"""


def test_a_library_whose_name_begins_with_torchs_is_not_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    file = str(Path(torch.__file__).resolve().parent) + "beside/model.py"
    lines = _BESIDE_TORCH.splitlines(keepends=True)
    monkeypatch.setitem(linecache.cache, file, (len(_BESIDE_TORCH), None, lines, file))
    library: dict[str, Any] = {"__name__": "torchbeside"}
    exec(compile(_BESIDE_TORCH, file, "exec"), library)

    with pytest.raises(TraceError, match=r"for you to allow, at model\.py:11: return h\.mean\(\) if"):
        split(library["Choosing"](), torch.randn(3, 4), cluster=2, costs="analytic")
