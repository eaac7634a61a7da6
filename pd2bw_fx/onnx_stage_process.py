"""The process that runs one stage of an exported folder, without torch, whose import takes seconds."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pd2bw_fx.onnx_session import Array, open_session, run_failure


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor of one microbatch on its way into a stage, or out of the model."""

    microbatch: int
    tensor: str
    array: Array


@dataclass(frozen=True, slots=True)
class Failure:
    """The error that stopped a stage."""

    stage: int
    reason: str


@dataclass(frozen=True, slots=True)
class Done:
    """The last message of a stage's process. A process that ends without it has failed."""

    stage: int


@dataclass(frozen=True, slots=True)
class StageWork:
    """What the process does: `entry` is its stage in the manifest, `leaving` are the model's outputs."""

    file: Path
    entry: Mapping[str, Any]
    leaving: frozenset[str]
    num_microbatches: int
    num_threads: int


def run_stage(work: StageWork, inboxes: Mapping[int, Any], results: Any) -> None:
    """Runs one stage's microbatches in order, in its process."""
    entry = work.entry
    try:
        session = open_session(work.file, f"stage {entry['stage']}", num_threads=work.num_threads)
        outputs = {port["tensor"]: port for port in entry["outputs"]}
        needed = {port["tensor"] for port in entry["inputs"]}
        waiting: dict[int, dict[str, Array]] = defaultdict(dict)
        for microbatch in range(work.num_microbatches):
            while waiting[microbatch].keys() != needed:
                value = inboxes[entry["stage"]].get()
                waiting[value.microbatch][value.tensor] = value.array
            made = session.run(list(outputs), waiting.pop(microbatch))
            for (name, port), array in zip(outputs.items(), made, strict=True):
                for target in port["targets"]:
                    inboxes[target].put(Value(microbatch, name, array))
                if name in work.leaving:
                    results.put(Value(microbatch, name, array))
        results.put(Done(entry["stage"]))
    except Exception as error:  # sent to the waiting process, which raises it
        results.put(Failure(entry["stage"], run_failure(error)))
