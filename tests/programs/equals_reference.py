"""Run by torchrun: trains models through engines and compares with the single-process reference of the rule.

    torchrun --nproc-per-node N equals_reference.py RESULT.json [FOLDER]

Only rank 0 has the pipelines: the other ranks get their stages from it. It splits the models, or loads what
`save_pipelines` has left in the folder.
"""

import functools
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import pd2bw_fx
from pd2bw_fx.models.gpt import GPT, GPTConfig
from pd2bw_fx.models.mlp import MLP, MLPConfig
from pd2bw_fx.models.resnet import ResNet, ResNetConfig
from pd2bw_fx.optim import MuonWithAdamW, nadamw
from pd2bw_fx.runtime.reference import train_reference

# A key's bias has no gradient in theory; eps is well above the rounding that is left of it.
OPTIMIZERS = {
    "sgd": functools.partial(torch.optim.SGD, lr=0.05),
    "momentum": functools.partial(torch.optim.SGD, lr=0.02, momentum=0.9),
    "adam": functools.partial(torch.optim.Adam, lr=1e-3, eps=1e-6),
    "adamw": functools.partial(torch.optim.AdamW, lr=1e-3, eps=1e-6, weight_decay=0.1),
}
AGAINST_THE_DELAY = {
    "nadamw": functools.partial(nadamw, lr=1e-3, eps=1e-6),
    "muon": functools.partial(MuonWithAdamW, lr=1e-2, eps=1e-6),
}
UPDATES = 5

# As small as they may be where each of eight stages has weights.
MODELS = {
    "mlp": lambda: MLP.from_config(MLPConfig()),
    "gpt": lambda: GPT.from_config(GPTConfig(num_layers=3, width=32, num_heads=2, sequence_length=16)),
    "resnet": lambda: ResNet.from_config(ResNetConfig(blocks=(2, 1, 1))),
}


def model_of(name: str) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = MODELS[name]().double()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "dropout", None), float):
            module.dropout = 0.0
    return model


def batches_of(model: nn.Module, batch_size: int) -> list[Any]:
    drawn = model.example_inputs(batch_size=UPDATES * batch_size)  # type: ignore[operator]
    return list(zip(*(tensor.split(batch_size) for tensor in drawn), strict=True))


def difference(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """The largest relative difference of a tensor, in norm."""
    assert found.keys() == expected.keys()
    pairs = ((found[name].double(), tensor.double()) for name, tensor in expected.items())
    return max(float((a - b).norm() / b.norm().clamp_min(1e-30)) for a, b in pairs)


def no_decay_of_vectors(name: str, parameter: nn.Parameter) -> dict[str, float]:
    return {"weight_decay": 0.0} if parameter.ndim < 2 else {}


# What every run has, and what some have besides; an engine and the reference take both.
SCHEDULE = {"lr_scheduler": functools.partial(torch.optim.lr_scheduler.StepLR, step_size=2, gamma=0.5)}
CLIPPED = SCHEDULE | {"max_gradient_norm": 0.5, "parameter_options": no_decay_of_vectors}


def runs(num_stages: int) -> Iterator[tuple[str, str, str, int, dict[str, Any], Any]]:
    """Model, optimizer, method, microbatches an update, options, slack; every optimizer on two ranks."""
    for name, usual in (("mlp", "momentum"), ("gpt", "adamw"), ("resnet", "sgd")):
        for optimizer in OPTIMIZERS if num_stages == 2 else (usual,):
            yield name, optimizer, "2bw", num_stages, SCHEDULE, 0.0
    yield "mlp", "momentum", "2bw", num_stages + 3, SCHEDULE, 0.0
    yield "gpt", "adamw", "2bw", 2 * num_stages, SCHEDULE, 1.0
    yield "gpt", "adamw", "2bw", 2 * (num_stages - 1), CLIPPED, 1.0
    yield "gpt", "adam", "2bw", num_stages, CLIPPED, "auto"
    yield "gpt", "adamw", "1f1b", num_stages, SCHEDULE, 0.0
    yield "resnet", "momentum", "gpipe", 3, SCHEDULE, 0.0
    yield "gpt", "adamw", "2bw", num_stages, CLIPPED, 0.0
    yield "gpt", "sgd", "1f1b", num_stages, CLIPPED, 0.0
    yield "mlp", "adamw", "2bw", num_stages, CLIPPED, 0.0


@functools.cache
def traced(name: str) -> pd2bw_fx.Pipeline:
    return pd2bw_fx.split(model_of(name), cluster=1, costs="analytic", check=False)


def split_of(name: str, num_stages: int) -> pd2bw_fx.Pipeline:
    return pd2bw_fx.split(traced(name), cluster=num_stages, costs="analytic", check=False)


def save_pipelines(num_stages: int, folder: Path) -> None:
    """Traces each model once in this process, whatever the number of stages."""
    for name in MODELS:
        split_of(name, num_stages).save(folder / name)


def main() -> None:
    rank, num_stages = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    results = {}
    folder = Path(sys.argv[2]) if len(sys.argv) > 2 else None
    pipes: dict[str, Any] = {}
    for name, optimizer, method, m, options, slack in runs(num_stages):
        model = model_of(name)
        if name not in pipes:
            pipes[name] = None
            if rank == 0:
                pipes[name] = split_of(name, num_stages) if folder is None else pd2bw_fx.load(folder / name)
        batches = batches_of(model, 2 * m)
        engine = pd2bw_fx.Engine.from_pipeline(
            pipes[name],
            optimizer=OPTIMIZERS[optimizer],
            microbatches_per_update=m,
            method=method,
            slack=slack,
            **options,
        )
        losses = [float(engine.step(batch)) for batch in batches]
        weights = engine.state_dict()
        engine.close()  # its threads would wake beside the next one's
        if rank == 0:
            reference = train_reference(
                model,
                batches,
                optimizer=OPTIMIZERS[optimizer],
                microbatches_per_update=m,
                method="2bw" if method == "2bw" else "synchronous",
                **options,
            )
            loss = max(abs(float(a) - b) / abs(b) for a, b in zip(losses, reference.losses, strict=True))
            key = f"{name} {optimizer} {method} m={m} {' '.join(options)} slack={slack}"
            results[key] = {"loss": loss, "weights": difference(weights, reference.state_dict)}
    if rank == 0:
        Path(sys.argv[1]).write_text(json.dumps(results, indent=1))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
