"""Which of torch's operators are printed rightly: each with the samples that torch tests it with.

    pip install expecttest                       # torch's own tests import it
    python benchmarks/operators.py               # all, about 20 minutes on a core; writes docs/OPERATORS.md
    python benchmarks/operators.py cdist stft    # some, printed with their code

An operator is called with a parameter's multiple of its first operand, traced, planned, printed and compared
with the call itself in float64: results and gradients. Exits with 1 where what was printed computes something
else, or does not run.
"""

from __future__ import annotations

import argparse
import re
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from put_through import put_through
from rich.console import Console
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from pd2bw_fx.errors import Pd2bwError, VerificationError

DOCUMENT = Path(__file__).parent.parent / "docs" / "OPERATORS.md"
SAMPLES = 5  # of each operator, spread over those there are
# Their results are memory that nobody has written: there is nothing to compare.
UNWRITTEN = {"empty", "empty_like", "empty_permuted", "empty_strided", "new_empty", "new_empty_strided"}


class Calling(nn.Module):
    """operator(*args, **kwargs), its tensors the inputs of the model."""

    def __init__(self, operator: Callable[..., Any], args: Any, kwargs: Any) -> None:
        super().__init__()
        self.operator = operator
        leaves, self.spec = pytree.tree_flatten((args, kwargs))
        self.places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
        self.leaves = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        leaves = list(self.leaves)
        scaled = False
        for place, tensor in zip(self.places, tensors, strict=True):
            leaves[place] = tensor
            if not scaled and tensor.is_floating_point():
                leaves[place], scaled = tensor * self.scale, True
        args, kwargs = pytree.tree_unflatten(leaves, self.spec)
        found = pytree.tree_leaves(self.operator(*args, **kwargs))
        results = [leaf for leaf in found if isinstance(leaf, Tensor)]
        return tuple(r * self.scale if r.is_floating_point() else r.clone() for r in results)


@dataclass(slots=True)
class Outcome:
    """Of an operator's samples: how many there are in that the model itself runs, and what became of them."""

    name: str
    samples: int = 0
    right: int = 0
    differing: list[str] = field(default_factory=list)
    stopped: list[str] = field(default_factory=list)

    @property
    def reason(self) -> str:
        """Of the first sample that is not right."""
        text = (self.differing or self.stopped)[0].replace("|", "/")
        text = re.sub(r" in \d+\.\d s\b", "", text)  # another in every run
        text = text if len(text) < 200 else text[:200] + " ..."
        return f"WRONG: {text}" if self.differing else text


def samples_of(info: Any) -> Iterator[tuple[Calling, tuple[Tensor, ...]]]:
    """What a model could call: some tensor with several samples, none without any, and a result."""
    supported = info.supported_dtypes("cpu")
    dtype = next((t for t in (torch.float64, torch.complex128, torch.int64) if t in supported), None)
    samples = [] if dtype is None else list(info.sample_inputs("cpu", dtype, requires_grad=False))
    for sample in samples[:: max(1, len(samples) // SAMPLES)][:SAMPLES]:
        model = Calling(info.op, (sample.input, *sample.args), sample.kwargs)
        leaves = pytree.tree_leaves(((sample.input, *sample.args), sample.kwargs))
        tensors = tuple(leaf.detach().clone() for leaf in leaves if isinstance(leaf, Tensor))
        if _could_be_inputs(tensors) and _runs(model, tensors):
            yield model, tensors


def _could_be_inputs(tensors: Sequence[Tensor]) -> bool:
    sizes = [t.shape[0] for t in tensors if t.dim()]
    dense = all(t.layout == torch.strided for t in tensors)
    return (
        dense and max(sizes, default=0) > 1 and 0 not in sizes and any(t.is_floating_point() for t in tensors)
    )


def _runs(model: Calling, tensors: Sequence[Tensor]) -> bool:
    """Forward and backward of the call itself."""
    try:
        results = model(*(t.clone() for t in tensors))
        wanted = [r.sum() for r in results if r.requires_grad and not r.is_complex()]
        if wanted:
            torch.stack(wanted).sum().backward()
    except Exception:  # whatever torch says: there is nothing to compare with
        return False
    return bool(results)


def outcome(info: Any, *, shown: bool) -> Outcome:
    found = Outcome(f"{info.name}.{info.variant_test_name}" if info.variant_test_name else info.name)
    for model, tensors in samples_of(info):
        found.samples += 1
        try:
            through = put_through(model, tensors, num_stages=1)
        except VerificationError as error:
            found.differing.append(str(error))
        except Exception as error:
            kind = "" if isinstance(error, Pd2bwError) else f"{type(error).__name__}: "
            found.stopped.append(" ".join(f"{kind}{error}".split()))
        else:
            found.right += 1
            if shown:
                print(through.programs[0].source)
    return found


def database() -> list[Any]:
    """torch's own, without the random seed that some of its calls set, which no trace keeps."""
    try:
        from torch.testing._internal import common_methods_invocations as invocations
    except ImportError as error:
        sys.exit(f"torch's samples cannot be read: {error}; pip install expecttest")
    invocations.wrapper_set_seed = lambda operator, *args, **kwargs: operator(*args, **kwargs)  # type: ignore[attr-defined]
    return [info for info in invocations.op_db if info.name not in UNWRITTEN]


def written(outcomes: Sequence[Outcome]) -> str:
    tried = [o for o in outcomes if o.samples]
    right = [o for o in tried if o.right == o.samples]
    rows = [f"| {o.name} | {o.right} of {o.samples} | {o.reason} |" for o in tried if o not in right]
    version = torch.__version__.partition("+")[0]
    return (
        f"""# Operators that go through

Made by `python benchmarks/operators.py` with torch {version}, on a CPU.

torch's tests have samples for every operator. Up to {SAMPLES} of each that a model could train with (a tensor
of floating point numbers, several samples in its first dimension, and a gradient that torch has) were traced,
printed as a stage, and compared with the call itself in float64, results and gradients.

Of {len(tried)} operators {len(right)} compute the same with every sample, {sum(o.samples for o in tried)}
samples in all. The others:

| operator | samples that go through | what became of the first other one |
|---|---|---|
"""
        + "\n".join(rows)
        + "\n"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description="Which of torch's operators are printed rightly.")
    parser.add_argument("names", nargs="*", help="some operators, as torch's tests call them; all if none")
    names = parser.parse_args().names
    warnings.filterwarnings("ignore")
    console = Console()
    outcomes = []
    for info in database():
        if names and info.name not in names:
            continue
        began = time.perf_counter()
        found = outcome(info, shown=bool(names))
        outcomes.append(found)
        took_s = time.perf_counter() - began
        console.print(f"{found.name}: {found.right} of {found.samples} in {took_s:.1f} s")
        if found.right < found.samples:
            console.print(f"    {found.reason}", markup=False)
    if not names:
        DOCUMENT.write_text(written(outcomes))
    return int(any(found.differing for found in outcomes))


if __name__ == "__main__":
    sys.exit(main())
