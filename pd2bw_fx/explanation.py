"""Why a plan is as it is: its cuts and what others would cost, what binds, and what would help."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pd2bw_fx.plan import Transfer
from pd2bw_fx.units import format_bytes, format_seconds


@dataclass(frozen=True, slots=True)
class Cut:
    """The boundary behind `stage`, and everything that crosses it, whatever stages it goes between.

    The best plan on the same devices that does not cut exactly here has the bottleneck `next_best_s`, and
    moves these blocks across this boundary. `next_best_s` is None where no other cut fits, or none was found
    in time.
    """

    stage: int
    crossing: tuple[Transfer, ...]
    next_best_s: float | None
    moved_later: tuple[str, ...] = ()
    moved_earlier: tuple[str, ...] = ()

    @property
    def num_bytes(self) -> int:
        return sum(transfer.bytes + transfer.gradient_bytes for transfer in self.crossing)


@dataclass(frozen=True, slots=True)
class Slack:
    """How much of a limit is used: of the bottleneck by a stage ("s"), or of a device's memory ("bytes")."""

    what: str
    used: float
    limit: float
    unit: str

    @property
    def left(self) -> float:
        return self.limit - self.used

    @property
    def is_tight(self) -> bool:
        return self.left <= 0.01 * self.limit


@dataclass(frozen=True, slots=True)
class Change:
    """A change of the setting, and the bottleneck and bound of the plan made for it."""

    what: str
    bottleneck_s: float
    bound_s: float


@dataclass(frozen=True, slots=True)
class Explanation:
    """The whole explanation of a plan.

    `changes` are sorted by how much they help; those that help by less than the proof can tell are left out.
    `module_of` has the module path of each operator, by which it is shown: "blocks.3.mlp:linear_2".
    """

    bottleneck_s: float
    bound_s: float
    cuts: tuple[Cut, ...]
    slacks: tuple[Slack, ...]
    changes: tuple[Change, ...]
    module_of: Mapping[str, str] = field(default_factory=dict, repr=False)

    @property
    def binding(self) -> tuple[Slack, ...]:
        """The limits that leave at most 1%."""
        return tuple(slack for slack in self.slacks if slack.is_tight)

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        lines = [f"bottleneck {format_seconds(self.bottleneck_s)}, at best {format_seconds(self.bound_s)}"]
        lines += [line for cut in self.cuts for line in self._cut_lines(cut)]
        lines += ["what binds:"] + [f"  {_slack_line(slack)}" for slack in self.binding]
        lines.append("what would help:" if self.changes else "nothing that was tried would help")
        lines += [
            f"  {change.what}: {format_seconds(change.bottleneck_s)} ({self._relative(change.bottleneck_s)})"
            for change in self.changes
        ]
        return "\n".join(lines)

    def _cut_lines(self, cut: Cut) -> list[str]:
        values = dict.fromkeys(transfer.value for transfer in cut.crossing)
        names = ", ".join(in_module(value, self.module_of) for value in values) or "nothing"
        lines = [f"cut {cut.stage} | {cut.stage + 1}: {format_bytes(cut.num_bytes)} cross: {names}"]
        if cut.next_best_s is None:
            return [*lines, "  no other cut was found that fits"]
        moved = [f"{in_module(name, self.module_of)} later" for name in cut.moved_later]
        moved += [f"{in_module(name, self.module_of)} earlier" for name in cut.moved_earlier]
        shown = ", ".join(moved[:3]) + (f" and {len(moved) - 3} more" if len(moved) > 3 else "")
        cost = f"{format_seconds(cut.next_best_s)} ({self._relative(cut.next_best_s)})"
        return [*lines, f"  the next best cut: {cost}: {shown}"]

    def _relative(self, seconds: float) -> str:
        return f"{seconds / self.bottleneck_s - 1:+.1%}" if self.bottleneck_s > 0 else "+0%"


def in_module(operator: str, module_of: Mapping[str, str]) -> str:
    """Returns the operator's name behind its module's path, if it is in a module."""
    path = module_of.get(operator)
    return f"{path}:{operator}" if path else operator


def _slack_line(slack: Slack) -> str:
    write = format_seconds if slack.unit == "s" else format_bytes
    return f"{slack.what}: {write(slack.used)} of {write(slack.limit)}"
