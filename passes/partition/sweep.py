"""The choices around the program, swept as the 2BW paper does (arXiv 2006.09503, section 3.3).

A batch of B samples is trained by w equal copies of a pipeline of d stages, in microbatches of b samples:
m = B / (b w) microbatches an update in each copy. The copies' gradients are summed once an update over the
slowest link (`gradient_sums.py`): what that takes by the bytes of a stage costs each microbatch an m-th of
it, and the latencies of a first bucket, which all stages wait for at once, come to the update.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from pd2bw_fx.arguments import plain, require_kind, require_search, require_whole_number, with_known_options
from pd2bw_fx.cluster import Cluster
from pd2bw_fx.constraints import Constraints
from pd2bw_fx.errors import InfeasibleError, InputError, SolverError
from pd2bw_fx.plan import update_s
from pd2bw_fx.problem import Problem
from pd2bw_fx.sweep import Setting, Sweep, setting_name
from pd2bw_fx.units import counted

from .choices import Deadline
from .constrain import capped
from .gradient_sums import GradientSums
from .plan_problem import partition
from .reader import topological_order


@dataclass(frozen=True, slots=True)
class _Candidate:
    num_stages: int
    num_replicas: int
    microbatch_size: int
    microbatches: int
    problem: Problem
    drains: bool  # whether the pipeline drains after each update
    work_s: float  # all blocks for one microbatch, each on the device that is fastest at it
    summing_s: float  # for summing gradients over copies, beside what the blocks have of it; once an update

    def update_s(self, bottleneck_s: float, stages_s: float) -> float:
        """Returns the seconds of an update whose stages together take `stages_s` for a microbatch."""
        return self.summing_s + update_s(self.microbatches, bottleneck_s, stages_s, drains=self.drains)

    def bound_s(self, bottleneck_s: float) -> float:
        """Returns a bound on the seconds of an update whose slowest stage takes `bottleneck_s` or more."""
        return self.update_s(bottleneck_s, max(bottleneck_s, self.work_s))

    @property
    def floor_s(self) -> float:
        """A bound on the seconds of an update: the slowest stage has the largest block, and an equal share of
        the work or more."""
        return self.bound_s(max(max(_fastest(self.problem)), self.work_s / self.num_stages))

    @property
    def name(self) -> str:
        return (
            f"{setting_name(self.num_stages, self.num_replicas, self.microbatch_size)}, "
            f"{self.microbatches} an update"
        )


@with_known_options
def sweep(
    problems: Mapping[int, Problem],
    cluster: Cluster,
    *,
    batch_size: int,
    num_stages: Sequence[int] | None = None,
    num_replicas: Sequence[int] = (1,),
    method: str = "2bw",
    time_limit_s: float = 120.0,
    **options: Any,
) -> Sweep:
    """Returns the fastest ways to train batches of `batch_size`, over stages, copies and microbatch sizes.

    `problems` has the problem as profiled at each microbatch size to choose from. `num_stages` has the
    numbers to try: all that the devices allow unless said. `options` are those of `partition`. More than one
    copy needs a cluster whose devices and links are alike, also with the constraints.

    Settings are skipped if a bound on their work says that they cannot be the fastest, or if they do not fit.
    Raises InputError for arguments that leave nothing to try, InfeasibleError where nothing fits, SolverError
    where time ran out before the first plan.
    """
    require_whole_number("batch_size", batch_size)
    batch_size = plain(batch_size)
    require_search(0.0, time_limit_s)
    numbers: dict[str, Any] = {"num_stages": num_stages or (), "num_replicas": num_replicas}
    for name, counts in numbers.items():
        require_kind(name, counts, Iterable, "a sequence of numbers")
        if isinstance(counts, str):
            raise InputError(f"{name} is {counts!r}; a sequence of numbers was expected")
        for count in counts:
            require_whole_number(f"each of {name}", count)
    for name, given in (("num_stages", num_stages), ("num_replicas", num_replicas)):
        if given is not None and not len(given):
            raise InputError(f"{name} is empty; at least one number was expected")
    for size in problems:
        require_whole_number("each microbatch size", size)
    if not problems:
        raise InputError("problems has no microbatch size; at least one was expected")
    if any(count > 1 for count in num_replicas):
        _require_alike(cluster, options.get("constraints") or Constraints())
    stages = range(1, len(cluster) + 1) if num_stages is None else [plain(count) for count in num_stages]
    num_replicas = [plain(count) for count in num_replicas]
    problems = {plain(size): problem for size, problem in problems.items()}
    skipped: list[tuple[str, str]] = []
    candidates = list(_candidates(problems, cluster, batch_size, stages, num_replicas, method))
    if not candidates:
        _require_room(problems, cluster, stages, num_replicas)
        raise InputError(
            f"no microbatch size of {sorted(problems)} divides a batch of {batch_size} into enough "
            "microbatches for any of these numbers of stages"
        )
    deadline = Deadline(time_limit_s)
    found: list[Setting] = []
    late: list[_Candidate] = []
    for candidate in sorted(candidates, key=lambda each: each.floor_s):
        best_s = min((setting.update_s for setting in found), default=float("inf"))
        if candidate.floor_s >= best_s:
            skipped.append(
                (candidate.name, "not planned, since its work alone takes at least as long as the best")
            )
        elif deadline.left_s == 0:
            late.append(candidate)
            skipped.append((candidate.name, "no time left"))
        else:
            try:
                found.append(_planned(candidate, cluster, method, deadline, options))
            except InfeasibleError as error:
                skipped.append((candidate.name, str(error)))
            except SolverError as error:
                late.append(candidate)
                skipped.append((candidate.name, str(error)))
    if not found and late:
        raise SolverError(
            f"the time limit passed before any of {len(candidates)} settings had a plan; raise time_limit_s"
        )
    if not found:
        raise InfeasibleError(f"no setting fits; {skipped[0][0]}: {skipped[0][1]}")
    return Sweep(
        settings=tuple(sorted(found, key=lambda setting: setting.update_s)),
        skipped=tuple(skipped),
        bound_s=min([setting.bound_s for setting in found] + [candidate.floor_s for candidate in late]),
    )


def _require_alike(cluster: Cluster, wishes: Constraints) -> None:
    """Only the first copy is planned: what is wished of its devices would not hold for the others'."""
    if not cluster.is_uniform:
        raise InputError("copies of a pipeline need devices and links that are alike; use num_replicas=(1,)")
    if wishes.device_of or not capped(cluster, wishes.memory_bytes).is_uniform:
        raise InputError(
            "device_of and memory_bytes make devices unlike, and copies of a pipeline need devices that are "
            "alike; pin to stages (stage_of), cap all devices alike, or use num_replicas=(1,)"
        )


def _require_room(
    problems: Mapping[int, Problem], cluster: Cluster, num_stages: Sequence[int], num_replicas: Sequence[int]
) -> None:
    """Raises InputError where there are too few devices, or blocks, for any of these numbers."""
    least, copies = min(num_stages), min(num_replicas)
    if least * copies > len(cluster):
        each = f", each on {copies} devices," if copies > 1 else ""
        raise InputError(
            f"num_stages={(*num_stages,)}: {counted(least, 'stage')}{each} need {least * copies} devices, "
            f"and the cluster has {len(cluster)}; ask for fewer"
        )
    most = max(len(problem.blocks) for problem in problems.values())
    if least > most:
        raise InputError(
            f"num_stages={(*num_stages,)} for a model of {counted(most, 'block')} that can be apart; a "
            f"stage needs at least one, so at most {most}"
        )


def _planned(
    candidate: _Candidate, cluster: Cluster, method: str, deadline: Deadline, options: Mapping[str, Any]
) -> Setting:
    plan = partition(
        candidate.problem,
        cluster,
        num_stages=candidate.num_stages,
        microbatches_per_update=candidate.microbatches,
        method=method,
        time_limit_s=max(deadline.left_s, 1e-3),
        within=deadline,
        **options,
    )
    return Setting(
        candidate.num_stages,
        candidate.num_replicas,
        candidate.microbatch_size,
        candidate.microbatches,
        update_s=candidate.summing_s + plan.update_s,
        bound_s=candidate.bound_s(plan.bound_s),
        plan=plan,
    )


def _candidates(
    problems: Mapping[int, Problem],
    cluster: Cluster,
    batch_size: int,
    num_stages: Sequence[int],
    num_replicas: Sequence[int],
    method: str,
) -> Iterator[_Candidate]:
    for microbatch_size, problem in problems.items():
        sums = GradientSums.of(problem, cluster) if max(num_replicas) > 1 else None
        for stages in num_stages:
            for replicas in num_replicas:
                per_round = microbatch_size * replicas
                microbatches, rest = divmod(batch_size, per_round)
                fits = stages * replicas <= len(cluster) and stages <= len(problem.blocks)
                if rest or microbatches < 1 or not fits or (method == "2bw" and microbatches < stages):
                    continue
                summed = problem if sums is None else _with_sums(problem, sums, replicas, microbatches)
                yield _Candidate(
                    stages,
                    replicas,
                    microbatch_size,
                    microbatches,
                    summed,
                    drains=method != "2bw",
                    work_s=sum(_fastest(summed)),
                    summing_s=0.0 if sums is None else sums.once_s(replicas),
                )


def _fastest(problem: Problem) -> list[float]:
    """Returns the seconds of each block on the device that is fastest at it."""
    return [min(map(sum, zip(block.forward_s, block.backward_s, strict=True))) for block in problem.blocks]


def _with_sums(problem: Problem, sums: GradientSums, replicas: int, microbatches: int) -> Problem:
    """Adds to each block's backward its share of the time for summing gradients over copies."""
    per_byte_s = sums.per_byte_s(replicas) / microbatches
    blocks = list(problem.blocks)
    for at, num_bytes in zip(topological_order(problem), sums.num_bytes.tolist(), strict=True):
        more_s = per_byte_s * num_bytes
        backward_s = tuple(seconds + more_s for seconds in blocks[at].backward_s)
        blocks[at] = replace(blocks[at], backward_s=backward_s)
    return replace(problem, blocks=tuple(blocks))
