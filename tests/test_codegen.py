"""Generated stages compute what the model computes, wherever it is cut and at any batch size.

What is expected comes from the live model and from ruff, never from the generator.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from pd2bw_fx.models import MODELS
from pd2bw_fx.passes.codegen import generate
from tests.stages import by_hand, compared, of_our_own, planned, ruff_faults, run_stages


@pytest.mark.parametrize("num_stages", [2, 3])
@pytest.mark.parametrize("name", sorted(MODELS))
def test_stages_are_the_model_bit_for_bit_and_pass_ruff(name: str, num_stages: int, tmp_path: Path) -> None:
    case = of_our_own(name)
    plan = planned(case, num_stages)

    programs = generate(case.graph, plan)

    for program in programs:
        (tmp_path / f"stage_{program.stage}.py").write_text(program.source)
    assert compared(case, plan, programs).exact
    assert ruff_faults(tmp_path) == ""
    assert not any("torch.ops" in program.source for program in programs)


class TestAnyAssignment:
    """Stages need not be contiguous in the traced order: whatever has no way back is a pipeline."""

    @pytest.mark.parametrize("name", ["mlp", "gpt", "bert", "resnet", "encdec", "moe"])
    def test_a_random_assignment_without_a_way_back_computes_the_same(self, name: str) -> None:
        case = of_our_own(name)
        feeders: dict[str, list[str]] = {block.name: [] for block in case.problem.blocks}
        for value in case.problem.values:
            for consumer in value.consumers:
                feeders[consumer].append(value.producer)

        @settings(
            max_examples=5, deadline=None, derandomize=True, database=None,
            suppress_health_check=list(HealthCheck), phases=[Phase.generate],
        )  # fmt: skip
        @given(st.data())
        def holds(data: st.DataObject) -> None:
            num_stages = data.draw(st.integers(2, 4))
            stage_of: dict[str, int] = {}
            for block in case.problem.blocks:
                earliest = max((stage_of[feeder] for feeder in feeders[block.name]), default=0)
                stays = data.draw(st.integers(0, 9)) < 8
                stage_of[block.name] = earliest if stays else data.draw(st.integers(earliest, num_stages - 1))
            plan = by_hand(case, stage_of)

            found = compared(case, plan)

            assert found.worst.relative <= 1e-13  # raises by itself where a tensor is missing
            assert all(d.largest == 0 for d in found.differences if d.name.startswith("output"))

        holds()

    def test_one_operator_a_stage_is_a_pipeline_too(self) -> None:
        case = of_our_own("mlp")
        plan = by_hand(case, {block.name: i for i, block in enumerate(case.problem.blocks)})

        found = compared(case, plan)

        assert plan.num_stages == len(case.problem.blocks) > 10
        assert found.exact


class TestOtherSizes:
    @pytest.mark.parametrize("name", ["gpt", "bert", "resnet", "moe"])
    def test_a_microbatch_of_another_size_than_the_traced_one_goes_through(self, name: str) -> None:
        case = of_our_own(name)
        larger = case.model.example_inputs(batch_size=5)  # type: ignore[operator]
        inputs = {
            name: value.double() if value.is_floating_point() else value
            for name, value in zip(case.graph.inputs, larger, strict=True)
        }
        programs = generate(case.graph, planned(case, 3))

        torch.manual_seed(7)
        found = run_stages(case, programs, inputs)
        torch.manual_seed(7)
        expected = case.model(*inputs.values())

        assert torch.equal(found["loss"], expected)
