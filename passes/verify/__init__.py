"""Compares stages with the original model: outputs, gradients, buffers, written parameters.

The stages run in one process, one after another, forward and then backward, exactly as the runtime chains
them; the model runs as it is. Both draw the same random numbers. The same operations in the same order give
the same bits, so the expected difference is zero; only a gradient that is the sum of three or more parts may
be added up in another order. The network itself tells how much it amplifies such a rounding: where a
difference is larger than its type explains, the model is run again with its weights rounded up or down.

    module       what is in it
    sides        the two sides: the model as it is, and its stages one after another
    compare      how far two tensors are apart, and how far they may be
    evaluation   what the stages compute differently from the model in evaluation mode
    fast_path    torch's fast path for encoder layers, which stages do not take
    summed       losses that are sums over the samples of a batch
    reseeding    models that set torch's random generator in their forward
"""

from __future__ import annotations

import functools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from pd2bw_fx.errors import VerificationError
from pd2bw_fx.graph import OperatorGraph
from pd2bw_fx.program import set_fast_path
from pd2bw_fx.roundings import NUM_ROUNDINGS, TIMES_SENSITIVITY, rounded

from .compare import Difference, coarsest_tolerance, difference, largest_of, tolerance_of
from .evaluation import Evaluation, draws_in_evaluation, evaluation_of
from .fast_path import may_give_zeros, may_take_fast_path, note_on_fast_path
from .reseeding import record_reseeding
from .sides import (
    Forward,
    Run,
    Sides,
    run_model,
    run_stages,
)
from .summed import note_on_sums

__all__ = [
    "Difference",
    "Evaluation",
    "Forward",
    "Sides",
    "Verification",
    "another_example",
    "draws_in_evaluation",
    "evaluation_of",
    "note_on_fast_path",
    "note_on_sums",
    "verify",
]

# A gradient may be nothing but rounding (softmax ignores the bias of a key): its scale is at least this share
# of the largest gradient.
_FAINTEST = 1e-3

# A difference beyond its tolerance may still be rounding: it is compared with what rounding the weights does.


_UNLIKE_DRAWS = (
    ". The model draws other random numbers than its stages. If its first call makes layers, which draw "
    "their weights, call it once before it is split"
)


@dataclass(frozen=True, slots=True)
class Verification:
    """The tensors that were compared, and their differences. `exact`: every tensor is equal bit for bit."""

    differences: tuple[Difference, ...]
    with_random_numbers: bool  # whether dropout was active on both sides, or switched off on both

    @property
    def worst(self) -> Difference:
        """The largest difference, relative to its tensor."""
        return max(self.differences, key=lambda difference: difference.relative)

    @property
    def exact(self) -> bool:
        """Whether all tensors are equal bit for bit."""
        return self.worst.largest == 0

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        compared = f"{len(self.differences)} outputs, gradients and buffers compared with the model's"
        if self.exact:
            return f"{compared}: all equal bit for bit"
        return f"{compared}: largest difference {self.worst.relative:.2e} of {self.worst.name}"


def verify(sides: Sides, tensors: Mapping[str, Tensor], *, tolerance: float | None = None) -> Verification:
    """Compares stages and model on the example inputs, with `tensors` as the weights of both.

    Without a `tolerance`, a tensor may differ by roundings
    of its type, and by four times what a rounding of all weights does to it. Where torch's fast path for
    encoders makes the difference, and does so by rounding, the model is run without it. Raises
    VerificationError with the first tensor that differs by more.
    """
    # How products round depends on how operands lie in memory. Tensors from a file may lie differently;
    # copies lie alike.
    sides = replace(sides, example={name: tensor.clone() for name, tensor in sides.example.items()})
    run = functools.partial(run_model, sides)
    eager = run(tensors)
    staged = run_stages(sides, tensors)
    found = _compared(eager, staged)
    coarsest = coarsest_tolerance(sides.graph, sides.programs)
    allowed = {
        apart.name: tolerance_of(like, coarsest) if tolerance is None else tolerance for apart, like in found
    }
    differences = [apart for apart, _ in found]
    if tolerance is None and _first_beyond(differences, allowed) is not None:
        _require_the_same_again(eager, run(tensors), allowed)
        for name, moved in _sensitivity(eager, run, tensors).items():
            allowed[name] = max(allowed[name], TIMES_SENSITIVITY * moved)
    wrong = _first_beyond(differences, allowed)
    if wrong is not None and may_take_fast_path(sides.model):
        again = functools.partial(verify, sides, tensors, tolerance=tolerance)
        return _without_fast_path(wrong, sides.model, again)
    if wrong is not None:
        _require_no_seed_of_its_own(run, tensors)
        raise VerificationError(
            f"{wrong.name} differs from the model's by {wrong.relative:.3e} of its largest entry "
            f"({wrong.largest:.3e} of {wrong.scale:.3e}); {allowed[wrong.name]:.0e} is allowed"
            + ("" if eager.drawn == staged.drawn else _UNLIKE_DRAWS)
        )
    return Verification(tuple(differences), with_random_numbers=sides.draw_in_order)


def _without_fast_path(
    wrong: Difference, model: nn.Module, compared: Callable[[], Verification]
) -> Verification:
    """Compares again with the model's encoders computed layer by layer, as in the stages."""
    with set_fast_path(on=False):
        found = compared()
    if may_give_zeros(model):
        raise VerificationError(
            f"{wrong.name} differs from the model's by {wrong.relative:.3e} of its largest entry, and does "
            "not without torch's fast path, by which an encoder in evaluation mode gives padded positions "
            "zeros; stages compute them as all others. Build it with enable_nested_tensor=False, or call "
            "torch.backends.mha.set_fastpath_enabled(False) before"
        )
    return found


def _require_the_same_again(eager: Run, again: Run, allowed: Mapping[str, float]) -> None:
    apart = _first_beyond([found for found, _ in _compared(eager, again)], allowed)
    if apart is not None:
        raise VerificationError(
            f"the model computes something else from call to call: {apart.name} of two calls with the same "
            f"inputs, weights and seed of torch differs by {apart.relative:.3e} of its largest entry. Stages "
            "would keep what one call had; draw with torch.rand, and keep what changes in a buffer"
        )


def _require_no_seed_of_its_own(
    run: Callable[[Mapping[str, Tensor]], Run], tensors: Mapping[str, Tensor]
) -> None:
    with record_reseeding() as lines:
        run(tensors)
    if lines:
        raise VerificationError(
            f"the model sets torch's random generator in its forward ({lines[0]}), and its stages do not: in "
            "them the seed, the microbatch and the place of an operator decide what it draws, and results "
            "differ. Draw without setting it; what is to be the same in every call is a buffer"
        )


def another_example(
    graph: OperatorGraph, example: Mapping[str, Tensor], *, by_column: bool = False
) -> dict[str, Tensor]:
    """Returns inputs of other values and, in every open dimension, of another size; the same every time.

    Values are drawn from each input's own, so that tokens stay tokens. An input of 0 and 1 alone is a mask
    and keeps its values. An open batch is one step larger, or smaller if the program allows no more; an open
    length is one shorter, since a model may bound it. With `by_column` values stay in their place within a
    sample, since columns of a table have ranges of their own. On a GPU they always do: an index out of range
    ends all that the process does there.
    """
    generator = torch.Generator().manual_seed(0)
    firsts = Counter(tensor.shape[:1] for tensor in example.values() if tensor.dim())
    batch = max(firsts, key=lambda size: firsts[size], default=None)
    found: dict[str, Tensor] = {}
    for name, tensor in example.items():
        other = _of_another_size(graph, graph.inputs[name].shape, tensor)
        if tensor.device.type == "cpu" and not by_column:
            found[name] = _drawn(other, generator)
        else:
            found[name] = _drawn_by_column(other, generator) if tensor.shape[:1] == batch else other.clone()
    return found


def _of_another_size(graph: OperatorGraph, shape: Sequence[int | str] | None, tensor: Tensor) -> Tensor:
    for dimension, size in enumerate(shape or ()):
        if not isinstance(size, str) or not size.isidentifier():
            continue
        if dimension == 0:
            before, flipped, step = tensor.shape[0], tensor.flip(0), graph.batch_sizes.multiple_of
            sizes = [size for size in (before + step, before - step) if size in graph.batch_sizes and size]
            tensor = torch.cat([flipped, flipped[-step:]])[: sizes[0] if sizes else before]
        elif tensor.shape[dimension] > 2:
            tensor = tensor.narrow(dimension, 0, tensor.shape[dimension] - 1)
    return tensor


def _drawn(tensor: Tensor, generator: torch.Generator) -> Tensor:
    if _is_mask(tensor):
        return tensor.clone()
    return tensor.flatten()[_places(tensor, tensor.numel(), generator)]


def _drawn_by_column(tensor: Tensor, generator: torch.Generator) -> Tensor:
    if _is_mask(tensor):
        return tensor.clone()
    return tensor.gather(0, _places(tensor, tensor.shape[0], generator))


def _is_mask(tensor: Tensor) -> bool:
    return tensor.numel() == 0 or bool(((tensor == 0) | (tensor == 1)).all())


def _places(like: Tensor, count: int, generator: torch.Generator) -> Tensor:
    return torch.randint(count, like.shape, generator=generator, device="cpu").to(like.device)


def _compared(expected: Run, found: Run) -> list[tuple[Difference, Tensor | None]]:
    """Returns the difference of each pair of tensors, with one of the two."""
    largest = max((largest_of(g) for g in expected.gradients.values() if g is not None), default=0.0)
    faintest = {"output": 0.0, "gradient of": _FAINTEST * largest, "buffer": 0.0, "parameter": 0.0}
    differences: list[tuple[Difference, Tensor | None]] = []
    for kind, wanted, given in (
        ("output", expected.outputs, found.outputs),
        ("gradient of", expected.gradients, found.gradients),
        ("buffer", expected.buffers, found.buffers),
        ("parameter", expected.written, found.written),
    ):
        for name, tensor in wanted.items():
            if name not in given:
                raise VerificationError(
                    f"{kind} {name!r} is the model's, but no stage gives it; if what the model returns "
                    "is other for one sample alone (a squeeze() of all dimensions), trace it with several"
                )
            apart = difference(f"{kind} {name}", tensor, given[name], faintest[kind])
            differences.append((apart, given[name] if tensor is None else tensor))
    return differences


def _first_beyond(differences: Sequence[Difference], allowed: Mapping[str, float]) -> Difference | None:
    return next((apart for apart in differences if not apart.relative <= allowed[apart.name]), None)


def _sensitivity(
    eager: Run, run: Callable[[Mapping[str, Tensor]], Run], tensors: Mapping[str, Tensor]
) -> dict[str, float]:
    """Returns how far, at least, each tensor of the model moves when its weights are rounded once more.

    A deep network on a small batch may amplify a rounding a hundred times. The effect of a rounding that
    flips a sign somewhere differs from draw to draw: the minimum of several draws leaves it out.
    """
    moved: dict[str, float] = {}
    for seed in range(NUM_ROUNDINGS):
        for apart, _ in _compared(eager, run(rounded(tensors, seed))):
            moved[apart.name] = min(moved.get(apart.name, math.inf), apart.relative)
    return moved
