"""Whether tensors share memory for one sample as they do for several, where it is written.

    z = h.transpose(0, 1).contiguous()      a copy for several samples, but h's own memory for one
    z *= 2

The program without in-place writes can be right for one of the two only.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import fx

from pd2bw_fx.program import FxProgram
from pd2bw_fx.size_range import SizeRange
from pd2bw_fx.traced import Traced

from .facts import Facts, observe

_COMPOSITE = torch._C.DispatchKey.CompositeImplicitAutograd


def sizes_alike(program: FxProgram, facts: Facts, traced: Traced) -> SizeRange:
    """Returns the batch sizes of the trace, without those that write to other memory than the example."""
    sizes = traced.batch_sizes
    if not traced.dynamic_batch or not traced.batch_size or not _writes_behind_copies(program, facts, traced):
        return sizes
    if sizes.is_one_size or 1 not in sizes:
        return sizes
    try:
        others = observe(program, _others(traced))
    except Exception:  # an operator may refuse a single sample
        return sizes
    if not _is_otherwise(program, facts, others):
        return sizes
    return SizeRange.only(1) if traced.batch_size == 1 else SizeRange(2, sizes.most)


def _writes_behind_copies(program: FxProgram, facts: Facts, traced: Traced) -> bool:
    """Whether there is a write after an operator that copies only if it must.

    A write to an activation counts, and for an example of one sample also one to what may be a buffer's
    memory.
    """
    owners = program.graph.find_nodes(op="get_attr")
    state = {storage for node in owners for storage in facts.storages[node.name]}
    has_copies = False
    for node in program.graph.nodes:
        has_copies = has_copies or _copies_if_it_has_to(node)
        written = {s for target in facts.written.get(node.name, ()) for s in facts.storages[target.name]}
        if has_copies and (written if traced.batch_size == 1 else written - state):
            return True
    return False


def _copies_if_it_has_to(node: fx.Node) -> bool:
    """Whether torch decides by sizes and strides if the operator copies.

    That is so if its schema says that it returns a view, and it has no kernel of its own.
    """
    if not isinstance(node.target, torch._ops.OpOverload):
        return False
    given = [result.alias_info for result in node.target._schema.returns]
    is_view = any(alias is not None and not alias.is_write for alias in given)
    return is_view and node.target.has_kernel_for_dispatch_key(_COMPOSITE)


def _others(traced: Traced) -> dict[str, torch.Tensor]:
    """Returns the example with one sample if it has several, and with two if it has one."""

    def other(tensor: torch.Tensor) -> torch.Tensor:
        return torch.cat([tensor, tensor]) if traced.batch_size == 1 else tensor[:1]

    batched = traced.batched_inputs
    return {name: other(tensor) if name in batched else tensor for name, tensor in traced.examples.items()}


def _is_otherwise(program: FxProgram, facts: Facts, others: Facts) -> bool:
    """Whether a value shares its operand's memory in only one of the two runs, and is written later."""
    position = {node.name: at for at, node in enumerate(program.graph.nodes)}
    last = [_last_writes(known, position) for known in (facts, others)]
    for name, at in position.items():
        if facts.aliases.get(name) == others.aliases.get(name):
            continue
        for known, written in zip((facts, others), last, strict=True):
            if any(written.get(storage, -1) > at for storage in known.storages[name]):
                return True
    return False


def _last_writes(facts: Facts, position: Mapping[str, int]) -> dict[int, int]:
    """Returns the position in the program of the last write, by memory."""
    return {
        storage: position[writer]
        for writer in sorted(facts.written, key=position.__getitem__)
        for node in facts.written[writer]
        for storage in facts.storages[node.name]
    }
