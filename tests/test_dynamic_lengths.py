"""With tracer="export-sequence" the length of token sequences is open too, where the model allows it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import pd2bw_fx
from benchmarks.coverage_models import CASES, built
from pd2bw_fx.errors import InputError
from pd2bw_fx.passes.codegen import generate
from pd2bw_fx.passes.trace import trace
from tests.slow import slow
from tests.stages import Case, case_of, compared, planned, run_stages


def of_another_size(case: Case, shorter_by: int) -> dict[str, Tensor]:
    """Two samples more than the example, each shorter."""
    wider = {name: torch.cat([value[:2], value]) for name, value in case.traced.examples.items()}
    return {name: value[:, : value.shape[1] - shorter_by].contiguous() for name, value in wider.items()}


@pytest.mark.parametrize("name", ["gpt", "hf-gpt2", "hf-llama", *slow(["hf-mistral"])])
def test_stages_take_sequences_of_another_length_than_the_traced_one(name: str) -> None:
    model, inputs = built({case.name: case for case in CASES}[name])
    case = case_of(model, (), inputs, tracer="export-sequence")
    programs = generate(case.graph, planned(case, 2))
    other = of_another_size(case, 5)
    assert case.traced.call is not None

    torch.manual_seed(7)
    found = run_stages(case, programs, other)
    torch.manual_seed(7)
    expected = case.traced.call(other)

    assert case.traced.report.tracer == "export-sequence"
    assert all(port.spec.shape[1] == "sequence" for port in programs[0].outputs if port.spec.shape)
    assert all(torch.equal(found[output], expected[output]) for output in expected)
    assert compared(case, planned(case, 2), programs).worst.relative < 1e-15


class Bounded(nn.Module):
    """Sequences of two lengths, one of them within a table of positions."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(9, 4)
        self.register_buffer("places", torch.arange(16).view(1, 16))

    def forward(self, left: Tensor, right: Tensor, scores: Tensor) -> Tensor:
        placed = self.words(left) + self.places[:, : left.shape[1]].unsqueeze(-1)  # type: ignore[index]
        mixed = placed.mean(1, keepdim=True) * self.words(right)
        return (mixed.sum((1, 2)) * scores).mean()


def test_each_length_has_its_own_name_and_the_models_own_bound() -> None:
    tokens = torch.randint(9, (3, 7))
    inputs = (tokens, tokens[:, :5].clone(), torch.randn(3))

    case = case_of(Bounded(), inputs, tracer="export-sequence")
    programs = generate(case.graph, planned(case, 1))

    shapes = {name: spec.shape for name, spec in case.graph.inputs.items()}
    assert shapes == {"left": ("batch", "sequence"), "right": ("batch", "sequence_2"), "scores": ("batch",)}
    other = {"left": torch.randint(9, (4, 16)), "right": torch.randint(9, (4, 2)), "scores": torch.randn(4)}
    assert torch.equal(run_stages(case, programs, other)["loss"], case.model(*other.values()))


class Masked(nn.Module):
    """A causal mean, by a mask that is as long as the longest sequence: at that length all of it is taken."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(9, 4)
        self.register_buffer("mask", torch.ones(16, 16).tril().view(1, 16, 16))

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        assert length <= 16
        words = self.words(tokens)
        scores = words @ words.transpose(1, 2)
        scores = scores.masked_fill(self.mask[:, :length, :length] == 0, float("-inf"))  # type: ignore[index]
        return (scores.softmax(-1) @ words).square().mean()


@pytest.mark.parametrize("length", [7, 16])
def test_a_part_of_a_buffer_of_the_longest_length_leaves_lengths_open(length: int) -> None:
    case = case_of(Masked(), (torch.randint(9, (3, length)),), tracer="export-sequence")
    programs = generate(case.graph, planned(case, 2))

    assert case.traced.report.tracer == "export-sequence"
    for other in (2, 7, 16):
        tokens = torch.randint(9, (4, other))
        assert torch.equal(run_stages(case, programs, {"tokens": tokens})["loss"], case.model(tokens))
    assert compared(case, planned(case, 2), programs).exact


def test_a_model_that_fixes_its_length_is_traced_at_that_length_and_the_report_says_so() -> None:
    class Fixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words = nn.Embedding(9, 4)
            self.head = nn.Linear(28, 1)

        def forward(self, tokens: Tensor) -> Tensor:
            return self.head(self.words(tokens).flatten(1)).mean()

    traced = trace(Fixed(), (torch.randint(9, (3, 7)),), tracer="export-sequence")

    assert traced.report.tracer == "export"
    assert traced.dynamic_batch
    assert [attempt.tracer for attempt in traced.report.attempts] == ["export-sequence"]
    assert "7" in traced.report.attempts[0].reason
    pipe = pd2bw_fx.split(
        Fixed(), torch.randint(9, (3, 7)), cluster=1, costs="analytic", tracer="export-sequence"
    )
    with pytest.raises(InputError, match="why tracer='export-sequence' has not left this one open"):
        pipe.run(torch.randint(9, (3, 6)))
