"""Generated stages: they compute what the model computes, read well, stand alone, and do nothing else.

What is expected comes from the live model, from ruff, and from Python itself, never from the generator.
"""

from __future__ import annotations

import ast
import functools
import hashlib
import linecache
import math
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from pd2bw_fx.cluster import Cluster
from pd2bw_fx.costs import StageMemory
from pd2bw_fx.errors import TraceError
from pd2bw_fx.graph import OperatorGraph
from pd2bw_fx.models import MODELS, build
from pd2bw_fx.models.bert import Bert, BertConfig
from pd2bw_fx.models.gpt import GPT, GPTConfig
from pd2bw_fx.passes.coarsen import coarsen
from pd2bw_fx.passes.codegen import generate
from pd2bw_fx.passes.codegen.literals import literal
from pd2bw_fx.passes.normalise import normalise
from pd2bw_fx.passes.partition import partition
from pd2bw_fx.passes.profile import profile
from pd2bw_fx.passes.trace import trace
from pd2bw_fx.passes.verify import Verification, verify
from pd2bw_fx.plan import Plan, StagePlan
from pd2bw_fx.problem import Problem
from pd2bw_fx.program import tensors
from pd2bw_fx.stage import StageProgram, build_module
from pd2bw_fx.traced import Traced

ROOT = Path(__file__).parent.parent
CLUSTERS = {count: Cluster.uniform(count) for count in (1, 2, 3)}


@dataclass(frozen=True, slots=True)
class Case:
    model: nn.Module
    traced: Traced
    graph: OperatorGraph
    problem: Problem


def case_of(
    model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None, tracer: str = "auto"
) -> Case:
    traced = trace(model, args, kwargs or {}, tracer=tracer)
    graph = normalise(traced)
    costs = profile(graph, traced.examples, device=CLUSTERS[1].devices[0], method="analytic")
    return Case(model, traced, graph, coarsen(graph, costs, CLUSTERS[1]))


@functools.cache
def of_our_own(name: str) -> Case:
    torch.manual_seed(0)
    model = build(name).double()
    inputs = [x.double() if x.is_floating_point() else x for x in model.example_inputs(batch_size=3)]  # type: ignore[operator]
    return case_of(model, inputs)


def planned(case: Case, num_stages: int) -> Plan:
    cluster = CLUSTERS[num_stages]
    costs = profile(case.graph, case.traced.examples, device=cluster.devices[0], method="analytic")
    return partition(coarsen(case.graph, costs, cluster), cluster, num_stages=num_stages)


def by_hand(case: Case, stage_of_block: Mapping[str, int], device_name: str = "cpu:0") -> Plan:
    """A plan of a given assignment; stages nobody is assigned to are left out."""
    numbers = {stage: i for i, stage in enumerate(sorted(set(stage_of_block.values())))}
    members: list[list[str]] = [[] for _ in numbers]
    for block in case.problem.blocks:
        members[numbers[stage_of_block[block.name]]] += block.operators
    position = {name: i for i, name in enumerate(case.graph.operators)}
    stages = tuple(
        StagePlan(
            stage=stage, device=stage, device_name=device_name,
            operators=tuple(sorted(names, key=position.__getitem__)), parameters=(),
            forward_s=0.0, backward_s=0.0, send_s=0.0, receive_s=0.0,
            memory=StageMemory(0, 0, 0, 0, 0, 0), memory_limit_bytes=0, microbatches_in_flight=1,
        )
        for stage, names in enumerate(members)
    )  # fmt: skip
    return Plan(
        stages=stages, transfers=(), bottleneck_s=0.0, bound_s=0.0, method="2bw",
        microbatches_per_update=len(stages), solver="by hand", planning_s=0.0,
        fingerprint=case.graph.fingerprint(),
    )  # fmt: skip


def compared(case: Case, plan: Plan, programs: Sequence[StageProgram] | None = None) -> Verification:
    programs = generate(case.graph, plan) if programs is None else programs
    assert case.traced.call is not None
    return verify(
        case.graph, plan, programs, tensors(case.graph), case.traced.examples,
        model=case.model, forward=case.traced.call,
    )  # fmt: skip


def run_stages(
    case: Case, programs: Sequence[StageProgram], inputs: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Forward through the stages; model outputs by name."""
    values: dict[str, Tensor] = {}
    outputs: dict[str, Tensor] = {}
    for program in programs:
        module = build_module(program, tensors(case.graph))
        arguments = [inputs[p.value] if p.source is None else values[p.value] for p in program.inputs]
        returned = module(*arguments)
        for port, value in zip(
            program.outputs, (returned,) if isinstance(returned, Tensor) else returned, strict=True
        ):
            values[port.value] = value
            if port.model_output is not None:
                outputs[port.model_output] = value
    return outputs


def ruff_faults(folder: Path) -> str:
    ruff = [sys.executable, "-m", "ruff"]
    config = ["--config", str(ROOT / "pyproject.toml"), "--no-cache"]
    lint = subprocess.run([*ruff, "check", "-q", *config, str(folder)], capture_output=True, text=True)
    layout = subprocess.run(
        [*ruff, "format", "--diff", "-q", *config, str(folder)], capture_output=True, text=True
    )
    return lint.stdout + lint.stderr + layout.stdout + layout.stderr


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


class TestFiles:
    def test_a_stage_runs_alone_with_nothing_but_torch(self, tmp_path: Path) -> None:
        case = of_our_own("gpt")
        for program in generate(case.graph, planned(case, 2)):
            (tmp_path / f"stage_{program.stage}.py").write_text(program.source)

        done = subprocess.run(
            [sys.executable, "-I", "stage_1.py"], cwd=tmp_path, capture_output=True, text=True, timeout=60
        )

        assert done.returncode == 0, done.stderr
        assert done.stdout == "() torch.float64\n"

    def test_the_same_bytes_come_out_whatever_the_hash_seed(self) -> None:
        script = (
            "import hashlib, torch, pd2bw_fx\n"
            "from pd2bw_fx.models import build\n"
            "torch.manual_seed(0)\n"
            "pipe = pd2bw_fx.split(build('moe'), cluster=2, costs='analytic', check=False)\n"
            "print(hashlib.sha256(''.join(p.source for p in pipe.programs).encode()).hexdigest())\n"
        )
        digests = set()
        for seed in ("1", "4242"):
            environment = {**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": str(ROOT)}
            done = subprocess.run(
                [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=120
            )
            assert done.returncode == 0, done.stderr
            digests.add(done.stdout)

        assert len(digests) == 1

    def test_the_same_bytes_come_out_twice_in_one_process(self) -> None:
        case = of_our_own("encdec")
        plan = planned(case, 3)

        digests = {
            hashlib.sha256(p.source.encode()).hexdigest()
            for _ in range(2)
            for p in generate(case.graph, plan)
        }

        assert len(digests) == 3

    @pytest.mark.parametrize("family", ["gpt", "bert"])
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

        assert abs(lines(24) - lines(12)) <= 2


class Hostile(nn.Module):
    """Every name and constant is one that would break out of source it is pasted into."""

    names = (
        "class", "print", "forward", "self", "torch", "__secret__", "_Hostile__mangled", "a b", "naïve",
        'x"] or boom()["', "line\nimport os", "{brace}", "back\\slash", "'''", '"""', "#",
    )  # fmt: skip

    def __init__(self) -> None:
        super().__init__()
        for name in self.names:
            if name == "forward":
                continue
            layer: nn.Module = nn.Linear(4, 4)
            if name == "a b":  # a class of a hostile name, with a parameter of a hostile name
                layer = type('Evil:\n    boom()\nclass "', (_Scaling,), {})()
            self.add_module(name, layer)
        self.register_parameter('p"); boom(); ("', nn.Parameter(torch.ones(4)))
        self.register_buffer("lambda", torch.ones(4))

    def forward(self, batch: dict[str, Tensor]) -> dict[str, Tensor]:
        hidden = batch['in"\nboom()']
        for name in self.names:
            if name != "forward":
                hidden = torch.tanh(getattr(self, name)(hidden))
        hidden = hidden * getattr(self, 'p"); boom(); ("') + getattr(self, "lambda")
        hidden = torch.nan_to_num(hidden, nan=math.nan, posinf=math.inf, neginf=-math.inf)
        hidden = torch.where(hidden > 1e308, -math.inf, hidden).clamp(-1e308, 1e308)
        hidden = F.gelu(torch.einsum("ij,ij->ij", hidden, hidden), approximate="tanh")
        hidden = torch.div(hidden, 3, rounding_mode="floor") + hidden * -2.5e-324 - -1.0
        return {"loss": hidden.square().mean(), 'out"""\nboom()': hidden}


class _Scaling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_parameter("for", nn.Parameter(torch.ones(4)))

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden * getattr(self, "for")


class TestHostileModels:
    """Attribute names, string and float constants, file and class names are anything; they stay data."""

    def test_names_and_constants_cannot_become_code_and_stay_exact(self) -> None:
        torch.manual_seed(0)
        case = case_of(Hostile().double(), ({'in"\nboom()': torch.randn(3, 4, dtype=torch.float64)},))

        plans = [by_hand(case, {block.name: 0 for block in case.problem.blocks}), planned(case, 3)]

        for plan in plans:
            programs = generate(case.graph, plan)
            for program in programs:
                assert "boom" not in _names_used(program.source)
            assert compared(case, plan, programs).exact

    def test_a_hostile_device_name_stays_in_the_docstring(self) -> None:
        case = of_our_own("mlp")
        plan = by_hand(case, {b.name: 0 for b in case.problem.blocks}, device_name='x"""\nboom()\n"""\\')

        (program,) = generate(case.graph, plan)

        assert "boom" not in _names_used(program.source)
        assert compared(case, plan, [program]).exact

    def test_a_source_file_of_a_hostile_name_stays_in_a_comment(self) -> None:
        file = 'evil"""\nboom()\n.py'
        source = "def forward(self, x):\n    import_os = self.inner(x) * 2\n    return import_os.sum()\n"
        linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
        namespace: dict[str, Any] = {}
        exec(compile(source, file, "exec"), namespace)
        kind = type("Model", (nn.Module,), {"forward": namespace["forward"]})
        model = kind().double()
        model.inner = nn.Linear(4, 4).double()
        try:
            case = case_of(model, (torch.randn(3, 4, dtype=torch.float64),))
            (program,) = generate(case.graph, by_hand(case, {b.name: 0 for b in case.problem.blocks}))
        finally:
            del linecache.cache[file]

        assert "boom" not in _names_used(program.source)

    def test_a_constant_that_is_no_plain_value_is_refused_by_its_type(self) -> None:
        class Sly(float):
            def __repr__(self) -> str:
                return "boom()"

        with pytest.raises(TraceError, match="Sly"):
            literal(Sly(1.0))

    @pytest.mark.parametrize(
        "value",
        [0, -7, True, None, 1.5, -0.0, math.inf, -math.inf, 1e308, 5e-324, "", '"', "\\", "\n\r\t\0",
         "é\U0001f600", "'''", '"""', (1,), (), [1, (2.0, "x")], slice(None, 3, -1), ...],
    )  # fmt: skip
    def test_a_literal_reads_back_as_the_value(self, value: Any) -> None:
        text = literal(value)

        assert text.isascii()
        assert "\n" not in text
        back = eval(text, {"float": float, "slice": slice})
        assert type(back) is type(value)
        assert back == value
        assert not isinstance(value, float) or math.copysign(1, back) == math.copysign(1, value)


def _names_used(source: str) -> set[str]:
    """Every name and attribute that the source would evaluate."""
    nodes = list(ast.walk(ast.parse(source)))
    names = {node.id for node in nodes if isinstance(node, ast.Name)}
    return names | {node.attr for node in nodes if isinstance(node, ast.Attribute)}


class TestWhatTheModelSays:
    def test_unread_parameters_and_buffers_keep_their_place(self) -> None:
        class Spare(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.first = nn.Linear(4, 4)
                self.second = nn.Linear(4, 1)
                self.spare = nn.Linear(3, 3)
                self.register_buffer("counts", torch.arange(3))

            def forward(self, x: Tensor) -> Tensor:
                return self.second(torch.relu(self.first(x))).mean()

        case = case_of(Spare(), (torch.randn(3, 4),))
        programs = generate(case.graph, planned(case, 2))

        held = [name for program in programs for name in (*program.parameters, *program.buffers)]

        assert sorted(held) == sorted(case.model.state_dict())

    def test_regions_without_gradient_and_with_autocast_are_kept(self) -> None:
        class Mixed(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.first = nn.Linear(8, 8)
                self.frozen = nn.Linear(8, 8)
                self.last = nn.Linear(8, 1)

            def forward(self, x: Tensor) -> Tensor:
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    hidden = self.first(x)
                with torch.no_grad():
                    gate = torch.sigmoid(self.frozen(x))
                with torch.autocast("cpu", dtype=torch.bfloat16):
                    hidden = torch.relu(hidden) @ self.first.weight
                return self.last(hidden.float() * gate).mean()

        torch.manual_seed(0)
        case = case_of(Mixed(), (torch.randn(3, 8),))

        for num_stages in (1, 2, 3):
            plan = planned(case, num_stages)
            programs = generate(case.graph, plan)
            text = "".join(program.source for program in programs)
            assert 'with torch.autocast("cpu", dtype=torch.bfloat16):' in text
            assert "with torch.no_grad():" in text
            found = compared(case, plan, programs)
            # In two stages the gate is elsewhere, and the two regions are one with one cast of the weight.
            assert found.exact if num_stages == 1 else found.worst.relative <= 2**-8

    def test_no_device_of_the_trace_is_baked_in(self) -> None:
        class Positions(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.table = nn.Embedding(16, 4)

            def forward(self, x: Tensor) -> Tensor:
                places = torch.arange(x.shape[1], device=x.device)
                mask = torch.ones(x.shape[1], 1, device=x.device).tril()
                return (x + self.table(places) * mask).to(x.device).mean()

        case = case_of(Positions(), (torch.randn(3, 5, 4),))
        plan = by_hand(case, {b.name: 0 for b in case.problem.blocks})

        (program,) = generate(case.graph, plan)

        assert "cpu" not in program.source.split('"""')[2]
        assert "x.device" in program.source
        on_meta = build_module(program, tensors(case.graph)).to("meta")
        assert on_meta(torch.empty(7, 5, 4, device="meta")).device.type == "meta"

    def test_a_model_may_return_its_input(self) -> None:
        class Echo(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

            def forward(self, x: Tensor, y: Tensor) -> dict[str, Tensor]:
                return {
                    "loss": F.mse_loss(self.second(torch.tanh(self.first(x))), y),
                    "seen": x,
                    "twice": y * 2,
                }

        case = case_of(Echo().double(), (torch.randn(3, 4).double(), torch.randn(3, 4).double()))

        assert compared(case, planned(case, 2)).exact

    def test_the_same_layer_called_twice_is_one_class_and_one_module(self) -> None:
        class Recurrent(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.step = nn.Sequential(nn.Linear(6, 6), nn.Tanh())

            def forward(self, x: Tensor) -> Tensor:
                for _ in range(3):
                    x = self.step(x)
                return x.square().mean()

        case = case_of(Recurrent().double(), (torch.randn(3, 6).double(),))
        plan = planned(case, 2)
        programs = generate(case.graph, plan)

        assert all(program.source.count("nn.Linear(") == 1 for program in programs)
        assert compared(case, plan, programs).worst.relative <= 1e-14
