"""Run by torchrun on so many stages, each on as many ranks as there are: microbatches that the caller has
cut, beside batches that the engine cuts, against the update rule in one process."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import pd2bw_fx
from pd2bw_fx import Microbatches
from pd2bw_fx.runtime.reference import train_reference

SIZES = ((4, 1, 3, 2), (2, 2, 2, 2), (5, 4, 3, 7), (1, 1, 1, 1), (3, 3, 2, 1))


class Rows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = x
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden)) + x
        loss, spread = (hidden - x.flip(1)).square().mean(), hidden.var(0, correction=0)
        return {"loss": loss, "found": hidden, "spread": spread}


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def batches() -> list[Any]:
    """The third is one that the engine cuts."""
    generator = torch.Generator().manual_seed(0)

    def rows(size: int) -> Tensor:
        return torch.randn(size, 8, dtype=torch.float64, generator=generator)

    unequal: list[Any] = [Microbatches(rows(size) for size in sizes) for sizes in SIZES]
    return [*unequal[:2], rows(12), *unequal[2:]]


def made() -> Rows:
    torch.manual_seed(0)
    return Rows().double()


def split(num_stages: int) -> tuple[Rows, pd2bw_fx.Pipeline]:
    model = made()
    example = torch.randn(3, 8, dtype=torch.float64)
    return model, pd2bw_fx.split(model, example, cluster=num_stages, num_stages=num_stages, costs="analytic")


def main() -> None:
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    num_stages = int(sys.argv[2])
    model, pipe = split(num_stages) if rank == 0 else (made(), None)
    expected = train_reference(model, batches(), optimizer=sgd, microbatches_per_update=4)
    with pd2bw_fx.Engine.from_pipeline(
        pipe, optimizer=sgd, microbatches_per_update=4, replicas=num_ranks // num_stages
    ) as engine:
        losses = [engine.step(batch) for batch in batches()]
        engine.flush()
        weights = engine.state_dict()
        uneven = Microbatches(batches()[0][:3])
        model.load_state_dict(weights)
        joined = engine.outputs(uneven, "found")["found"]
        evaluated = float(engine.eval(uneven))
        refused = []
        for ask in (
            lambda: engine.step(uneven),
            lambda: engine.step(Microbatches([torch.zeros(0, 8, dtype=torch.float64)] * 4)),
            lambda: engine.outputs(uneven),
            lambda: engine.eval(Microbatches()),
        ):
            try:
                ask()
            except pd2bw_fx.InputError as error:
                refused.append(str(error))

    found = {
        "losses": [float(loss) for loss in losses],
        "expected": expected.losses,
        "apart": max(float((weights[n] - w).abs().max()) for n, w in expected.state_dict.items()),
        "same_outputs": torch.allclose(joined, torch.cat([model(one)["found"] for one in uneven])),
        "evaluated": evaluated,
        "mean": sum(float(model(one)["loss"]) for one in uneven) / 3,
        "refused": refused,
    }
    Path(f"{sys.argv[1]}.{rank}").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
