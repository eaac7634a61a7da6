"""Run by torchrun: an engine through steps, evaluations and flushes, and engines that are nested, closed and
without their process group; results as JSON from rank 0."""

import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import pd2bw_fx
from pd2bw_fx.models import build
from pd2bw_fx.runtime.reference import train_reference

Batch = Sequence[Tensor]


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.5)


def train_and_evaluate(
    engine: pd2bw_fx.Engine, batches: Sequence[Batch], evaluated: Sequence[Batch]
) -> dict[str, Any]:
    """Evaluates after the first update and after the third, where it also gives a batch that is refused."""
    losses = [engine.step(batches[0])]
    with torch.inference_mode():  # as an evaluation may be; the first update is made in it
        engine.eval(tuple(tensor.clone() for tensor in evaluated[0]))
    losses += [engine.step(batch) for batch in batches[1:3]]
    evaluations = [float(engine.eval(batch)) for batch in evaluated]
    refusal = refusal_of_unequal_tensors(engine, *evaluated)
    early = engine.state_dict()
    losses += [engine.step(batch) for batch in batches[3:]]
    return {
        "losses": [float(loss) for loss in losses],
        "evaluations": evaluations,
        "refusal of unequal tensors": refusal,
        "weights": [early, engine.state_dict()],
    }


def by_the_update_rule(
    model: nn.Module, batches: Sequence[Batch], evaluated: Sequence[Batch], microbatches_per_update: int
) -> dict[str, Any]:
    """Returns what `train_and_evaluate` should, computed on the whole model in this process."""
    options: dict[str, Any] = {"optimizer": sgd, "microbatches_per_update": microbatches_per_update}
    final = train_reference(model, batches, **options)
    early = train_reference(model, batches[:3], **options)
    model.load_state_dict(early.state_dict)
    model.eval()
    with torch.no_grad():
        evaluations = [float(model(*batch)) for batch in evaluated]
    weights = [early.state_dict, final.state_dict]
    return {"losses": final.losses, "evaluations": evaluations, "weights": weights}


def refusal_of_unequal_tensors(engine: pd2bw_fx.Engine, batch: Batch, other: Batch) -> str:
    """The first tensor of the batch has more samples than the others."""
    return refusal(lambda: engine.step((torch.cat([batch[0], other[0]]), *batch[1:])))


def loss_around_another_engine(pipe: pd2bw_fx.Pipeline, batch: Batch) -> float:
    """Opens an engine, opens, steps and closes another one inside it, and steps the outer one."""
    with pipe.engine(optimizer=sgd) as outer:
        with pipe.engine(optimizer=sgd) as inner:
            inner.step(batch)
        return float(outer.step(batch))


def refusals_in_own_group(pipe: pd2bw_fx.Pipeline, batch: Batch) -> dict[str, str]:
    """Makes an engine in a process group of this program, which destroys it while the engine is open."""
    dist.init_process_group("gloo")
    engine = pipe.engine(optimizer=sgd, microbatches_per_update=dist.get_world_size())
    of_no_microbatches = refusal(lambda: engine.step_microbatches([]))
    dist.destroy_process_group()
    return {
        "refusal of no microbatches": of_no_microbatches,
        "refusal without process group": refusal(lambda: engine.step(batch)),
    }


def refusal(call: Callable[[], object]) -> str:
    """Returns the message of the InputError that the call raises; nothing if it raises none."""
    try:
        call()
    except pd2bw_fx.InputError as error:
        return str(error)
    return ""


def main() -> None:
    num_stages = int(os.environ["WORLD_SIZE"])
    torch.manual_seed(0)
    model = build("mlp").double()
    pipe = pd2bw_fx.split(model, cluster=num_stages, costs="analytic")
    training = [2 * num_stages] * 6 + [6 * num_stages]  # the last one has larger microbatches
    sizes = [*training, 4 * num_stages, 5]
    drawn = model.example_inputs(batch_size=sum(sizes))  # type: ignore[operator]
    *batches, held_out, odd = zip(*(tensor.split(sizes) for tensor in drawn), strict=True)

    with pipe.engine(optimizer=sgd) as engine:
        results = train_and_evaluate(engine, batches, [held_out, odd])
    assert not dist.is_initialized()
    results["refusal after close"] = refusal(lambda: engine.step(batches[0]))
    results["loss around another engine"] = loss_around_another_engine(pipe, batches[0])
    assert not dist.is_initialized()
    results |= refusals_in_own_group(pipe, batches[0])

    if os.environ["RANK"] == "0":
        expected = by_the_update_rule(model, batches, [held_out, odd], num_stages)
        pairs = zip(results.pop("weights"), expected.pop("weights"), strict=True)
        results["weight differences"] = [
            max(float((found[name] - wanted[name]).abs().max()) for name in wanted) for found, wanted in pairs
        ]
        Path(sys.argv[1]).write_text(json.dumps(results | {"expected": expected}))


if __name__ == "__main__":
    main()
