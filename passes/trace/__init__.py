"""From a model to a traced program: front ends tried in a fixed order.

1. `export`: `torch.export.export(strict=False)`, dimension 0 of every input that has the batch's size is
   the named dimension "batch", so that any batch size can be run;
2. `export-static`: the same at the example's sizes alone;
3. `fx`: `torch.fx` symbolic tracing, also the only one where there are no example inputs.

The reason of each one that failed is kept in the report.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.export import Dim, ExportedProgram

from pd2bw_fx.errors import Pd2bwError, TraceError
from pd2bw_fx.traced import Attempt, Traced, TraceReport

from .inputs import FlatArguments, common_batch_size, find_example_inputs, flatten_arguments
from .program import MODEL_PREFIX, Program

__all__ = ["find_example_inputs", "trace"]


def trace(
    model: nn.Module,
    args: Sequence[Any] | None = None,
    kwargs: Mapping[str, Any] | None = None,
    *,
    loss_fn: Callable[..., Any] | None = None,
    targets: Any = None,
    tracer: str = "auto",
) -> Traced:
    flat = flatten_arguments(model, args or (), kwargs or {}, targets)
    started = time.perf_counter()
    attempts: list[Attempt] = []
    for name in ("export", "export-static"):
        program = Program(model, flat, loss_fn)
        try:
            exported = _export(program, flat, dynamic=name == "export")
        except Pd2bwError:
            raise
        except Exception as error:
            attempts.append(Attempt(name, str(error)))
            continue
        batch_size = common_batch_size(flat)
        return Traced(
            program=exported,
            model=model,
            inputs=flat.names,
            outputs=program.record.output_names,
            loss=program.record.loss,
            report=TraceReport(name, tuple(attempts), (), time.perf_counter() - started),
            prefix=MODEL_PREFIX,
            batch_size=batch_size,
            batched_inputs=frozenset(
                n
                for n, t in zip(flat.names, flat.tensors, strict=True)
                if t.dim() and t.shape[0] == batch_size
            ),
            dynamic_batch=name == "export",
            loss_module=loss_fn if isinstance(loss_fn, nn.Module) else None,
            examples=dict(zip(flat.names, flat.tensors, strict=True)),
            call=program.call,
        )
    raise TraceError("\n".join(map(str, attempts)))


def _export(program: Program, flat: FlatArguments, *, dynamic: bool) -> ExportedProgram:
    batch = common_batch_size(flat)
    tensors = flat.tensors
    shapes: Any = None
    if dynamic:
        dim = Dim("batch", min=2)
        shapes = {"tensors": tuple({0: dim} if t.dim() and t.shape[0] == batch else None for t in tensors)}
    with torch.enable_grad():
        return torch.export.export(program, tensors, strict=False, dynamic_shapes=shapes)
