"""The pictures of a report one by one, as files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

from pd2bw_fx.errors import InputError
from pd2bw_fx.graph import OperatorGraph
from pd2bw_fx.metrics import Metrics
from pd2bw_fx.plan import Plan
from pd2bw_fx.report.graph_svg import graph_svg
from pd2bw_fx.report.loads import loads_svg
from pd2bw_fx.report.losses import losses_svg
from pd2bw_fx.report.memory import memory_svg
from pd2bw_fx.report.picture import write_picture
from pd2bw_fx.report.timeline import timeline_svg
from pd2bw_fx.timeline import Timeline

Part = Literal["graph", "timeline", "measured", "time", "memory", "loss"]
PARTS: tuple[Part, ...] = ("graph", "timeline", "measured", "time", "memory", "loss")


def write_part(
    part: Part,
    path: str | Path,
    *,
    graph: OperatorGraph,
    plan: Plan,
    timeline: Timeline | None,
    metrics: Metrics | None,
) -> None:
    """One picture, as .svg or .png by the path's suffix.

    "graph": the operators by stage; "timeline": the simulated schedule; "measured": that of the training run;
    "time" and "memory": a bar for each stage; "loss": the training run's curve. The timelines also as .json,
    for Perfetto and chrome://tracing. Raises InputError for what there is nothing to draw of.
    """
    if part in ("timeline", "measured"):
        shown = timeline if part == "timeline" else _measured(metrics)
        if shown is None:
            raise InputError("there is no schedule of inference to draw; its stages run one after another")
        write_timeline(shown, path)
    elif part == "loss":
        if metrics is None:
            raise InputError("there is no training run to show; train first, or name its metrics.json")
        write_picture(losses_svg({metrics.method: metrics.losses}, first=metrics.first_update + 1), path)
    elif part == "graph":
        write_picture(graph_svg(graph, plan), path)
    elif part in PARTS:
        write_picture(loads_svg(plan) if part == "time" else memory_svg(plan), path)
    else:
        raise InputError(f"part is {part!r}; expected one of {', '.join(PARTS)}")


def write_timeline(timeline: Timeline, path: str | Path) -> None:
    """As .svg or .png, or as .json for Perfetto and chrome://tracing."""
    if Path(path).suffix == ".json":
        Path(path).write_text(json.dumps(timeline.to_chrome_trace()))
    else:
        write_picture(timeline_svg(timeline), path)


def _measured(metrics: Metrics | None) -> Timeline:
    found = None if metrics is None else metrics.timeline
    if found is None:
        raise InputError("no training run has told which action took how long; see Metrics.records")
    return found
