"""Examples to draw, and readers of the pictures, for the tests of pictures and reports."""

import re
from xml.etree import ElementTree

import torch

from pd2bw_fx.actions import Kind
from pd2bw_fx.costs import StageMemory
from pd2bw_fx.graph import ModelOutput, Operator, OperatorGraph, ParameterSpec, TensorSpec
from pd2bw_fx.plan import Plan, StagePlan, Transfer
from pd2bw_fx.timeline import Event, Timeline

SVG = "{http://www.w3.org/2000/svg}"


def two_ranks(num_microbatches: int = 4, *, method: str = "2bw") -> Timeline:
    """Both ranks run F (1 s), B (2 s) and an update of no length for each; versions 0, 0, 1, 2, ..."""
    events = []
    for rank in range(2):
        now = float(rank)
        for k in range(num_microbatches):
            version = max(k - 1, 0)
            events.append(Event(rank, Kind.FORWARD, rank, k, version, now, now + 1))
            events.append(Event(rank, Kind.BACKWARD, rank, k, version, now + 1, now + 3))
            events.append(Event(rank, Kind.UPDATE, rank, -1, k + 1, now + 3, now + 3))
            now += 3
    return Timeline(method, 2, 1, tuple(events))


def boxes(picture: str, pattern: str) -> list[ElementTree.Element]:
    """Returns the rectangles of the matching classes that have a tooltip, which the legend's have not."""
    found = ElementTree.fromstring(picture).iter(f"{SVG}rect")
    return [
        r for r in found if r.find(f"{SVG}title") is not None and re.fullmatch(pattern, r.get("class", ""))
    ]


def texts(picture: str) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(picture).iter(f"{SVG}text")]


def plan_of(*, limit_bytes: int) -> Plan:
    memories = [StageMemory(400, 100, 200, 250, 50, 0), StageMemory(200, 50, 100, 100, 50, 20)]
    stages = tuple(
        StagePlan(s, s, f"cpu:{s}", (f"op{s}",), (f"w{s}",), 1e-3, 2e-3, 0, 0, memory, limit_bytes, 2 - s)
        for s, memory in enumerate(memories)
    )
    transfers = (Transfer("op0", 0, 1, 4096, 4096, 1e-4),)
    return Plan(stages, transfers, 3.1e-3, 3.1e-3, "2bw", 4, "highs", 0.1, "f")


def two_operators() -> OperatorGraph:
    spec = TensorSpec(("batch", 8), torch.float32, True, (2, 8))
    operators = {
        "op0": Operator("op0", "aten.linear.default", "first", "Linear", ("x",), ("w0",), outputs=(spec,)),
        "op1": Operator("op1", "aten.linear.default", "second", "Linear", ("op0",), ("w1",), outputs=(spec,)),
    }
    weights = {name: ParameterSpec(name, spec) for name in ("w0", "w1")}
    return OperatorGraph(operators, {"x": spec}, weights, {}, (ModelOutput("loss", "op1"),), "loss", "A<B>")


def chains(num_stages: int, length: int) -> tuple[OperatorGraph, Plan]:
    """Makes stages that are chains of operators; every third reads `mask` too, which each stage makes."""
    spec = TensorSpec(("batch", 8), torch.float32, True, (2, 8))
    operators = {
        "mask": Operator("mask", "aten.gt.Scalar", "", "Net", ("x",), outputs=(spec,), is_replicable=True)
    }
    last, stages, transfers = "x", [], []
    for stage in range(num_stages):
        names = []
        for number in range(length):
            name = f"op_{stage}_{number}"
            reads = (last, "mask") if number % 3 == 0 else (last,)
            operators[name] = Operator(
                name, "aten.linear.default", f"blocks.{stage}", "Block", reads,
                outputs=(spec,), source_line=f"net.py:{number + 1}",
            )  # fmt: skip
            names.append(name)
            last = name
        memory = StageMemory(1000, 100, 200, 300, 10, 20)
        stages.append(
            StagePlan(
                stage, stage, f"cuda:{stage}", tuple(names), (), 0.001, 0.002, 0.0, 0.0, memory, 2000, 1
            )
        )
        if stage < num_stages - 1:
            transfers.append(Transfer(last, stage, stage + 1, 64, 64, 0.001))
    graph = OperatorGraph(operators, {"x": spec}, {}, {}, (ModelOutput("loss", last),), "loss", "Net")
    plan = Plan(tuple(stages), tuple(transfers), 0.003, 0.003, "2bw", 4, "highs", 0.1, graph.fingerprint())
    return graph, plan
