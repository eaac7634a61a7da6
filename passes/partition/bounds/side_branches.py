"""Joins small side branches to the node that reads them, for a bound, and moves them ahead again afterwards.

    k   v   k'  v'      tables of positions, a mask: each is read by one layer, and reads nothing itself.
     `. |    `. |       A branch may be on any device before its reader, so n layers give 2^n ways to have
    --- x --- x' --- ..  some branches earlier, and as many down-sets.

The bound asks a device that has x for the least that x can cost it together with some part of its branch: the
work of that part, and the tensors that come from the rest. Only x and its branch have parts of these tensors,
so this is on top of all else that x costs. A device that has only the branch is asked for nothing, and so is
a CPU, which pays for no tensor. This relaxes the rules by far less than a device's load, so that what is
feasible under them mostly is feasible.
"""

from __future__ import annotations

from collections.abc import Sequence

from pd2bw_fx.passes.partition.groups import Groups, RelaxedGroups, Totals, joined, tensors_between, totals
from pd2bw_fx.passes.partition.instance import Instance, Integers, evaluate
from pd2bw_fx.workload import Workload


def join_side_branches(workload: Workload, groups: Groups, *, most_of_a_device: float) -> RelaxedGroups:
    """Joins each group with the trees of groups that it alone reads.

    A tree has at most `most_of_a_device` of all work, shared out evenly, and its reader has to read something
    else as well.
    """
    of = totals(workload, groups)
    tensors = tensors_between(workload, groups)
    most_work = most_of_a_device * of.accelerator_time.sum() / max(1, workload.num_accelerators)
    reader_of = _readers(groups, of, most_work)
    trees: dict[int, tuple[int, ...]] = {}
    accelerator_time = of.accelerator_time.copy()
    leader = list(range(len(groups.members)))
    for at, reader in sorted(reader_of.items()):
        trees[at] = (*trees.get(at, ()), at)
        trees[reader] = (*trees.get(reader, ()), *trees[at])
        accelerator_time[reader] += min(accelerator_time[at], tensors.get((at, reader), 0.0))
    for at, reader in sorted(reader_of.items(), reverse=True):
        leader[at] = leader[reader]
    leads = sorted(set(leader))
    asked = Totals(accelerator_time[leads], of.cpu_time[leads], of.num_bytes[leads], of.is_barred[leads])
    return RelaxedGroups(joined(groups, leader), asked, tuple(trees[at] for at in sorted(reader_of)))


def _readers(groups: Groups, of: Totals, most_work: float) -> dict[int, int]:
    """Returns the reader of each group that is part of a tree of so little work."""
    count = len(groups.members)
    readers: list[set[int]] = [set() for _ in range(count)]
    num_reads = [0] * count
    for u, v in groups.edges:
        readers[u].add(v)
        num_reads[v] += 1
    work = of.accelerator_time.tolist()
    reader_of: dict[int, int] = {}
    for at in range(count):
        if num_reads[at] == 0 and len(readers[at]) == 1 and work[at] <= most_work:
            (reader,) = readers[at]
            reader_of[at] = reader
            work[reader] += work[at]
            num_reads[reader] -= 1
    # A reader that reads nothing else has no side branch: what it reads is the trunk.
    for at in sorted(reader_of, reverse=True):
        reader = reader_of[at]
        if num_reads[reader] == 0 and reader not in reader_of:
            del reader_of[at]
    return reader_of


def moved_ahead(
    instance: Instance, stage_of: Integers, trees: Sequence[Sequence[int]], target_s: float
) -> Integers:
    """Moves trees of stages that are over the target to earlier stages, the nearest that have the time."""
    load_s = evaluate(instance, stage_of).load_s
    for stage in range(1, instance.num_stages):
        for tree in sorted(map(list, trees), key=lambda tree: -float(instance.work_s[stage, tree].sum())):
            if load_s[stage] <= target_s:
                break
            if (stage_of[tree] != stage).any():
                continue  # elsewhere, or some of it went ahead with a larger one
            for earlier in reversed(range(stage)):
                if load_s[earlier] + instance.work_s[earlier, tree].sum() > target_s:
                    continue
                moved = stage_of.copy()
                moved[tree] = earlier
                moved_s = evaluate(instance, moved).load_s
                if moved_s[earlier] <= target_s and moved_s[stage] < load_s[stage]:
                    stage_of, load_s = moved, moved_s
                    break
    return stage_of
