"""Casts to the type that a value already has: they do nothing as traced, but may under autocast.

x = self.proj(x).float()    bfloat16 under autocast, and the norm that follows is meant to be in float32

Also casts that are missing:

out = torch.zeros(8, 4, dtype=h.dtype)      float32 as traced, whatever type h has later
out[order] = h[order]                       accepts no other type than its own
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
# Operators whose operands must have one type, and the place of the operand that is put into the first one.
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
    """Returns the names of casts that change a type under autocast, and adds casts that are missing there.

    The CPU's autocast decides, which leaves more results in low precision than CUDA's.
    """
    idle = frozenset(node.name for node in program.graph.nodes if _is_idle(node))
    if not idle and not any(_put_by(node) for node in program.graph.nodes):
        return idle
    run = _UnderAutocast(program, facts, idle)
    with torch.autocast("cpu", torch.bfloat16):
        run.run_on(example)
    return frozenset((*run.working, *(_cast(node, facts) for node in run.of_two_types)))


def _cast(node: fx.Node, facts: Facts) -> str:
    """Casts what `node` puts into its first operand to that operand's type; returns the name of the cast."""
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
    """Returns the operand that the node puts into its first one, or None if it does no such thing."""
    place = _place(node)
    put = node.args[place] if place is not None and place < len(node.args) else None
    return put if isinstance(put, fx.Node) and isinstance(node.args[0], fx.Node) else None


def _place(node: fx.Node) -> int | None:
    is_of_torch = isinstance(node.target, torch._ops.OpOverload)
    return _PUTS.get(operator_name(node).removesuffix("_")) if is_of_torch else None


def _is_idle(node: fx.Node) -> bool:
    """Whether the node casts floats to the type that they have as traced, but for float64.

    Autocast leaves float64 as it is.
    """
    if node.op != "call_function" or operator_name(node) not in CASTS:
        return False
    before, after = node.all_input_nodes[0].meta.get("val"), node.meta.get("val")
    if not isinstance(before, torch.Tensor) or not isinstance(after, torch.Tensor):
        return False
    return before.dtype == after.dtype and after.is_floating_point() and after.dtype != torch.float64


class _UnderAutocast(FakeRun):
    """Runs under autocast; an operator that refuses operands of two types keeps its traced value."""

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
        except Exception:  # whatever the operator raises
            value = self.facts.values[n.name]
        if n.name in self.idle and self.env[n.all_input_nodes[0]].dtype != value.dtype:
            self.working.append(n.name)
        return value
