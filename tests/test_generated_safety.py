"""Whatever a model calls things and whatever constants it has, they stay data."""

from __future__ import annotations

import ast
import linecache
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pd2bw_fx.errors import TraceError
from pd2bw_fx.passes.codegen import generate
from pd2bw_fx.passes.codegen.literals import literal
from tests.stages import by_hand, case_of, compared, of_our_own, planned


class Hostile(nn.Module):
    """Every name and constant is one that would break out of source it is pasted into."""

    names = (
        "storage", "numpy", "gi_frame", "class", "print", "forward", "self", "torch", "__secret__",
        "_Hostile__mangled", "a b", "naïve",
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
