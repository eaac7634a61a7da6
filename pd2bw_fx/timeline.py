"""A timeline: the actions of all ranks with their times, from the simulator or from a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Self

from pd2bw_fx.actions import Kind
from pd2bw_fx.units import counted, format_seconds

SCHEMA = 1

_FEWEST_UPDATES = 4

COMPUTE = frozenset({Kind.FORWARD, Kind.BACKWARD, Kind.INPUT_GRADIENT, Kind.WEIGHT_GRADIENT, Kind.UPDATE})
SENDS = frozenset({Kind.SEND_ACTIVATION, Kind.SEND_GRADIENT})
RECEIVES = frozenset({Kind.RECEIVE_ACTIVATION, Kind.RECEIVE_GRADIENT})
_CAUSES = {
    Kind.RECEIVE_ACTIVATION: "activation",
    Kind.RECEIVE_GRADIENT: "gradient",
    Kind.ALL_REDUCE: "all-reduce",
}


class Event(NamedTuple):
    """One action and its time. Seconds count from the start of the timeline.

    A forward, backward or update lasts as long as its rank works on it. A receive lasts as long as its rank
    waits for the data (no time, if the data was there before). A send lasts from leaving the rank until all
    of it has arrived; the rank goes on meanwhile.

    (It is a named tuple rather than a dataclass because a timeline holds a million of them.)
    """

    rank: int
    kind: Kind
    stage: int
    microbatch: int  # from the start of training; -1 for an update
    version: int  # the one that a forward or backward runs on, or that an update makes
    start_s: float
    end_s: float

    @property
    def duration_s(self) -> float:
        return self.end_s - self.start_s

    @property
    def label(self) -> str:
        """The action as schedules are written: F3, B2, U."""
        return self.kind.value if self.microbatch < 0 else f"{self.kind.value}{self.microbatch}"


@dataclass(frozen=True, slots=True)
class Timeline:
    """Every action of every rank, by rank and then in the order in which the rank performs them.

    `longer_per_s` is the microbatches a second in the steady state of a longer one, where this has none.
    """

    method: str
    num_ranks: int
    microbatches_per_update: int
    events: tuple[Event, ...]
    origin: str = "simulated"  # or "measured"
    longer_per_s: float | None = None

    def __repr__(self) -> str:
        actions = f"{counted(len(self.events), 'action')} of {counted(self.num_ranks, 'rank')}"
        return f"<Timeline of {self.method}, {self.origin}: {actions} in {format_seconds(self.span_s)}>"

    def of_rank(self, rank: int) -> Iterator[Event]:
        """Yields the events of one rank, in the order of the timeline."""
        return (event for event in self.events if event.rank == rank)

    def compute(self) -> Iterator[Event]:
        """Yields the forwards, backwards and updates: what keeps a rank busy."""
        return (event for event in self.events if event.kind in COMPUTE)

    @property
    def start_s(self) -> float:
        """When the first computation starts."""
        return min((event.start_s for event in self.compute()), default=0.0)

    @property
    def end_s(self) -> float:
        """When the last computation ends."""
        return max((event.end_s for event in self.compute()), default=0.0)

    @property
    def span_s(self) -> float:
        """Seconds from the start of the first computation to the end of the last, over all ranks."""
        return self.end_s - self.start_s

    @property
    def busy_s(self) -> tuple[float, ...]:
        """Seconds of computation of each rank."""
        busy = [0.0] * self.num_ranks
        for event in self.compute():
            busy[event.rank] += event.end_s - event.start_s
        return tuple(busy)

    @property
    def idle_s(self) -> tuple[float, ...]:
        """Seconds of the span without computation, of each rank."""
        span_s = self.span_s
        return tuple(span_s - busy_s for busy_s in self.busy_s)

    @property
    def idle_by_cause_s(self) -> tuple[Mapping[str, float], ...]:
        """The idle seconds of each rank by their cause.

        It waited for an "activation", for a "gradient", for the other ranks of its stage ("all-reduce", if
        there are any), or had nothing more to do ("other": before its first action and after its last one).
        """
        causes = [{"activation": 0.0, "gradient": 0.0, "other": idle_s} for idle_s in self.idle_s]
        start_s, end_s = self.start_s, self.end_s
        for event in self.events:
            if (cause := _CAUSES.get(event.kind)) is not None:
                # A wait that began before the first computation of any rank counts from there.
                waited_s = max(0.0, min(event.end_s, end_s) - max(event.start_s, start_s))
                causes[event.rank][cause] = causes[event.rank].get(cause, 0.0) + waited_s
                causes[event.rank]["other"] -= waited_s
        for of_rank in causes:
            of_rank["other"] = max(0.0, of_rank["other"])  # a sum of rounded times may be a hair below
        return tuple(causes)

    @property
    def bubble(self) -> float:
        """The share of all ranks' time without computation, warm-up and drain included."""
        total_s = self.num_ranks * self.span_s
        return sum(self.idle_s) / total_s if total_s > 0 else 0.0

    @property
    def longest_rank_s(self) -> float:
        """The longest time that a rank takes from its first forward or backward to its last, without updates.

        This is the cost of the zero-bubble paper (arXiv 2401.10241).
        """
        first_s, last_s = dict[int, float](), dict[int, float]()
        for event in self.compute():
            if event.kind is not Kind.UPDATE:
                first_s[event.rank] = min(event.start_s, first_s.get(event.rank, event.start_s))
                last_s[event.rank] = max(event.end_s, last_s.get(event.rank, event.end_s))
        return max((last_s[rank] - first_s[rank] for rank in first_s), default=0.0)

    @property
    def rank_bubble(self) -> float:
        """The share of `longest_rank_s` in which the busiest rank does not work, as in the same paper."""
        busy = [0.0] * self.num_ranks
        for event in self.compute():
            busy[event.rank] += event.end_s - event.start_s if event.kind is not Kind.UPDATE else 0.0
        return 1.0 - max(busy) / self.longest_rank_s if self.longest_rank_s > 0 else 0.0

    @property
    def num_microbatches(self) -> int:
        """The microbatches whose backward is done at some stage, or, without backwards, forward at the
        last.
        """
        closing = (Kind.BACKWARD, Kind.INPUT_GRADIENT)
        trained = {event.microbatch for event in self.events if event.kind in closing}
        forwards = [] if trained else [event for event in self.events if event.kind is Kind.FORWARD]
        last = max((event.stage for event in forwards), default=0)
        return len(trained or {event.microbatch for event in forwards if event.stage == last})

    @property
    def steady_per_s(self) -> float | None:
        """Microbatches per second in the steady state, or None where it has fewer than two updates.

        It counts between updates of the first stage. The first quarter of them is left out, and those in
        which the pipeline fills, and those after the stage's last forward, in which it drains.
        """
        made_s: dict[int, float] = {}
        fed_s: dict[int, float] = {}
        for event in self.events:
            if event.stage != 0:
                continue
            if event.kind is Kind.UPDATE:  # done when the last of its ranks has made it
                made_s[event.version] = max(event.end_s, made_s.get(event.version, event.end_s))
            elif event.kind is Kind.FORWARD:
                fed_s[event.rank] = event.end_s
        if len(made_s) < _FEWEST_UPDATES:
            return None
        ends_s = sorted(end_s for end_s in made_s.values() if end_s <= min(fed_s.values(), default=0.0))
        filling = -(-max(self.in_flight_peak) // self.microbatches_per_update)
        ends_s = ends_s[max(filling, len(made_s) // 4) - 1 :]
        if len(ends_s) < 2 or ends_s[-1] == ends_s[0]:
            return None
        return (len(ends_s) - 1) * self.microbatches_per_update / (ends_s[-1] - ends_s[0])

    @property
    def throughput(self) -> float:
        """Microbatches per second in the steady state (`steady_per_s`), of this timeline or of a longer one.

        Where neither is known, it is all microbatches over the span.
        """
        known = self.steady_per_s or self.longer_per_s
        if known is not None:
            return known
        return self.num_microbatches / self.span_s if self.span_s > 0 else 0.0

    @property
    def steady_bubble(self) -> float:
        """The share of all ranks' time without computation at the steady throughput: no warm-up, no drain."""
        if self.num_microbatches == 0:
            return 0.0
        work_s = sum(self.busy_s) / self.num_microbatches
        return max(0.0, 1.0 - self.throughput * work_s / self.num_ranks)

    @property
    def in_flight_peak(self) -> tuple[int, ...]:
        """The most microbatches in flight on each rank, counted once for each stage that the rank has.

        A microbatch is in flight from the beginning of its forward to the end of its backward, the last half
        included: so many activations are held.
        """
        now, peak = [0] * self.num_ranks, [0] * self.num_ranks
        for event in self.events:
            if event.kind is Kind.FORWARD:
                now[event.rank] += 1
                peak[event.rank] = max(peak[event.rank], now[event.rank])
            elif event.kind in (Kind.BACKWARD, Kind.WEIGHT_GRADIENT):
                now[event.rank] -= 1
        return tuple(peak)

    def between(self, start_s: float, end_s: float) -> Self:
        """Returns the whole events of this window; those without length also belong to it at its edges."""

        def inside(event: Event) -> bool:
            if event.start_s == event.end_s:
                return start_s <= event.start_s <= end_s
            return event.end_s > start_s and event.start_s < end_s

        return replace(self, events=tuple(filter(inside, self.events)), longer_per_s=None)

    def to_json(self) -> dict[str, Any]:
        """Returns what JSON can hold, for `from_json`."""
        return {
            "schema": SCHEMA,
            "method": self.method,
            "origin": self.origin,
            "num_ranks": self.num_ranks,
            "microbatches_per_update": self.microbatches_per_update,
            "longer_per_s": self.longer_per_s,
            "events": [[e.rank, e.kind.value, *e[2:]] for e in self.events],
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Returns the timeline that `to_json` wrote. Raises ValueError for another schema."""
        if data.get("schema") != SCHEMA:
            raise ValueError(f"the timeline has schema {data.get('schema')!r}; this version reads {SCHEMA}")
        return cls(
            method=data["method"],
            num_ranks=data["num_ranks"],
            microbatches_per_update=data["microbatches_per_update"],
            events=tuple(Event(rank, Kind(kind), *rest) for rank, kind, *rest in data["events"]),
            origin=data["origin"],
            longer_per_s=data.get("longer_per_s"),
        )

    def to_chrome_trace(self) -> dict[str, Any]:
        """Returns a trace for chrome://tracing and Perfetto: a thread for each rank, sends as asynchronous
        slices.
        """
        names = {
            Kind.FORWARD: "forward",
            Kind.BACKWARD: "backward",
            Kind.INPUT_GRADIENT: "backward",
            Kind.WEIGHT_GRADIENT: "weight gradient",
            Kind.UPDATE: "update",
        }
        trace: list[dict[str, Any]] = []
        for rank in range(self.num_ranks):
            name = {"name": f"rank {rank}"}
            trace.append({"name": "thread_name", "ph": "M", "pid": 0, "tid": rank, "args": name})
        for serial, event in enumerate(self.events):
            facts = {"stage": event.stage, "microbatch": event.microbatch, "version": event.version}
            common = {"name": event.label, "pid": 0, "tid": event.rank, "ts": event.start_s * 1e6}
            if event.kind in SENDS:
                # Sends overlap one another and the computation, which slices of one thread must not.
                link = common | {"cat": "send", "id": serial}
                trace.append(link | {"ph": "b", "args": facts})
                trace.append(link | {"ph": "e", "ts": event.end_s * 1e6})
            elif event.kind in COMPUTE or event.duration_s > 0:
                length = {"ph": "X", "dur": event.duration_s * 1e6}
                trace.append(common | length | {"cat": names.get(event.kind, "wait"), "args": facts})
        return {"displayTimeUnit": "ms", "traceEvents": trace}
