"""A stage as a file: it runs alone, comes out the same every time, and says what it is."""

from __future__ import annotations

import ast
import contextlib
import hashlib
import io
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from pd2bw_fx.models.bert import Bert, BertConfig
from pd2bw_fx.models.gpt import GPT, GPTConfig
from pd2bw_fx.passes.codegen import generate
from pd2bw_fx.units import format_bytes, format_seconds
from tests.slow import slow
from tests.stages import ROOT, by_hand, case_of, of_our_own, planned
from tests.torchrun import TIMEOUT_S


class TestFiles:
    def test_a_stage_runs_alone_with_nothing_but_torch(self, tmp_path: Path) -> None:
        case = of_our_own("gpt")
        for program in generate(case.graph, planned(case, 2)):
            (tmp_path / f"stage_{program.stage}.py").write_text(program.source)

        done = subprocess.run(
            [sys.executable, "-I", "stage_1.py"],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )

        assert done.returncode == 0, done.stderr
        assert done.stdout == "() torch.float64\n"

    def test_the_same_bytes_come_out_whatever_the_hash_seed(self) -> None:
        script = (
            "import torch, pd2bw_fx\n"
            "from pd2bw_fx.models.moe import MoE, MoEConfig\n"
            "torch.manual_seed(0)\n"
            "model = MoE.from_config(MoEConfig(num_layers=2))\n"
            "pipe = pd2bw_fx.split(model, cluster=2, costs='analytic', check=False)\n"
            "print(''.join(program.source for program in pipe.programs))\n"
        )
        environment = {**os.environ, "PYTHONHASHSEED": "4242", "PYTHONPATH": str(ROOT)}
        done = subprocess.run(
            [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=TIMEOUT_S
        )
        assert done.returncode == 0, done.stderr
        here = io.StringIO()
        with contextlib.redirect_stdout(here):
            exec(script, {})

        assert sys.flags.hash_randomization  # it is another seed here
        assert done.stdout == here.getvalue()

    def test_the_same_bytes_come_out_twice_in_one_process(self) -> None:
        case = of_our_own("encdec")
        plan = planned(case, 3)

        digests = {
            hashlib.sha256(p.source.encode()).hexdigest()
            for _ in range(2)
            for p in generate(case.graph, plan)
        }

        assert len(digests) == 3

    @pytest.mark.parametrize("family", ["gpt", *slow(["bert"])])
    def test_the_source_is_as_long_for_many_equal_layers_as_for_few(self, family: str) -> None:
        def lines(num_layers: int) -> int:
            small = {"num_layers": num_layers, "width": 16, "sequence_length": 8}
            model = GPT(GPTConfig(**small)) if family == "gpt" else Bert(BertConfig(**small))
            case = case_of(model, model.example_inputs(batch_size=2))  # type: ignore[operator]
            inside = [
                index
                for index, block in enumerate(case.problem.blocks)
                if f".{num_layers // 2}" in "." + case.graph.operators[block.name].module_path
            ]
            cut = inside[3]  # in the middle of a layer, not between two
            halves = {block.name: int(index >= cut) for index, block in enumerate(case.problem.blocks)}
            programs = generate(case.graph, by_hand(case, halves))
            assert any("for i in range(" in p.source or "in self.blocks[" in p.source for p in programs)
            return sum(program.source.count("\n") for program in programs)

        assert abs(lines(8) - lines(5)) <= 2


class TestTheReasonOfACut:
    """The head of a file says why the stage ends where it does, as far as the plan tells."""

    def test_the_reason_names_what_crosses_the_load_and_the_bottleneck(self) -> None:
        case = of_our_own("gpt")
        plan = planned(case, 3)
        slowest = max(plan.stages, key=lambda stage: stage.load_s).stage

        heads = [_head(program.source) for program in generate(case.graph, plan)]

        load = format_seconds(plan.stages[slowest].load_s)
        for stage, head in enumerate(heads):
            is_slowest = plan.stages[stage].load_s >= 0.99 * plan.stages[slowest].load_s
            assert (": the bottleneck" in head) == is_slowest
            assert is_slowest or f"the bottleneck is stage {slowest} with {load}" in head
            assert "no other 3 stages that fit have a" in head
            assert "memory is used up" not in head
        num_bytes = sum(t.bytes + t.gradient_bytes for t in plan.transfers if t.source == 0)
        assert f"crosses, {format_bytes(num_bytes)}, gradient included" in heads[0]
        assert "behind it" not in heads[2]

    def test_the_reason_tells_where_memory_is_used_up(self) -> None:
        case = of_our_own("mlp")
        plan = planned(case, 2)
        full = replace(plan.stages[1], memory_limit_bytes=plan.stages[1].memory.total_bytes)

        programs = generate(case.graph, replace(plan, stages=(plan.stages[0], full)))

        assert ["memory is used up" in program.source for program in programs] == [False, True]

    def test_a_plan_without_a_price_or_a_cut_has_no_reason(self) -> None:
        case = of_our_own("mlp")
        uncut = by_hand(case, {block.name: 0 for block in case.problem.blocks})
        unpriced = by_hand(case, {block.name: i for i, block in enumerate(case.problem.blocks)})

        assert not any("Cut here" in p.source for p in generate(case.graph, uncut))
        assert not any("Cut here" in p.source for p in generate(case.graph, unpriced))


def _head(source: str) -> str:
    return " ".join((ast.get_docstring(ast.parse(source)) or "").split())
