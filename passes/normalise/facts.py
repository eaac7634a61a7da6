"""What autograd says of each value: the program is run once on fake tensors that hold no data.

Whether a gradient flows to a value and whether it shares memory with another is asked of torch itself;
a table of operators would be wrong for the next one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.utils import _pytree as pytree

from pd2bw_fx.program import ProgramInterpreter, ProgramModule


@dataclass(slots=True)
class Facts:
    """By node name: the value's fake tensors (with requires_grad and strides), and the views among them."""

    values: dict[str, Any] = field(default_factory=dict)
    views: set[str] = field(default_factory=set)


def observe(module: ProgramModule, example: Mapping[str, torch.Tensor]) -> Facts:
    """Runs the program at the example's sizes; `example` holds a tensor for each placeholder."""
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    facts = Facts()
    observer = _Observer(module, mode, facts)
    with mode, torch.enable_grad():
        observer.run(*(_fake(mode, example[node.name]) for node in module.graph.find_nodes(op="placeholder")))
    return facts


def _fake(mode: FakeTensorMode, tensor: torch.Tensor) -> torch.Tensor:
    with mode:
        fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    return fake.requires_grad_(tensor.requires_grad) if tensor.is_floating_point() else fake


class _Observer(ProgramInterpreter):
    def __init__(self, module: ProgramModule, mode: FakeTensorMode, facts: Facts) -> None:
        super().__init__(module)
        self.mode = mode
        self.facts = facts

    def fetch_attr(self, target: str) -> Any:
        value = super().fetch_attr(target)
        return _fake(self.mode, value) if isinstance(value, torch.Tensor) else value

    def run_node(self, n: fx.Node) -> Any:
        operands = [leaf for node in n.all_input_nodes for leaf in pytree.tree_leaves(self.env[node])]
        value = super().run_node(n)
        if n.op == "output":
            return value
        self.facts.values[n.name] = value
        storages = {_storage(leaf) for leaf in operands if isinstance(leaf, torch.Tensor)}
        results = [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]
        if any(_storage(leaf) in storages for leaf in results):
            self.facts.views.add(n.name)
        return value


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
