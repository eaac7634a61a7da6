"""Run by torchrun on two ranks: the same training on the CPU and on a device that is not it; losses and
weights of both as JSON from rank 0.

other_device.py RESULT.json
"""

import functools
import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

import pd2bw_fx
from pd2bw_fx.models import build
from tests.accelerator import DEVICE, Accelerator

ADAM = functools.partial(torch.optim.AdamW, lr=1e-3)
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "2bw": ({}, {"max_gradient_norm": 1.0, "record": 1}),
    "gpipe, recomputed": ({"method": "gpipe", "recompute": True}, {}),
    "interleaved": ({"method": "interleaved"}, {}),
    "two copies of one stage": ({"num_stages": 1}, {"replicas": 2}),
}


def trained(pipe: pd2bw_fx.Pipeline, batch: tuple[torch.Tensor, ...], options: dict[str, Any]) -> Any:
    """The losses of updates, of a checkpoint's next ones and of an evaluation; and what the weights are."""
    make = functools.partial(pipe.engine, optimizer=ADAM, seed=3, **options)
    with tempfile.TemporaryDirectory() as own:
        folder = [own]
        torch.distributed.broadcast_object_list(folder)
        with make() as engine:
            losses = [float(engine.step(batch)) for _ in range(2)]
            engine.save_checkpoint(folder[0])
        with make() as engine:
            engine.load_checkpoint(folder[0])
            losses += [float(engine.step(batch)) for _ in range(2)]
            losses.append(float(engine.eval(batch)))
            weights = engine.state_dict()
            held = {str(tensor.device.type) for tensor in engine.tensors().values()}
    return losses, {name: tensor.double().sum().item() for name, tensor in weights.items()}, sorted(held)


@functools.cache
def on_one(name: str) -> tuple[pd2bw_fx.Pipeline, tuple[torch.Tensor, ...]]:
    torch.manual_seed(0)
    model = build(name)
    example = model.example_inputs()  # type: ignore[operator]
    return pd2bw_fx.split(model, example, cluster=1, costs="analytic", check=False), example


def main() -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    results = {}
    for name, (wishes, options) in CASES.items():
        traced, example = on_one("gpt" if name == "2bw" else "mlp")
        batch = tuple(torch.cat([tensor] * 4) for tensor in example)
        pipe = pd2bw_fx.split(traced, cluster=2, costs="analytic", check=False, **wishes)
        found = [trained(pipe, batch, {**options, "device": "cpu"})]
        with Accelerator(), torch.device(DEVICE):  # as scripts set a default device
            found.append(trained(pipe, batch, {**options, "device": DEVICE}))
        results[name] = found
    if torch.distributed.get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(results))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
