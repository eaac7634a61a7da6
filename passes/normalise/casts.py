"""Casts to the type that a value has already: as traced they do nothing, under autocast they may.

x = self.proj(x).float()    bfloat16 under autocast, and the norm that follows is meant to be in float32

And where there is none but has to be one:

out = torch.zeros(8, 4, dtype=h.dtype)      float32 as traced, whatever type h has later
out[order] = h[order]                       takes no other type than its own
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
# Operators whose operands must be of one type, and at which place the one is that is put into the first.
_PUTS = {
    "index_put": 2,
    "masked_scatter": 2,
    "index_add": 3,
    "index_copy": 3,
    "scatter": 3,
    "scatter_add": 3,
    "scatter_reduce": 3,
}


def working_casts(program: FxProgram, facts: Facts, example: Mapping[str, torch.Tensor]) -> frozenset[str]:
    """The names of those that change a value's type where the program runs under autocast, with new ones.

    The CPU's is asked, which leaves more results in low precision than CUDA's does.
    """
    idle = frozenset(node.name for node in program.graph.nodes if _is_idle(node))
    if not idle and not any(_put_by(node) for node in program.graph.nodes):
        return idle
    run = _UnderAutocast(program, facts, idle)
    with torch.autocast("cpu", torch.bfloat16):
        run.run_on(example)
    return frozenset((*run.working, *(_cast(node, facts) for node in run.of_two_types)))


def _cast(node: fx.Node, facts: Facts) -> str:
    """Casts what `node` puts into its first operand to the type of that; the name of the cast."""
    base, put = node.args[0], _put_by(node)
    assert put is not None
    with node.graph.inserting_before(node):
        cast = node.graph.call_function(torch.ops.aten.type_as.default, (put, base))
    cast.meta = dict(node.meta) | {"val": put.meta.get("val")}
    node.args = tuple(cast if place == _place(node) else arg for place, arg in enumerate(node.args))
    facts.values[cast.name], facts.storages[cast.name] = facts.values[put.name], facts.storages[put.name]
    facts.aliases[cast.name] = (put,)
    return cast.name


def _put_by(node: fx.Node) -> fx.Node | None:
    """The operand that is put into the first one."""
    place = _place(node)
    put = node.args[place] if place is not None and place < len(node.args) else None
    return put if isinstance(put, fx.Node) and isinstance(node.args[0], fx.Node) else None


def _place(node: fx.Node) -> int | None:
    is_of_torch = isinstance(node.target, torch._ops.OpOverload)
    return _PUTS.get(operator_name(node).removesuffix("_")) if is_of_torch else None


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
        self.of_two_types: list[fx.Node] = []

    def run_node(self, n: fx.Node) -> Any:
        if (put := _put_by(n)) is not None and self.env[put].dtype != self.env[n.all_input_nodes[0]].dtype:
            self.of_two_types.append(n)
        try:
            value = super().run_node(n)
        except Exception:  # of whatever operator
            value = self.facts.values[n.name]
        if n.name in self.idle and self.env[n.all_input_nodes[0]].dtype != value.dtype:
            self.working.append(n.name)
        return value
