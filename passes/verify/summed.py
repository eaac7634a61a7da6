"""Losses that are sums over the samples of a batch, by what they are of a batch twice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from .evaluation import draws_in_evaluation
from .sides import Sides, model_outputs, randomness, run_forwards, stage_modules

# How far the double may be from twice the loss, as a share of it. A loss of random numbers (an autoencoder's
# drawn code) has others for each batch; a mean over samples is a whole loss away.
_APART, _APART_OF_DRAWS = 1e-3, 0.3


def note_on_sums(sides: Sides, tensors: Mapping[str, Tensor], microbatches_per_update: int) -> str:
    """Returns a note for users where the loss doubles with the batch, or "".

    There is none where the loss may be divided by a number that the batch has beside its samples, such as
    Hugging Face's num_items_in_batch, or where the stages cannot be run on the example twice.
    """
    graph, example = sides.graph, sides.example
    if graph.loss is None or graph.batch_symbol is None or any(not t.dim() for t in example.values()):
        return ""
    batched = [name for name in example if (graph.inputs[name].shape or (0,))[0] == graph.batch_symbol]
    if not batched or 2 * example[batched[0]].shape[0] not in graph.batch_sizes:
        return ""
    twice = {name: torch.cat([t, t]) if name in batched else t for name, t in example.items()}
    modules = [module.eval() for module in stage_modules(sides, tensors)]  # no dropout is in the way
    try:
        once, double = (_loss(sides, modules, given) for given in (example, twice))
    except Exception:  # an assertion of the model's on its batch, say
        return ""
    apart = abs(double - 2 * once)
    if not once or not apart <= (_APART_OF_DRAWS if draws_in_evaluation(graph) else _APART) * abs(once):
        return ""
    m = microbatches_per_update
    return (
        "the loss doubles with the batch, as a sum over its samples does (reduction='sum'), and an update "
        f"takes the mean of its microbatches' losses: of {m} of them, a loss and gradients {m} times smaller "
        "than of the whole batch's sum; take a mean over samples, or choose the learning rate for it"
    )


def _loss(sides: Sides, modules: Sequence[nn.Module], example: Mapping[str, Tensor]) -> float:
    with randomness(on=True), torch.no_grad():
        _, produced = run_forwards(sides.programs, modules, example)
    assert sides.graph.loss is not None
    return model_outputs(sides.programs, produced)[sides.graph.loss].item()
