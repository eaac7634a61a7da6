"""generate: one readable, standalone module for each stage.

`cut.py` says what a stage consists of, `scopes.py` and `stage_tree.py` lift it back to the model's own
modules. `method.py` writes a forward: `body.py` says what is folded into what, `naming.py` what things are
called, `spell.py`, `words.py` and `expression.py` how operators read. `rolling.py` makes loops of rounds.
`attributes.py` and `layers.py` write an `__init__`, `write.py` the classes (each distinct one once),
`layout.py` the lines, `document.py` the file. Everything that comes from the model passes through
`literals.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

from pd2bw_fx.graph import OperatorGraph, TensorSpec
from pd2bw_fx.names import free_name
from pd2bw_fx.plan import Plan
from pd2bw_fx.source_check import check_source
from pd2bw_fx.stage import Port, StageProgram

from .cut import Cut, cut
from .document import document
from .layout import WIDTH
from .literals import identifier
from .method import Method
from .naming import argument_name
from .stage_tree import StageTree
from .write import StageWriter

__all__ = ["WIDTH", "generate"]


def generate(graph: OperatorGraph, plan: Plan) -> tuple[StageProgram, ...]:
    """The program of every stage of the plan. The same graph and plan give the same bytes.

    Any assignment without a way back is legal, whether or not its stages are contiguous. Raises TraceError
    for a constant or function of the model that cannot be written as source.
    """
    cuts = cut(graph, plan)
    trees = [StageTree(graph, stage) for stage in cuts]
    names = _names_of_what_crosses(cuts, trees)
    for tree in trees:
        tree.port_names.update(names)
    return tuple(_program(graph, plan, tree) for tree in trees)


def _names_of_what_crosses(cuts: Sequence[Cut], trees: Sequence[StageTree]) -> dict[str, str]:
    """One name for each value that a stage gives, in all stages that have it: what the model calls it, else
    what its reader will. Two of one name are never given by one stage, nor taken by one."""
    names: dict[str, str] = {}
    for stage, tree in zip(cuts, trees, strict=True):
        given = tree.gives(tree.root)
        for node in given:
            if node.name in names:
                continue  # handed on
            beside = [*given, *(other for at in stage.targets[node.name] for other in cuts[at].inputs)]
            taken = {names[other.name] for other in beside if other.name in names}
            taken |= {identifier(other.name) for other in beside if other.op == "placeholder"}
            base = identifier(stage.model_outputs.get(node.name) or argument_name(tree, tree.root, node))
            name = free_name(base, taken)
            if name != base:  # a number that the stage takes a value of is no other's
                taken |= {names[other.name] for other in stage.inputs if other.name in names}
                name = free_name(base, taken)
            names[node.name] = name
    return names


def _program(graph: OperatorGraph, plan: Plan, tree: StageTree) -> StageProgram:
    stage = tree.stage
    name = identifier(f"{graph.model_name}Stage{stage.stage}", fallback="Model")
    writer = StageWriter(tree, name)
    method = writer.write()
    names = writer.held_names()
    held = set(names.values())
    parameters = tuple(n for n in graph.parameters if n in held)
    inputs, outputs = _ports(graph, tree, stage, method)
    source = document(graph, plan, stage.stage, writer, inputs, outputs, parameters)
    check_source(source, f"stage_{stage.stage}.py")
    return StageProgram(
        stage=stage.stage,
        class_name=name,
        source=source,
        inputs=inputs,
        outputs=outputs,
        parameters=parameters,
        buffers=tuple(n for n in graph.buffers if n in held),
        ties=dict(sorted((writer.ties | {n: n for n in writer.ties.values() if n in names}).items())),
        draws=_draws(graph, stage),
    )


def _draws(graph: OperatorGraph, stage: Cut) -> tuple[int, ...]:
    here = {node.name for node in stage.nodes}
    return tuple(i for i, o in enumerate(graph.operators.values()) if o.is_random and o.name in here)


def _ports(
    graph: OperatorGraph, tree: StageTree, stage: Cut, method: Method
) -> tuple[tuple[Port, ...], tuple[Port, ...]]:
    reads = {node.name: name for node, name in zip(tree.reads(tree.root), method.arguments, strict=False)}
    inputs = tuple(
        Port(value=name, name=local, spec=_spec(graph, name), source=stage.source.get(name))
        for name, local in reads.items()
    )
    outputs = tuple(
        Port(
            value=node.name,
            name=tree.port_names[node.name],
            spec=_spec(graph, node.name),
            targets=stage.targets[node.name],
            model_output=stage.model_outputs.get(node.name),
        )
        for node in tree.gives(tree.root)
    )
    return inputs, outputs


def _spec(graph: OperatorGraph, name: str) -> TensorSpec:
    return graph.inputs[name] if name in graph.inputs else graph.operators[name].outputs[0]
