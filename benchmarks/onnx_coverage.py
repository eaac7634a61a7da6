"""Which models export: traced, cut in two, written as ONNX stages, run in onnxruntime, put together again.

    python benchmarks/onnx_coverage.py              # everything, printed and written into docs/ONNX.md
    python benchmarks/onnx_coverage.py hf-t5 bert   # some, printed only

The models are those of coverage.py in float32, split in training mode. Exits with 1 if one does not export.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import onnx
import onnxruntime
import torch
import transformers as hf
from coverage_models import CASES, Case

import pd2bw_fx
from pd2bw_fx.errors import Pd2bwError
from pd2bw_fx.passes.export_onnx import check_annotation

DOCUMENT = Path(__file__).parent.parent / "docs" / "ONNX.md"
HEAD = "## Models that export\n"
STAGES = 2


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a model; `reason` is what the exporter, or the check after it, said."""

    nodes: int = 0
    seconds: float = 0.0
    difference: float = 0.0
    batch_sizes: tuple[int, ...] = ()
    reason: str = ""
    remark: str = ""


def outcome(case: Case) -> Outcome:
    """Split as for training; where that cannot be exported, as for inference, and both are told."""
    found = _tried(case, training=True)
    if not found.reason:
        return found
    again = _tried(case, training=False)
    if again.reason:
        return found
    return replace(again, remark=f"split in evaluation mode; split in training mode: {found.reason}")


def _tried(case: Case, *, training: bool) -> Outcome:
    began = time.perf_counter()
    torch.manual_seed(0)
    model, inputs = case.build()
    model.train(training)  # the files have what it computes in evaluation
    try:
        pipe = pd2bw_fx.split(
            model,
            example_kwargs=inputs,
            cluster=STAGES,
            costs="analytic",
            check=False,
            tracer=case.tracer if training else "auto",
        )
        with tempfile.TemporaryDirectory() as folder:
            manifest = pipe.export_onnx(Path(folder) / "onnx", form="both")
            assert check_annotation(Path(folder) / "onnx" / "model.onnx") == STAGES
            merged = pd2bw_fx.merge_onnx(Path(folder) / "onnx")
    except Exception as error:
        reason = str(error) if isinstance(error, Pd2bwError) else f"{type(error).__name__}: {error}"
        return Outcome(seconds=time.perf_counter() - began, reason=" ".join(reason.split()))
    return Outcome(
        nodes=len(merged.graph.node),
        seconds=time.perf_counter() - began,
        difference=max(manifest["largest_differences_from_model"].values()),
        batch_sizes=tuple(manifest["batch_sizes_checked"]),
    )


def table(results: Sequence[tuple[Case, Outcome]]) -> str:
    rows = [
        "| model | nodes | seconds | largest difference | batch sizes | remarks |",
        "|---|---|---|---|---|---|",
    ]
    for case, found in results:
        remarks = "; ".join(
            text for text in (case.note, found.remark, found.reason.replace("|", "/")) if text
        )
        sizes = ", ".join(map(str, found.batch_sizes))
        cells = (
            (case.name, found.nodes, f"{found.seconds:.1f}", f"{found.difference:.0e}", sizes, remarks)
            if not found.reason
            else (case.name, "-", f"{found.seconds:.1f}", "does not export", "-", remarks)
        )
        rows.append(f"| {' | '.join(str(cell) for cell in cells)} |")
    return "\n".join(rows) + "\n"


def written(results: Sequence[tuple[Case, Outcome]]) -> str:
    versions = (
        f"torch {torch.__version__.partition('+')[0]}, transformers {hf.__version__}, "
        f"onnx {onnx.__version__} and onnxruntime {onnxruntime.__version__}"
    )
    return f"""{HEAD}
Made by `python benchmarks/onnx_coverage.py` with {versions}.

Each model, small and with random weights, is cut in two, exported in both forms, and put together again. The
difference is the largest of any output of the chained stages from the live model, relative to the output's
largest entry, over the batch sizes named. Seconds are for all of it.

{table(results)}"""


def main() -> int:
    parser = argparse.ArgumentParser(description="Which models export as ONNX stages.")
    parser.add_argument("names", nargs="*", help="some models; all of them if none is named")
    names = parser.parse_args().names
    unknown = sorted(set(names) - {case.name for case in CASES})
    if unknown:
        parser.error(f"no model is called {unknown[0]!r}; coverage.py --list prints the names")
    results = []
    for case in CASES:
        if names and case.name not in names:
            continue
        found = outcome(case)
        results.append((case, found))
        said = found.reason or f"{found.nodes} nodes, {found.difference:.0e} at {found.batch_sizes}"
        print(f"{case.name:18} {found.seconds:6.1f} s  {said}", flush=True)
    if not names:
        before = DOCUMENT.read_text().partition(HEAD)[0].rstrip()
        DOCUMENT.write_text(f"{before}\n\n{written(results)}")
    return 1 if any(found.reason for _, found in results) else 0


if __name__ == "__main__":
    hf.logging.set_verbosity_error()
    for name in ("torch.onnx", "onnxscript", "onnx_ir"):
        logging.getLogger(name).setLevel(logging.ERROR)
    sys.exit(main())
