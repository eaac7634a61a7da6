"""Run by torchrun: losses that are read before what they wait for can be done, and after it.

What each rank found goes to FOLDER/RANK.

reads_early.py FOLDER clipped|tied|both
"""

import functools
import json
import os
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

import pd2bw_fx
from pd2bw_fx.models import build

SGD = functools.partial(torch.optim.SGD, lr=0.1)


class Tied(nn.Module):
    """Four layers, of which the first and another have one weight."""

    def __init__(self, other: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])
        self.layers[other].weight = self.layers[0].weight

    def forward(self, features: Tensor) -> Tensor:
        for layer in self.layers:
            features = torch.tanh(layer(features))
        return features.pow(2).mean()


def main() -> None:
    num_ranks, linked = int(os.environ["WORLD_SIZE"]), sys.argv[2]
    torch.manual_seed(0)
    if linked == "clipped":
        model, constraints = build("mlp"), pd2bw_fx.Constraints()
        batch = model.example_inputs(batch_size=4)  # type: ignore[operator]
    else:
        model = Tied(other=2 if linked == "tied" else 1)
        constraints = pd2bw_fx.Constraints(stage_of={f"layers.{k}": k for k in range(4)})
        batch = (torch.randn(4, 8),)
    pipe = None
    if os.environ["RANK"] == "0":
        pipe = pd2bw_fx.split(
            model,
            batch,
            cluster=num_ranks,
            costs="analytic",
            check=False,
            method="pb" if linked == "both" else "pipedream",
            constraints=constraints,
        )
    limit = None if linked == "tied" else 0.1
    refused = {}
    losses = []
    with pd2bw_fx.Engine.from_pipeline(pipe, optimizer=SGD, max_gradient_norm=limit) as engine:
        for update in range(2 * num_ranks + 1):
            losses.append(engine.step(batch))
            try:
                losses[-1].item()
            except pd2bw_fx.InputError as error:
                refused[update] = str(error)
        engine.flush()
        found = [loss.item() for loss in losses]
    Path(sys.argv[1], os.environ["RANK"]).write_text(json.dumps({"refused": refused, "losses": found}))


if __name__ == "__main__":
    main()
