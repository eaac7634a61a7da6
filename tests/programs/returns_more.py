"""Run by torchrun on two stages, each on as many ranks as there are: what a model returns beside its loss, in
training and in evaluation, against the model itself; what was found as JSON from every rank."""

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import pd2bw_fx
from pd2bw_fx.runtime.reports import UpdateReport


class Autoencoder(nn.Module):
    """Its loss has two terms, one of them of the first layers."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 4))
        self.decoder = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 8))

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        code = self.encoder(x)
        found = self.decoder(code)
        size, error = code.square().mean(), (found - x).square().mean()
        return {
            "loss": error + 0.1 * size,
            "size": size,
            "error": error,
            "near": ((found - x).abs() < 0.5).sum(),
            "is_large": size > 0.1,
            "found": found,
            "code": code,
            "spread": code.std(0),
        }


def sgd(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.05)


def counts(model: nn.Module, batch: Tensor) -> list[float]:
    """The means over an update's microbatches of what is counted in whole numbers, or asked."""
    found = [model(part) for part in batch.chunk(8)]
    return [sum(float(each[name]) for each in found) / 8 for name in ("near", "is_large")]


def main() -> None:
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    torch.manual_seed(0)
    model = Autoencoder().double()
    batches = list(torch.randn(4, 16, 8, dtype=torch.float64))
    pipe = pd2bw_fx.split(model, (batches[0],), cluster=2, num_stages=2, costs="analytic")

    reports: list[UpdateReport] = []
    options: dict[str, Any] = {
        "replicas": num_ranks // 2,
        "microbatches_per_update": 8,
        "on_report": reports.append,
    }
    with pipe.engine(optimizer=sgd, **options) as engine:
        counted = counts(model, batches[0])
        losses = [engine.step(batch) for batch in batches]
        told = [dict(loss.numbers) for loss in losses]
        model.load_state_dict(engine.state_dict())
        evaluated, counted_then = engine.eval(batches[0]).numbers, counts(model, batches[0])
        some = engine.outputs(batches[0], "found", "error")
        everything = engine.outputs(batches[1][:7])
        spread = engine.outputs(batches[2])["spread"]
        try:
            engine.outputs(batches[0], "fuond")
        except pd2bw_fx.InputError as error:
            unknown = str(error)
        losses.append(engine.step(batches[0]))

    expected = [model(batch) for batch in batches]
    seven = model(batches[1][:7])
    found = {
        "losses": [float(loss) for loss in losses],
        "numbers": told,
        "counted": counted,
        "evaluated": [evaluated["near"], evaluated["is_large"]],
        "counted_then": counted_then,
        "reported": [dict(report.numbers) for report in reports],
        "some": sorted(some),
        "same": all(torch.allclose(some[name], expected[0][name]) for name in some),
        "everything": list(everything),
        "same_of_seven": all(torch.allclose(everything[name], seven[name]) for name in seven),
        "same_spread": torch.allclose(spread, expected[2]["spread"]),
        "unknown": unknown,
    }
    Path(f"{sys.argv[1]}.{rank}").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
