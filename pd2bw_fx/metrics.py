"""What a training run measured, as a file that the report shows beside the predictions."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median_low
from typing import Any, NamedTuple, Self

from pd2bw_fx.actions import Kind
from pd2bw_fx.arguments import require_path
from pd2bw_fx.errors import InputError
from pd2bw_fx.files import writing
from pd2bw_fx.timeline import Event, Timeline
from pd2bw_fx.units import counted

SCHEMA = 1
FILE = "metrics.json"


class Record(NamedTuple):
    """One action of one rank in a real run: `action` is its text, "F3(stage 0, W1)".

    Seconds are by one clock for all ranks.
    """

    rank: int
    action: str
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Metrics:
    """The loss of each update, and the seconds from one loss to the next (the first: from the start).

    `first_update` is where the run began: 0, or the update of its checkpoint. `records` are the actions of
    all ranks with their times. `replicas` are the ranks of each stage, None where each had one.
    """

    method: str
    microbatches_per_update: int
    losses: tuple[float, ...]
    update_s: tuple[float, ...]
    first_update: int = 0
    records: tuple[Record, ...] = field(default=(), repr=False)
    replicas: tuple[int, ...] | None = None

    def __repr__(self) -> str:
        return f"<Metrics of {self.method}: {told_losses(self.losses)}>"

    @property
    def throughput(self) -> float:
        """Microbatches a second by the median update, so that the start and checkpoints do not count.

        Of two in the middle the faster one counts: of two updates that is the one without the start.
        """
        typical_s = median_low(self.update_s) if self.update_s else 0.0
        return self.microbatches_per_update / typical_s if typical_s > 0 else 0.0

    @property
    def timeline(self) -> Timeline | None:
        """The records as the report draws them; None where there are none."""
        if not self.records:
            return None
        return timeline_of(
            self.records, method=self.method, microbatches_per_update=self.microbatches_per_update
        )

    def after(self, earlier: Metrics) -> Metrics:
        """Returns this run and the one that it went on from as one; this one's updates replace the
        other's.
        """
        kept = self.first_update - earlier.first_update
        if not 0 < kept <= len(earlier.losses):
            return self
        return replace(
            self,
            losses=(*earlier.losses[:kept], *self.losses),
            update_s=(*earlier.update_s[:kept], *self.update_s),
            first_update=earlier.first_update,
        )

    def save(self, path: str | Path) -> None:
        """Writes a file, or metrics.json in a folder that exists (one that `Pipeline.save` wrote).

        Raises InputError where it cannot be written.
        """
        with writing(_file(path)) as file:
            partial = file.with_name(f".{file.name}.partial")
            partial.write_text(json.dumps(self.to_json()) + "\n", encoding="utf-8")
            partial.replace(file)

    @classmethod
    def load(cls, path: str | Path) -> Self:
        """Reads what `save` wrote. Raises InputError for anything else."""
        file = _file(path)
        try:
            return cls.from_json(json.loads(file.read_text(encoding="utf-8")))
        except OSError as error:
            raise InputError(f"{file} cannot be read: {error.strerror}") from None
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError(f"{file} does not hold what a training run measured: {error}") from None

    def to_json(self) -> dict[str, Any]:
        """What JSON can hold: a loss that is not finite becomes None."""
        return {
            "schema": SCHEMA,
            "method": self.method,
            "microbatches_per_update": self.microbatches_per_update,
            "first_update": self.first_update,
            "microbatches_per_s": self.throughput,
            # JSON knows no infinity.
            "losses": [loss if math.isfinite(loss) else None for loss in self.losses],
            "update_s": list(self.update_s),
            "records": [list(record) for record in self.records],
            "replicas": self.replicas,
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """What `to_json` gave.

        Raises ValueError for another schema, KeyError for a missing entry; `load` raises InputError for both.
        """
        if data.get("schema") != SCHEMA:
            raise ValueError(f"schema {data.get('schema')!r}; this version reads {SCHEMA}")
        return cls(
            method=data["method"],
            microbatches_per_update=data["microbatches_per_update"],
            losses=tuple(math.nan if loss is None else float(loss) for loss in data["losses"]),
            update_s=tuple(map(float, data["update_s"])),
            first_update=data["first_update"],
            records=tuple(Record(*record) for record in data["records"]),
            replicas=None if data.get("replicas") is None else tuple(map(int, data["replicas"])),
        )


def told_losses(losses: Sequence[float]) -> str:
    """ "1000 updates, loss 5.180 to 2.312"."""
    if not losses:
        return "no updates"
    return f"{counted(len(losses), 'update')}, loss {losses[0]:.4g} to {losses[-1]:.4g}"


def _file(path: str | Path) -> Path:
    require_path("path", path)
    return Path(path) / FILE if Path(path).is_dir() else Path(path)


# F3(stage 0, W1); U(stage 0 -> W2)
_ACTION = re.compile(
    r"(?P<kind>[A-Z]+)(?P<microbatch>\d*)\(stage (?P<stage>\d+)(?:,| ->) W(?P<version>-?\d+)\)"
)
_KINDS = frozenset(kind.value for kind in Kind)


def timeline_of(
    records: Iterable[tuple[int, str, float, float]], *, method: str, microbatches_per_update: int
) -> Timeline:
    """Returns records of (rank, action's text, start, end) as a timeline that begins with the first of them.

    The text is `str(action)`. Raises InputError for any other text.
    """
    told = sorted(records, key=lambda record: (record[0], record[2], record[3]))
    began_s = min((start_s for _, _, start_s, _ in told), default=0.0)
    return Timeline(
        method=method,
        num_ranks=max((rank for rank, *_ in told), default=-1) + 1,
        microbatches_per_update=microbatches_per_update,
        events=tuple(
            _event(rank, text, start_s - began_s, end_s - began_s) for rank, text, start_s, end_s in told
        ),
        origin="measured",
    )


def _event(rank: int, text: str, start_s: float, end_s: float) -> Event:
    found = _ACTION.fullmatch(text)
    if found is None or found["kind"] not in _KINDS:
        raise InputError(f"{text!r} is no action; 'F3(stage 0, W1)' or 'U(stage 0 -> W2)' was expected")
    if end_s < start_s:
        raise InputError(f"{text} of rank {rank} ends before it begins")
    microbatch = int(found["microbatch"]) if found["microbatch"] else -1
    return Event(
        rank, Kind(found["kind"]), int(found["stage"]), microbatch, int(found["version"]), start_s, end_s
    )
