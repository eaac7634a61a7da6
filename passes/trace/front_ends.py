"""One front end's trace of a program: its graph, and the batch sizes that it is right for."""

from __future__ import annotations

from dataclasses import replace

from torch import fx
from torch.export import ExportedProgram

from pd2bw_fx.size_range import ANY_SIZE, SizeRange
from pd2bw_fx.traced import Traced, TraceReport

from .checks.single_sample import is_right_for_one
from .eager_run import call_apart, keep_state, require_eager_run, require_nothing_written
from .exported import batch_sizes, export, foreign_operators
from .inputs import FlatArguments
from .notes import note_on_operator, notes_on_comparisons
from .program import MODEL_PREFIX, Program
from .symbolic import trace_symbolically

_OPEN = ("export", "export-as-example", "export-sequence")  # front ends with an open batch size


def trace_by(name: str, program: Program, batch_size: int | None) -> Traced:
    """Traces the program by the front end `name`, and raises whatever stops it."""
    if name == "fx":
        graph: ExportedProgram | fx.GraphModule = _by_fx(program)
        sizes = ANY_SIZE
        notes: tuple[str, ...] = ("torch.fx does not see data types, and keeps torch.nn layers whole",)
    elif name == "export-static":
        graph, sizes = export(program, None), ANY_SIZE
        notes = (
            *program.options.conditions.notes(),
            f"traced at batch size {batch_size} alone: no other one can be run",
            *_notes_on(graph),
        )
    else:
        graph, sizes = _by_export(program, batch_size, with_lengths=name == "export-sequence")
        batched = [] if batch_size is None else _placeholders(graph, program.flat, batch_size)
        notes = (
            *program.options.conditions.notes(),
            *_notes_on_sizes(sizes),
            *notes_on_comparisons(graph, batched),
            *_notes_on(graph),
        )
    flat = program.flat
    examples = dict(zip(flat.names, flat.tensors, strict=False))
    return Traced(
        program=graph,
        model=program.model,
        inputs=flat.names,
        outputs=program.record.output_names,
        loss=program.record.loss,
        report=TraceReport(name, notes=notes),
        prefix=MODEL_PREFIX,
        batch_size=batch_size,
        batched_inputs=frozenset() if batch_size is None else flat.batched(batch_size),
        dynamic_batch=name in _OPEN,
        batch_sizes=sizes,
        lengths=flat.lengths(batch_size) if name == "export-sequence" and batch_size is not None else {},
        changing=tuple(c.module for c in program.watch.changes if c.module is not None and c.is_of_a_layer),
        examples=examples,
        call=call_apart(program) if examples else None,
    )


def _by_fx(program: Program) -> fx.GraphModule:
    with keep_state(program) as written:
        graph = trace_symbolically(program)
    require_nothing_written(written)
    if program.flat.tensors:
        require_eager_run(program)  # finds out which result is the loss, which fx does not know
    return graph


def _by_export(
    program: Program, batch_size: int | None, *, with_lengths: bool
) -> tuple[ExportedProgram, SizeRange]:
    """Exports the program; returns it with the batch sizes that it is right for."""
    graph = export(program, batch_size, with_lengths=with_lengths)
    if batch_size is None:
        return graph, ANY_SIZE
    batched = _placeholders(graph, program.flat, batch_size)
    sizes = batch_sizes(graph, batched, multiple_of=program.options.multiple_of)
    if sizes.least <= 1 and not is_right_for_one(graph, program, batch_size):
        sizes = replace(sizes, least=2)
        if batch_size == 1:
            raise ValueError("the model goes another way for one sample than for more")
    return graph, sizes


def _notes_on_sizes(sizes: SizeRange) -> tuple[str, ...]:
    if sizes.is_open:
        return ()
    return (
        f"this program is for batches of {sizes}: others may go another way through the model, where "
        "it, or a function that it calls (torch.cdist for one), asks for the batch size",
    )


def _notes_on(graph: ExportedProgram) -> tuple[str, ...]:
    return tuple(map(note_on_operator, foreign_operators(graph)))


def _placeholders(program: ExportedProgram, flat: FlatArguments, batch_size: int) -> list[str]:
    """Returns the names in the program of the inputs whose dimension 0 is the batch."""
    batched, inputs = flat.batched(batch_size), program.graph_signature.user_inputs
    return [str(inner) for name, inner in zip(flat.names, inputs, strict=True) if name in batched]
