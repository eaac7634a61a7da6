"""The published operator graphs of BERT with 3 layers, as they would be with more: as large as any published.

The second layer is put in between itself and the third as often as it takes, forward and backward, with what
it reads and what reads it. The twins of its nodes in the third layer say what an edge between two layers is.
"""

from __future__ import annotations

import itertools
import json
import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pd2bw_fx.workload import Workload, workload_from_json

_NUM_LAYERS = 3
_COMPUTED = range(131, 176)  # the second layer's forward, but for its weights; the third's follows at once
_BETWEEN = {  # where gradients of a layer's two residuals are added up: named by tensors, not by operators
    "AccumulateGrad_337_grad": "AccumulateGrad_459_grad",
    "AccumulateGrad_308_grad": "AccumulateGrad_430_grad",
}
# Forward and backward, without what all layers share: its edges to the second are that one's alone.
_FIRST_LAYER = {*range(79, 91), *range(96, 131), *range(478, 569)}


def deeper(path: Path, num_layers: int) -> Workload:
    """The workload of the file with so many layers in place of three."""
    data = json.loads(path.read_text())
    nodes = {node["id"]: node for node in data["nodes"]}
    third_of = _twins(nodes)
    second_of = {third: second for second, third in third_of.items()}
    for second, third in third_of.items():
        assert nodes[second]["size"] == nodes[third]["size"], (nodes[second], nodes[third])

    fresh = max(nodes) + 1
    layers = [{node: node for node in third_of}]
    for copy in range(num_layers - _NUM_LAYERS):
        layers.append({node: fresh + at for at, node in enumerate(third_of)})
        fresh += len(third_of)
        for node, own in layers[-1].items():
            color = nodes[node].get("colorClass")
            more = {"colorClass": None if color is None else f"{color} of copy {copy}"}
            data["nodes"].append({**nodes[node], "id": own, **more})
    layers.append(third_of)

    edges = []
    for edge in data["edges"]:
        source, target = edge["sourceId"], edge["destId"]
        ends = [(source, target)]
        if source in third_of and target in second_of:
            pairs = itertools.pairwise(layers)
            ends = [(one[source], other[second_of[target]]) for one, other in pairs]
        elif source in second_of and target in third_of:
            pairs = itertools.pairwise(layers)
            ends = [(other[second_of[source]], one[target]) for one, other in pairs]
        elif (source in third_of or target in third_of) and not {source, target} & _FIRST_LAYER:
            ends = [(layer.get(source, source), layer.get(target, target)) for layer in layers[:-1]]
        edges += [{**edge, "sourceId": source, "destId": target} for source, target in ends]
    name = path.stem.replace(f"l-{_NUM_LAYERS}", f"l-{num_layers}")
    return workload_from_json({**data, "edges": edges}, name=name)


def _twins(nodes: Mapping[int, Mapping[str, Any]]) -> dict[int, int]:
    """Each node of the second layer, and the third layer's node that does the same there."""
    id_of = {node["name"]: node["id"] for node in nodes.values()}
    twins = {number: number + len(_COMPUTED) for number in _COMPUTED}
    named = {nodes[one]["name"]: nodes[other]["name"] for one, other in twins.items()}
    alike: dict[tuple[str, str], list[int]] = defaultdict(list)  # an operator's nodes of one kind, in order
    for number in sorted(nodes):
        operator, _, kind = re.sub(r"_\d+_grad$", "_grad", nodes[number]["name"]).partition("_Grad/")
        alike[operator, re.sub(r"layer\.\d\.", "layer.", kind)].append(number)
    for (operator, kind), numbers in alike.items():
        other = named.get(operator, operator.replace("layer.1.", "layer.2."))
        if other != operator and numbers[0] not in twins:
            twins |= zip(numbers, alike[other, kind], strict=True)
    return twins | {id_of[one]: id_of[other] for one, other in _BETWEEN.items() if one in id_of}
