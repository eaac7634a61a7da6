"""Sparse tensors, which stages can neither compute with, send nor save.

A plain attribute that only an untraced part reads may be sparse: it is in no trace.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram

from pd2bw_fx.errors import InputError, TraceError
from pd2bw_fx.passes.trace.source_lines import line_of
from pd2bw_fx.traced import Traced

_LAYOUTS = {torch.sparse_coo, torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc}
_INSTEAD = (
    "use its indices and values instead, as two dense tensors: a product with it is "
    "out.index_add(0, rows, values[:, None] * x[columns])"
)


def require_dense_inputs(names: Sequence[str], tensors: Sequence[Tensor]) -> None:
    """Raises InputError for an input that is sparse."""
    for name, tensor in zip(names, tensors, strict=False):
        if _is_sparse(tensor):
            raise InputError(f"input {name!r} is a sparse tensor, expected a dense one; {_INSTEAD}")


def require_dense(traced: Traced) -> None:
    """Raises TraceError for a sparse tensor that a trace reads or makes, or that is a buffer or parameter."""
    for node, value, name in _values(traced):
        if not _is_sparse(value):
            continue
        what = f"the sparse tensor {name!r}" if name else "a sparse tensor that it makes"
        where = node if name is None else next(iter(node.users))
        raise TraceError(
            f"the model computes with {what} ({line_of(where)}), which no stage can; {_INSTEAD}. Or keep it "
            "in COO layout in a plain attribute of a module of its own that is left untraced "
            "(pd2bw_fx.untraced)"
        )
    for name, tensor in (*traced.model.named_parameters(), *traced.model.named_buffers()):
        if _is_sparse(tensor):
            raise TraceError(
                f"{name.removeprefix(traced.prefix)!r} is a sparse tensor, which no file of a pipeline can "
                "hold; the forward does not read it, so it can be a plain attribute (self.matrix = matrix)"
            )


def _values(traced: Traced) -> Iterator[tuple[fx.Node, object, str | None]]:
    """Yields nodes that are read, their values, and the names of those that are the model's own tensors."""
    program = traced.program
    if isinstance(program, ExportedProgram):
        held = {
            spec.arg.name: str(spec.target).removeprefix(traced.prefix)
            for spec in program.graph_signature.input_specs
            if spec.target is not None
        }
        for node in program.graph.nodes:
            if node.users:
                yield node, node.meta.get("val"), held.get(node.name)
        return
    for node in program.graph.find_nodes(op="get_attr"):
        value: object = program
        for part in str(node.target).split("."):
            value = getattr(value, part, None)
        if node.users:
            yield node, value, str(node.target).removeprefix(traced.prefix)


def _is_sparse(value: object) -> bool:
    return isinstance(value, Tensor) and value.layout in _LAYOUTS
