"""Small branches of a workload that may be on any device before their reader: left out, placed after.

    k   v   k'  v'      tables of positions, a mask: each is read by one layer, and reads nothing itself;
     `. |    `. |       with n layers there are 2^n ways to have some of them earlier
    --- x --- x' --- ..

A device that has x has at least the least load of x with some of its branch to do: work, or the tensor that
comes from elsewhere. Only x and its branch have parts of these tensors, so that least is asked for besides
what else x takes, and nothing of a device that has the branch alone. On a CPU, which pays for no tensor, it
is nothing. That is milder than what is real, by far less than a device does: what is impossible so is
impossible, and what is possible mostly is so.
"""

from __future__ import annotations

from collections.abc import Sequence

from pd2bw_fx.passes.partition.groups import Groups, RelaxedGroups, Totals, joined, tensors_between, totals
from pd2bw_fx.passes.partition.instance import Instance, Integers, evaluate
from pd2bw_fx.workload import Workload

_MOST_OF_A_DEVICE = 0.05  # of what each would have to do if all had the same


def join_side_branches(workload: Workload, groups: Groups) -> RelaxedGroups:
    """Groups with the trees that lead to them alone, where these are a small part of what a device does and
    something else leads there too."""
    of = totals(workload, groups)
    tensors = tensors_between(workload, groups)
    reader_of = _readers(workload, groups, of)
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


def _readers(workload: Workload, groups: Groups, of: Totals) -> dict[int, int]:
    """By group of a tree, the one that reads it."""
    count = len(groups.members)
    most_work = _MOST_OF_A_DEVICE * of.accelerator_time.sum() / max(1, workload.num_accelerators)
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
    # What leads to a row that nothing else leads to is no branch.
    for at in sorted(reader_of, reverse=True):
        reader = reader_of[at]
        if num_reads[reader] == 0 and reader not in reader_of:
            del reader_of[at]
    return reader_of


def moved_ahead(
    instance: Instance, stage_of: Integers, trees: Sequence[Sequence[int]], target_s: float
) -> Integers:
    """The assignment with trees of stages that are over the target on earlier ones, the nearest that has the
    time."""
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
