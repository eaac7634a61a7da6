"""Casts to the type that a value has already: as traced they do nothing, under autocast they may.

x = self.proj(x).float()    bfloat16 under autocast, and the norm that follows is meant to be in float32
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from pd2bw_fx.program import FxProgram

from .facts import Facts, FakeRun
from .nodes import operator_name

CASTS = {"to", "type_as"}


def working_casts(program: FxProgram, facts: Facts, example: Mapping[str, torch.Tensor]) -> frozenset[str]:
    """The names of those that change a value's type where the program runs under autocast.

    The CPU's is asked, which leaves more results in low precision than CUDA's does.
    """
    idle = frozenset(node.name for node in program.graph.nodes if _is_idle(node))
    if not idle:
        return idle
    run = _UnderAutocast(program, facts, idle)
    with torch.autocast("cpu", torch.bfloat16):
        run.run_on(example)
    return frozenset(run.working)


def _is_idle(node: fx.Node) -> bool:
    """Whether it casts floats to the type that they have as traced; autocast lets 64 bits be."""
    if node.op != "call_function" or operator_name(node) not in CASTS:
        return False
    before, after = node.all_input_nodes[0].meta.get("val"), node.meta.get("val")
    if not isinstance(before, torch.Tensor) or not isinstance(after, torch.Tensor):
        return False
    return before.dtype == after.dtype and after.is_floating_point() and after.dtype != torch.float64


class _UnderAutocast(FakeRun):
    """Where an operator takes no operands of two types, its value is as it was traced."""

    def __init__(self, program: FxProgram, facts: Facts, idle: frozenset[str]) -> None:
        super().__init__(program, facts.mode)
        self.facts = facts
        self.idle = idle
        self.working: list[str] = []

    def run_node(self, n: fx.Node) -> Any:
        try:
            value = super().run_node(n)
        except Exception:  # of whatever operator
            value = self.facts.values[n.name]
        if n.name in self.idle and self.env[n.all_input_nodes[0]].dtype != value.dtype:
            self.working.append(n.name)
        return value
