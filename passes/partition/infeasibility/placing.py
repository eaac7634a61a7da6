"""Says why the nodes of a workload do not fit on its accelerators, and what is enough to make them fit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from pd2bw_fx.errors import InfeasibleError
from pd2bw_fx.passes.partition.groups import Groups, totals
from pd2bw_fx.units import counted
from pd2bw_fx.workload import Workload

_MOST_SHOWN = 6  # nodes that stay together
_MOST_MORE = 8  # accelerators
_NEAR = 1.01  # the bytes are found to a hundredth

# The bytes on the fullest accelerator of some placement; None where there is none, or none was found in time.
Fullest = Callable[[Workload], float | None]


def does_not_fit(workload: Workload, groups: Groups, fullest: Fullest) -> InfeasibleError:
    """Returns the error to raise for a workload without CPUs, whose `groups` share a device each.

    It names a node that accelerators do not support, else nodes that are too large for any of them, else the
    fewest accelerators and the least memory that are enough.
    """
    of = totals(workload, groups)
    cpus = "plan with its CPUs" if workload.num_cpus else "give it a CPU (maxCPUs)"
    refused = [node.id for node in workload.nodes if not node.on_accelerator]
    if refused:
        return InfeasibleError(
            f"node {refused[0]} is not supported on accelerators (supportedOnFpga is 0), and there is no CPU "
            f"to run it; {cpus}"
        )
    largest = int(of.num_bytes.argmax())
    have = workload.accelerator_bytes
    if of.num_bytes[largest] > have:
        return InfeasibleError(
            f"{_named(groups.members[largest])} {_amount(of.num_bytes[largest])} bytes, and an accelerator "
            f"has {_amount(have)} (maxSizePerFPGA); try larger ones, or {cpus}"
        )
    return InfeasibleError(
        f"the {_amount(of.num_bytes.sum())} bytes of {counted(len(workload.nodes), 'node')} do not fit on "
        f"{counted(workload.num_accelerators, 'accelerator')} of {_amount(have)} bytes each, in the order of "
        f"the edges and with what shares a colour on one. {_enough(workload, fullest)}or {cpus}"
    )


def _enough(workload: Workload, fullest: Fullest) -> str:
    changes = []
    for more in range(1, _MOST_MORE + 1):
        number = workload.num_accelerators + more
        if fullest(replace(workload, num_accelerators=number)) is not None:
            changes.append(f"{number} accelerators")
            break
    least = _least_bytes(workload, fullest)
    if least is not None:
        changes.append(f"{_amount(least)} bytes each")
    return f"With {', or '.join(changes)} it fits; " if changes else "Try more of them, larger ones, "


def _least_bytes(workload: Workload, fullest: Fullest) -> float | None:
    """Returns bytes of an accelerator that are enough, and of which a hundredth less is not known to be."""
    least = fullest(replace(workload, accelerator_bytes=sum(node.num_bytes for node in workload.nodes)))
    too_few = workload.accelerator_bytes
    while least is not None and least > _NEAR * too_few and least > too_few + 1:
        middle = (too_few + least) / 2
        found = fullest(replace(workload, accelerator_bytes=middle))
        too_few, least = (middle, least) if found is None else (too_few, found)
    return least


def _named(nodes: tuple[int, ...]) -> str:
    if len(nodes) == 1:
        return f"node {nodes[0]} alone needs"
    shown = ", ".join(str(node) for node in nodes[:_MOST_SHOWN])
    others = f" and {len(nodes) - _MOST_SHOWN} more" if len(nodes) > _MOST_SHOWN else ""
    return f"nodes {shown}{others}, which share a colour or a cycle through colours, need together"


def _amount(num_bytes: float) -> str:
    return f"{num_bytes:.0f}" if num_bytes == round(num_bytes) else f"{num_bytes:.9g}"
