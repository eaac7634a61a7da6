"""Runs the stages of an exported folder in a process each, with microbatches in a pipeline.

process 0   F0 F1 F2 F3            every process has one inbox; a stage runs a microbatch when it has all
process 1      F0 F1 F2 F3         of its values, and puts the results into the inboxes of the stages that
process 2         F0 F1 F2 F3      read them
"""

from __future__ import annotations

import multiprocessing
import queue
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pd2bw_fx.errors import ExportError, InputError
from pd2bw_fx.onnx_session import Array
from pd2bw_fx.onnx_stage_process import Done, Failure, StageWork, Value, run_stage
from pd2bw_fx.units import counted

from .arrays import from_pairs
from .batched import batch_place, batch_symbol
from .run import named_inputs, onnx_manifest, require_batch_size

_POLL_S = 0.5


def run_onnx_processes(
    folder: str | Path, inputs: Mapping[str, Tensor | Array] | None, *, num_microbatches: int = 1
) -> dict[str, Array]:
    """Returns the model's outputs by name, computed by one process per stage.

    With several microbatches the batch is cut along its batch axis, and the stages work at the same time. An
    output without a batch axis (a mean loss), or with two, cannot be joined again and is refused.
    Raises what `run_onnx` raises. No process outlives the call.

    A script that calls this needs the guard `if __name__ == "__main__":`, as with any spawned process.
    """
    folder = Path(folder)
    manifest = onnx_manifest(folder)
    if not manifest["stages"]:
        raise InputError(f"{folder} holds one annotated model and no stages; export with form='stages'")
    fed = named_inputs(folder, manifest, inputs)
    microbatches = _cut(manifest, fed, num_microbatches)
    for tensors in microbatches:
        require_batch_size(manifest, tensors, num_microbatches=num_microbatches)
    context = multiprocessing.get_context("spawn")
    leaving = frozenset(entry["tensor"] for entry in manifest["outputs"])
    inboxes = {entry["stage"]: context.Queue() for entry in manifest["stages"]}
    results = context.Queue()
    workers = {}
    for entry in manifest["stages"]:
        work = StageWork(
            folder / entry["file"], entry, leaving, len(microbatches), num_threads=torch.get_num_threads()
        )
        workers[entry["stage"]] = context.Process(
            target=run_stage, args=(work, inboxes, results), daemon=True
        )
    outer = [
        (entry["stage"], port["tensor"])
        for entry in manifest["stages"]
        for port in entry["inputs"]
        if port["source"] is None
    ]
    try:
        for worker in workers.values():
            worker.start()
        for microbatch, tensors in enumerate(microbatches):
            for stage, name in outer:
                inboxes[stage].put(Value(microbatch, name, tensors[name]))
        return _joined(manifest, _collected(manifest, microbatches, results, workers))
    finally:
        for worker in workers.values():
            if worker.pid is not None:  # None: it was never started
                worker.terminate()
                worker.join()
        for box in (*inboxes.values(), results):
            box.cancel_join_thread()
            box.close()


def _cut(
    manifest: Mapping[str, Any], fed: Mapping[str, Array], num_microbatches: int
) -> list[dict[str, Array]]:
    """Returns the inputs of each microbatch; an input without a batch axis is the same for all."""
    if num_microbatches < 1:
        raise InputError(f"num_microbatches is {num_microbatches}; at least one was expected")
    if num_microbatches == 1:
        return [dict(fed)]
    symbol = batch_symbol(manifest)
    if symbol is None:
        sizes = {
            size for entry in manifest["inputs"] for size in entry["shape"] or () if isinstance(size, str)
        }
        what = "the files take one batch size only"
        if sizes:
            what = f"it cannot be told which of {', '.join(sorted(sizes))} is the batch's size"
        raise InputError(f"{what}, so the batch cannot be cut; run with num_microbatches=1")
    for entry in manifest["outputs"]:
        if batch_place(entry, symbol) is None:
            raise InputError(
                f"output {entry['name']!r} has no batch axis, so microbatches cannot be put together; run "
                "with num_microbatches=1"
            )
    places = {entry["tensor"]: batch_place(entry, symbol) for entry in manifest["inputs"]}
    batched = {name: axis for name, axis in places.items() if axis is not None}
    fewest = min(fed[name].shape[axis] for name, axis in batched.items())
    if fewest < num_microbatches:
        raise InputError(
            f"{counted(fewest, 'sample')} cannot be cut into {counted(num_microbatches, 'microbatch')}"
        )
    pieces = {name: np.array_split(fed[name], num_microbatches, axis) for name, axis in batched.items()}
    return [{name: pieces[name][m] if name in batched else array for name, array in fed.items()}
            for m in range(num_microbatches)]  # fmt: skip


def _collected(
    manifest: Mapping[str, Any],
    microbatches: Sequence[Mapping[str, Array]],
    results: Any,
    workers: Mapping[int, Any],
) -> list[dict[str, Array]]:
    """Returns each microbatch's outputs, once all have come.

    Raises ExportError for a stage that fails, or whose process ends before.
    """
    made = {port["tensor"] for entry in manifest["stages"] for port in entry["outputs"]}
    wanted = {entry["tensor"] for entry in manifest["outputs"]}
    arrived: list[dict[str, Array]] = [
        {name: tensors[name] for name in wanted - made} for tensors in microbatches
    ]
    done = set()
    while any(len(tensors) < len(wanted) for tensors in arrived):
        try:
            message = results.get(timeout=_POLL_S)
        except queue.Empty:
            lost = [s for s, worker in workers.items() if worker.exitcode is not None and s not in done]
            if lost:
                code = workers[lost[0]].exitcode
                raise ExportError(
                    f"the process of stage {lost[0]} ended with code {code} before its work was done; "
                    "look for a lack of memory, or a script without `if __name__ == '__main__':`"
                ) from None
            continue
        if isinstance(message, Failure):
            raise ExportError(f"stage {message.stage} failed in its process: {message.reason}")
        if isinstance(message, Done):
            done.add(message.stage)
            continue
        arrived[message.microbatch][message.tensor] = message.array
    return arrived


def _joined(manifest: Mapping[str, Any], arrived: Sequence[Mapping[str, Array]]) -> dict[str, Array]:
    """Returns the microbatches' outputs put together along their batch axis, by name."""
    if len(arrived) == 1:
        return {e["name"]: from_pairs(e, arrived[0][e["tensor"]]) for e in manifest["outputs"]}
    symbol = batch_symbol(manifest)
    assert symbol is not None, "what cannot be cut is refused before it is run"
    return {
        entry["name"]: np.concatenate(
            [from_pairs(entry, tensors[entry["tensor"]]) for tensors in arrived],
            batch_place(entry, symbol) or 0,
        )
        for entry in manifest["outputs"]
    }
