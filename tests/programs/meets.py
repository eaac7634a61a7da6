"""Run by torchrun: the user's program has all ranks meet after every step, as for a metric of its own.

With 2BW and much slack the last stage ends a step before the first has given its part to the update before.
Losses and what the reference has for them go to FOLDER/losses.json, and norms of gradients that are clipped.

meets.py FOLDER
"""

import functools
import json
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import pd2bw_fx
from pd2bw_fx.runtime.reference import train_reference
from pd2bw_fx.runtime.reports import UpdateReport

SGD = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)


class Tied(nn.Module):
    """The first and the last layer have one weight."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])
        self.layers[3].weight = self.layers[0].weight

    def forward(self, features: Tensor) -> Tensor:
        for layer in self.layers:
            features = torch.tanh(layer(features))
        return features.pow(2).mean()


def main() -> None:
    torch.manual_seed(0)
    model = Tied().double()
    batches = [(torch.randn(4, 8, dtype=torch.float64),) for _ in range(6)]
    pipe = pd2bw_fx.split(model, batches[0], cluster=2, costs="analytic", check=False)
    found, norms = {}, known_norms()
    for limit in (None, 0.1):
        reports: list[UpdateReport] = []
        options: dict[str, Any] = {"max_gradient_norm": limit, "on_report": reports.append}
        with pipe.engine(optimizer=SGD, slack=1.0, **options) as engine:
            losses = []
            for batch in batches:
                losses.append(engine.step(batch))
                torch.distributed.barrier()
            engine.flush()
            known = train_reference(
                model, batches, optimizer=SGD, microbatches_per_update=2, max_gradient_norm=limit
            )
            found[str(limit)] = [[loss.item() for loss in losses], list(known.losses)]
            rank = engine.rank
    told = [report.gradient_norm for report in reports]
    Path(sys.argv[1], f"norms.{rank}.json").write_text(json.dumps([told, norms]))
    if rank == 0:
        Path(sys.argv[1], "losses.json").write_text(json.dumps(found))


def known_norms() -> list[float]:
    """Those that the reference's clip_grad_norm_ finds from now on."""
    norms, clip = [], nn.utils.clip_grad_norm_

    def noting(*arguments: Any) -> Tensor:
        norm = clip(*arguments)
        norms.append(norm.item())
        return norm

    nn.utils.clip_grad_norm_ = noting
    return norms


if __name__ == "__main__":
    main()
