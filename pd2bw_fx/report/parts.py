"""The pictures of a report one by one, as files."""

from __future__ import annotations

from pathlib import Path

from pd2bw_fx.errors import InputError
from pd2bw_fx.graph import OperatorGraph
from pd2bw_fx.metrics import Metrics
from pd2bw_fx.plan import Plan
from pd2bw_fx.report import PARTS, Part
from pd2bw_fx.report.graph_svg import graph_svg
from pd2bw_fx.report.loads import loads_svg
from pd2bw_fx.report.losses import losses_svg
from pd2bw_fx.report.memory import memory_svg
from pd2bw_fx.report.picture import Picture
from pd2bw_fx.report.timeline import timeline_svg
from pd2bw_fx.timeline import Timeline


def picture_of(
    part: Part,
    *,
    graph: OperatorGraph,
    plan: Plan,
    timeline: Timeline | None,
    metrics: Metrics | None,
) -> Picture:
    """Returns one picture.

    "graph": the operators by stage; "timeline": the simulated schedule; "measured": that of the training run;
    "time" and "memory": a bar for each stage; "loss": the training run's curve. Raises InputError where there
    is nothing to draw.
    """
    if part in ("timeline", "measured"):
        shown = timeline if part == "timeline" else _measured(metrics)
        if shown is None:
            raise InputError("there is no schedule of inference to draw; its stages run one after another")
        return Picture(timeline_svg(shown), shown)
    if part == "loss":
        if metrics is None:
            raise InputError("there is no training run to show; train first, or name its metrics.json")
        return Picture(losses_svg({metrics.method: metrics.losses}, first=metrics.first_update + 1))
    if part == "graph":
        return Picture(graph_svg(graph, plan))
    if part in PARTS:
        return Picture(loads_svg(plan) if part == "time" else memory_svg(plan))
    raise InputError(f"part is {part!r}; expected one of {', '.join(PARTS)}")


def write_timeline(timeline: Timeline, path: str | Path) -> None:
    """Writes a timeline as .svg or .png, or as .json for Perfetto and chrome://tracing."""
    Picture(timeline_svg(timeline), timeline).save(path)


def _measured(metrics: Metrics | None) -> Timeline:
    found = None if metrics is None else metrics.timeline
    if found is None:
        raise InputError("no training run has told which action took how long; see Metrics.records")
    return found
