"""Run by torchrun: an engine through steps, evaluations and flushes, and two after it, one inside the other;
results as JSON from rank 0."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch

import pd2bw_fx
from pd2bw_fx.models import build
from pd2bw_fx.runtime.reference import train_reference


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.5)


def refused(engine: pd2bw_fx.Engine, batch: Any) -> str:
    """What it says to a batch that it cannot take, after which it is as before."""
    try:
        engine.step(batch)
    except pd2bw_fx.InputError as error:
        return str(error)
    return ""


def main() -> None:
    rank, num_stages = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(0)
    model = build("mlp").double()
    pipe = pd2bw_fx.split(model, cluster=num_stages, costs="analytic")
    sizes = [2 * num_stages] * 6 + [4 * num_stages, 5, 6 * num_stages]
    drawn = model.example_inputs(batch_size=sum(sizes))  # type: ignore[operator]
    *batches, held_out, odd, larger = zip(*(tensor.split(sizes) for tensor in drawn), strict=True)

    results: dict[str, Any] = {}
    with pipe.engine(optimizer=sgd) as engine:
        losses = [engine.step(batches[0])]
        with torch.inference_mode():  # as an evaluation may be; the first update is made in it
            engine.eval(tuple(tensor.clone() for tensor in held_out))
        losses += [engine.step(batch) for batch in batches[1:3]]
        results["evaluated"] = [float(engine.eval(held_out)), float(engine.eval(odd))]
        results["refused"] = refused(engine, (torch.cat([held_out[0], odd[0]]), *held_out[1:]))
        weights = engine.state_dict()
        losses += [engine.step(batch) for batch in batches[3:]]
        losses.append(engine.step(larger))
        results["losses"] = [float(loss) for loss in losses]
        final = engine.state_dict()
    assert not torch.distributed.is_initialized()
    with pipe.engine(optimizer=sgd) as outer:
        with pipe.engine(optimizer=sgd) as inner:
            inner.step(batches[0])
        results["again"] = float(outer.step(batches[0]))
    assert not torch.distributed.is_initialized()
    try:
        outer.step(batches[0])
    except pd2bw_fx.InputError as error:
        results["closed"] = str(error)

    torch.distributed.init_process_group("gloo")
    orphan = pipe.engine(optimizer=sgd, microbatches_per_update=num_stages)
    try:
        orphan.step_microbatches([])
    except pd2bw_fx.InputError as error:
        results["too few"] = str(error)
    torch.distributed.destroy_process_group()
    try:
        orphan.step(batches[0])
    except pd2bw_fx.InputError as error:
        results["without group"] = str(error)

    if rank == 0:
        reference = train_reference(
            model, [*batches, larger], optimizer=sgd, microbatches_per_update=num_stages
        )
        early = train_reference(model, batches[:3], optimizer=sgd, microbatches_per_update=num_stages)
        results["expected_losses"] = reference.losses
        model.load_state_dict(weights)
        model.eval()
        with torch.no_grad():
            results["expected_evaluated"] = [float(model(*held_out)), float(model(*odd))]
        pairs = [(weights, early.state_dict), (final, reference.state_dict)]
        results["weights"] = [max(float((a[name] - b[name]).abs().max()) for name in b) for a, b in pairs]
        Path(sys.argv[1]).write_text(json.dumps(results))


if __name__ == "__main__":
    main()
