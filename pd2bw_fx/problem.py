"""The planner's input: what must be placed, without anything that placing does not need."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Block:
    """Operators that stay together: an operator with its views, or several that the user or a rule joined.

    `forward_s` and `backward_s` have one entry for each device of the cluster, in its order.
    `parameters` are state_dict names; one that several blocks name is held by every stage that has one.
    """

    name: str
    operators: tuple[str, ...]
    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    parameters: tuple[str, ...] = ()
    saved_bytes: int = 0
    workspace_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor that one block makes and others read; sent once for each stage that reads it.

    `bytes` travel with the forward, `gradient_bytes` back with the backward (0: no gradient flows).
    """

    name: str
    producer: str
    consumers: tuple[str, ...]
    bytes: int
    gradient_bytes: int = 0


@dataclass(frozen=True, slots=True)
class ParameterSize:
    """A parameter's bytes: `trainable_bytes` times the memory model's copies, and `frozen_bytes` once."""

    trainable_bytes: int = 0
    frozen_bytes: int = 0


@dataclass(frozen=True, slots=True)
class Problem:
    """Blocks in a topological order, the values between them, and the sizes of the parameters they name.

    `module_of` has the module path of each operator, by which a user's constraints may name it;
    `costs_origin` says where the times come from ("measured", "analytic"; "given" with the problem).
    """

    blocks: tuple[Block, ...]
    values: tuple[Value, ...]
    parameters: Mapping[str, ParameterSize]
    fingerprint: str = ""
    module_of: Mapping[str, str] = field(default_factory=dict)
    costs_origin: str = "given"
