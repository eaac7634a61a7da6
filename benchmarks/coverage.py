"""Which models go through: traced, planned, printed as stages and compared with the model itself, bit by bit.

    python benchmarks/coverage.py                   # everything, printed and written to docs/COVERAGE.md
    python benchmarks/coverage.py gpt2 t5           # some, printed only
    python benchmarks/coverage.py --list
    python benchmarks/coverage.py --keep OUT gpt2   # some; the table once all of them are in OUT

Each model is built from a small configuration with weights drawn at random, in training mode, with dropout as
its configuration has it, in float64, and returns its loss. Exits with 1 where one does not go through.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from coverage_models import CASES, Case, built
from coverage_more import MORE
from put_through import put_through

from pd2bw_fx.errors import Pd2bwError

ALL = (*CASES, *MORE)
TABLE = Path(__file__).parent.parent / "docs" / "COVERAGE.md"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a model; `reason` says why it did not go through."""

    tracer: str = ""
    operators: int = 0
    lines: int = 0
    seconds: float = 0.0
    verified: str = ""
    reason: str = ""


def outcome(case: Case) -> Outcome:
    """What becomes of one model, its error with it if there is one."""
    started = time.perf_counter()
    model, inputs = built(case)
    try:
        through = put_through(model, inputs, tracer=case.tracer)
    except Pd2bwError as error:
        return Outcome(seconds=time.perf_counter() - started, reason=" ".join(str(error).split()))
    found = through.verification
    return Outcome(
        tracer=through.traced.report.tracer,
        operators=len(through.graph.operators),
        lines=sum(program.source.count("\n") for program in through.programs),
        seconds=time.perf_counter() - started,
        verified="bit for bit" if found.exact else f"{found.worst.relative:.0e}",
    )


def _table(results: Sequence[tuple[Case, Outcome]]) -> list[str]:
    rows = [
        "| model | traced by | operators | lines of 2 stages | seconds | compared with the model | remarks |",
        "|---|---|---|---|---|---|---|",
    ]
    for case, found in results:
        remarks = "; ".join(text for text in (case.note, found.reason.replace("|", "/")) if text)
        cells = (
            case.name, found.tracer or "-", found.operators or "-", found.lines or "-",
            f"{found.seconds:.1f}", found.verified or "no", remarks,
        )  # fmt: skip
        rows.append(f"| {' | '.join(str(cell) for cell in cells)} |")
    return rows


_PREFACE = """# Models that go through

Made by `python benchmarks/coverage.py` with torch {torch} and transformers {transformers}, on a CPU.

Every model is built from a small configuration, is in training mode with its labels and its own dropout, and
is traced with the batch size left open, planned for two devices, printed as two stages, and compared with the
live model in float64: the outputs, every gradient and every buffer. "Bit for bit" means no difference at all;
a number is the largest difference relative to the tensor's largest entry. Seconds are by the clock, for
all of it together, on two cores that had other work.

Models of the Llama family without an attention mask differ in the last bit: while they are traced they give
their attention a causal mask, and otherwise take the kernel that needs none.

BLOOM's activation is an autograd function of its own, which its stages have as a class. DETR's encoder asks
in Python whether a tensor is finite: `tracer="export-as-example"` takes the way of the example, and the
stages assert that it is theirs.

"""


def main() -> int:
    parser = argparse.ArgumentParser(description="Which models go through, and how.")
    parser.add_argument("names", nargs="*", help="some models; all of them if none is named")
    parser.add_argument("--list", action="store_true", help="print the names of the models")
    parser.add_argument("--keep", type=Path, help="a JSON file that outcomes are added to, part by part")
    arguments = parser.parse_args()
    unknown = sorted(set(arguments.names) - {case.name for case in ALL})
    if unknown:
        parser.error(f"no model is called {unknown[0]!r}; --list prints the names")
    if arguments.list:
        print("\n".join(case.name for case in ALL))
        return 0
    kept = _kept(arguments.keep)
    for case in ALL:
        if arguments.names and case.name not in arguments.names:
            continue
        found = kept[case.name] = outcome(case)
        said = f"verified {found.verified}" if found.verified else found.reason
        print(
            f"{case.name:18} {found.tracer:8} {found.operators:4} operators {found.seconds:6.1f} s  {said}",
            flush=True,
        )
        if arguments.keep is not None:
            arguments.keep.write_text(
                json.dumps({name: asdict(other) for name, other in kept.items()}, indent=1)
            )
    results = [(case, kept[case.name]) for case in ALL if case.name in kept]
    if len(results) == len(ALL):
        versions = _PREFACE.format(torch=torch.__version__.partition("+")[0], transformers=hf.__version__)
        TABLE.write_text(versions + "\n".join(_table(results)) + "\n")
    failed = [case.name for case, found in results if not found.verified]
    if failed:
        print(f"do not go through: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def _kept(file: Path | None) -> dict[str, Outcome]:
    """By model, what earlier parts of this run came to."""
    if file is None or not file.exists():
        return {}
    outcomes: Mapping[str, dict[str, Any]] = json.loads(file.read_text())
    return {name: Outcome(**fields) for name, fields in outcomes.items()}


if __name__ == "__main__":
    hf.logging.set_verbosity_error()
    sys.exit(main())
