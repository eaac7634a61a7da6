"""From any front end's program to the normal form that everything later relies on (pd2bw_fx/graph.py).

`normalise` lifts the program into a flat graph, rewrites it step by step, and describes it as operators.

    module         what is in it, roughly in the order of use
    lift           the front end's program as one flat graph that reads the model's tensors by name
    paths          names of modules and tensors in the user's model
    nodes          what a node's schema says of it: its name, its writes, its random numbers
    clean          small rewrites: guards, identities, dead code and the like are removed
    augmented      `mask |= other` under the names of the plain operators
    default_dtype  types that come from torch's default, where that is not float32
    resized        `resize_` of tensors that have no values yet
    numbers        tensors that the tracer made of numbers, as numbers again
    functional     in-place writes to activations, as functional operators
    overloads      the functional overloads of in-place operators
    facts          what torch says of each value: gradients, shared memory, writes
    assume         the same by name, where there are no example inputs
    one_sample     whether tensors share memory for one sample as for several
    state          copies of state that a later forward writes, for a gradient to read
    casts          casts that do something only under autocast
    layers         the operators of a linear layer within a map, as the layer
    author_lines   whole statements in stack traces, where they go over several lines
    memory         operators that must stay in one stage
    heavy          operators on inputs alone that stages should not repeat
    describe       from nodes to operators of the graph
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from pd2bw_fx.errors import Pd2bwError, TraceError
from pd2bw_fx.graph import ModelOutput, OperatorGraph
from pd2bw_fx.program import FxProgram, tensors, training_context
from pd2bw_fx.size_range import SizeRange
from pd2bw_fx.traced import Traced

from .assume import assume
from .augmented import name_augmented_assignments
from .author_lines import keep_whole_statements
from .casts import working_casts
from .clean import (
    even_bounds,
    fill_empty,
    remove_broadcasts,
    remove_dead_code,
    remove_default_formats,
    remove_detached_constants,
    remove_guards,
    remove_identities,
    remove_true_terms,
    reshape_attended,
    separate_repeated_outputs,
)
from .default_dtype import write_default_dtype
from .describe import Describer, parameter_specs, source_line
from .facts import Facts, observe
from .functional import make_functional, reshape_as_views
from .layers import call_mapped_layers
from .lift import Draft, canonical_names, lift
from .memory import find_memory_groups
from .numbers import write_numbers
from .one_sample import sizes_alike
from .resized import make_at_their_size
from .state import copy_written_state

__all__ = ["normalise", "tensors"]


def normalise(traced: Traced) -> OperatorGraph:
    """Returns the operator graph of a traced program."""
    with training_context():
        return _normal_form(traced)


def _normal_form(traced: Traced) -> OperatorGraph:
    draft = lift(traced)
    remove_guards(draft)
    name_augmented_assignments(draft)
    remove_detached_constants(draft)
    remove_broadcasts(draft)
    make_at_their_size(draft)
    fill_empty(draft)
    remove_default_formats(draft)
    even_bounds(draft)
    write_numbers(draft, traced.model)
    reshape_as_views(draft)
    draft, facts, batch_sizes = _observed(draft, traced)
    if traced.examples:
        facts.working_casts = working_casts(_program(draft), facts, traced.examples)
    remove_identities(draft, facts)
    reshape_attended(draft, facts)
    remove_true_terms(draft, facts)
    call_mapped_layers(draft, traced.model)
    remove_dead_code(draft, facts)
    keep_whole_statements(draft)
    separate_repeated_outputs(draft, facts)
    placeholders = draft.graph.find_nodes(op="placeholder")
    parameters, buffers = parameter_specs(traced, draft)
    describer = Describer(
        draft=draft,
        facts=facts,
        memory=find_memory_groups(draft, facts, traced.model),
        symbols=_symbols(traced, placeholders),
        canonical=canonical_names(traced.model),
        parameters=parameters.keys(),
        model_type=traced.model_name,
    )
    return OperatorGraph(
        operators=describer.operators(),
        inputs={node.name: describer.input_spec(node) for node in placeholders},
        parameters=parameters,
        buffers=buffers,
        outputs=_outputs(traced, draft.graph),
        loss=traced.loss,
        model_name=traced.model_name,
        batch_symbol="batch" if traced.dynamic_batch else None,
        batch_sizes=batch_sizes,
        unused_inputs=tuple(node.name for node in placeholders if not node.users),
        fx=_program(draft),
        root=traced.model,
        changing=traced.changing,
    )


def _observed(draft: Draft, traced: Traced) -> tuple[Draft, Facts, SizeRange]:
    """Makes the program functional where it can be.

    Returns it with the facts about its values, and the batch sizes that it is right for.
    """
    if not traced.examples:
        trainable = {name for name, p in traced.model.named_parameters() if p.requires_grad}
        return draft, assume(draft, trainable), traced.batch_sizes
    try:
        facts = observe(_program(draft), traced.examples)
        if write_default_dtype(draft, facts):
            facts = observe(_program(draft), traced.examples)
        sizes = sizes_alike(_program(draft), facts, traced)
    except Pd2bwError:
        raise
    except Exception as error:  # whatever an operator of the model raises
        reason = next((line for line in str(error).splitlines() if line.strip()), "")
        where = source_line(str(error))  # torch's message names the operator's line
        raise TraceError(
            f"{traced.model_name} was traced, and what came of it cannot be run on sizes and types alone"
            f"{f' at {where}' if where else ''}: {type(error).__name__}: {reason}\n{traced.report}\n"
            "  Try: index by one mask that is computed once (a[mask], b[mask]) where lengths depend on "
            "values, or have the part of the model at that line run as it is written (pd2bw_fx.untraced)."
        ) from error
    rewritten = make_functional(draft, facts)
    if rewritten is draft:
        return draft, facts, sizes
    facts = observe(_program(rewritten), traced.examples)
    if copy_written_state(rewritten, facts):
        facts = observe(_program(rewritten), traced.examples)
    return rewritten, facts, sizes


def _program(draft: Draft) -> FxProgram:
    return FxProgram(draft.graph, draft.values)


def _symbols(traced: Traced, placeholders: Any) -> dict[str, str]:
    """Returns our names for the tracer's symbols.

    The size of dimension 0 of a batched input is "batch", and that of dimension 1 of a sequence is its
    length.
    """
    symbols: dict[str, str] = {}
    for node in placeholders:
        value = node.meta.get("val")
        if not traced.dynamic_batch or not isinstance(value, torch.Tensor):
            continue
        words = {0: "batch"} if node.name in traced.batched_inputs else {}
        words |= {1: traced.lengths[node.name]} if node.name in traced.lengths else {}
        for dimension, word in words.items():
            size: Any = value.shape[dimension]
            if isinstance(size, torch.SymInt):
                symbols[str(size.node.expr)] = word
    return symbols


def _outputs(traced: Traced, graph: fx.Graph) -> tuple[ModelOutput, ...]:
    results = graph.output_node().args[0]
    assert isinstance(results, (tuple, list))
    for name, value in zip(traced.outputs, results, strict=True):
        if isinstance(value, fx.Node) and value.op == "get_attr":
            raise TraceError(
                f"the model returns its own {str(value.target)!r} as the output {name!r}, which no stage "
                "computes; leave it out of what the forward returns"
            )
    return tuple(
        ModelOutput(name, value.name)
        for name, value in zip(traced.outputs, results, strict=True)
        if isinstance(value, fx.Node)
    )
