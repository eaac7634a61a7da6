"""generate: one readable, standalone module for each stage.

What a stage consists of, and the tree of module calls that its operators belong to:

    cut.py             the operators, inputs and outputs of each stage
    scopes.py          the module tree, lifted back from the flat program
    calls.py           what is known of a program's calls as they are
    stage_tree.py      what each call of a stage reads and returns, and what holds which parameter
    unread_results.py  results that nobody reads, where other calls of the same kind return them

A forward, method by method:

    method.py          the statements of one forward
    written.py         the forward as it is written: arguments and lines
    body.py            the items of its body
    folding.py         which of them are written inside another's expression
    layer_calls.py     what the calls of torch.nn layers are given and return
    attention.py       what those of nn.MultiheadAttention are
    naming.py          what values are called, after the author's source
    argument_names.py  what a body calls what it is given
    local_names.py     the names of one body's values, and how long each is taken
    second_names.py    second names of values: `residual = x`
    put_away.py        values in the author's lists: `skips.append(x)`
    number_lists.py    numbers that are read out of a tensor all at once: `counts = x.tolist()`
    parts.py           the parts of a tensor as variables, or as entries of a list
    crossing.py        names of the values that cross between stages
    sizes.py           sizes that are read off tensors, and the names of those that are read often
    statements.py      what the author's statements assign
    outermost.py       whether an operator or call is a statement's outermost operation
    loops/             rounds of a loop, written as a loop again

An operator as source:

    spell.py           an operator in torch's public words
    wording.py         how the author's statement words it: 0.5 * x, torch.exp(x), x**2
    words.py           operators with a spelling of their own: -x, x.mT
    subscripts.py      what is one subscript to the author, and several operators in a trace: x[:, 1:, 0]
    part_writes.py     what is an assignment to a part of a tensor to the author: x[:, 1:] = y
    functions.py       operators that are functions with other arguments: F.cross_entropy
    spatial.py         convolutions, pooling and resampling as functions: F.max_pool2d
    idioms.py          several operators that are one function: F.normalize
    expression.py      expressions with their binding strength
    limits.py          limits of floating-point types by name
    numbers.py         constants that are written where they are read
    literals.py        the gate through which everything from the model becomes source

Classes and the file:

    write.py           from a stage's tree to its classes
    classes.py         classes that differ in constants alone become one with arguments
    attributes.py      what __init__ builds, and how methods refer to it
    template.py        what builds a module or tensor, with its constants open
    layers.py          layers of torch.nn with their arguments
    normed_layers.py   those whose weight is normed
    custom.py          custom autograd functions as classes
    layout.py          lines as ruff format lays them out
    breaking.py        where a long expression is broken
    document.py        the whole file
    cut_reason.py      why the stage ends where it does
"""

from __future__ import annotations

from pd2bw_fx.graph import OperatorGraph, TensorSpec
from pd2bw_fx.plan import Plan
from pd2bw_fx.source_check import check_source
from pd2bw_fx.stage import Port, StageProgram

from .crossing import names_of_what_crosses
from .cut import Cut, cut
from .document import document
from .layout import WIDTH
from .literals import identifier
from .stage_tree import StageTree
from .write import StageWriter
from .written import Method

__all__ = ["WIDTH", "generate"]


def generate(graph: OperatorGraph, plan: Plan) -> tuple[StageProgram, ...]:
    """Generates the program of every stage of the plan; the same graph and plan give the same bytes.

    Any assignment in which no value goes back to an earlier stage is legal, contiguous or not. Raises
    TraceError for a constant or function of the model that cannot be written as source.
    """
    cuts = cut(graph, plan)
    trees = [StageTree(graph, stage) for stage in cuts]
    names = names_of_what_crosses(cuts, trees)
    for tree in trees:
        tree.port_names.update(names)
    return tuple(_program(graph, plan, tree) for tree in trees)


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
