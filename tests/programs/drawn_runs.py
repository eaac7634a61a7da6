"""Run by torchrun: trains runs that are described in a file or pipe, a line of JSON each.

    torchrun --nproc-per-node N drawn_runs.py ASKED ANSWERED

    {"num_stages": 2, "replicas": 2, "method": "2bw", ..}

Answers each with a line: the largest relative differences of losses and weights from the reference in one
process.
"""

import json
import sys
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

import pd2bw_fx
from pd2bw_fx.runtime.reference import train_reference
from tests.programs.equals_reference import OPTIMIZERS, difference

WIDTH, UPDATES = 6, 4


class Drawn(nn.Module):
    """Layers in a row, with skips between any of them, weights used twice, and frozen ones."""

    def __init__(self, layers: int, skips: list[list[int]], ties: list[list[int]], frozen: list[int]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))
        for one, other in ties:
            self.layers[other].weight = self.layers[one].weight
        for index in frozen:
            self.layers[index].bias.requires_grad_(False)
        self.skips = [tuple(skip) for skip in skips]

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        kept = [x]
        for index, layer in enumerate(self.layers):
            x = torch.tanh(layer(x))
            for start, end in self.skips:
                if end == index:
                    x = x + kept[start]
            kept.append(x)
        return F.mse_loss(x, y)


def main() -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    with ExitStack() as files:
        if dist.get_rank() == 0:
            asked, answered = (
                files.enter_context(open(sys.argv[1])),
                files.enter_context(open(sys.argv[2], "w")),
            )
        while True:
            told: list[Any] = [asked.readline() if dist.get_rank() == 0 else ""]
            dist.broadcast_object_list(told, src=0)
            if not told[0]:
                break
            answer = run(json.loads(told[0]))
            if dist.get_rank() == 0:
                print(json.dumps(answer), file=answered, flush=True)
    dist.destroy_process_group()


def run(drawn: dict[str, Any]) -> dict[str, float] | None:
    torch.manual_seed(0)
    model = Drawn(drawn["layers"], drawn["skips"], drawn["ties"], drawn["frozen"]).double()
    m, d = drawn["m"], drawn["num_stages"]
    rows = [torch.randn(UPDATES * m, WIDTH, dtype=torch.float64) for _ in range(2)]
    batches = list(zip(*(tensor.split(m) for tensor in rows), strict=True))
    pipe = None
    if dist.get_rank() == 0:
        example = tuple(tensor[:1] for tensor in rows)
        pipe = pd2bw_fx.split(
            model, example, cluster=d, num_stages=d, costs="analytic", recompute=drawn["recompute"]
        )
        if drawn["method"] == "interleaved":
            placed = tuple(replace(stage, device=stage.stage % (d // 2)) for stage in pipe.plan.stages)
            pipe.plan = replace(pipe.plan, stages=placed)
    options = {"max_gradient_norm": 0.1} if drawn["clips"] else {}
    optimizer = OPTIMIZERS[drawn["optimizer"]]
    engine = pd2bw_fx.Engine.from_pipeline(
        pipe,
        optimizer=optimizer,
        microbatches_per_update=m,
        method=drawn["method"],
        replicas=drawn["replicas"],
        slack=drawn["slack"],
        **options,
    )
    told = []
    for batch in batches:
        told.append(engine.step(batch))
        if drawn["meets"]:
            dist.barrier()
    losses = [float(loss) for loss in told]
    weights = engine.state_dict()
    if pipe is None:
        return None
    expected = train_reference(
        model,
        batches,
        optimizer=optimizer,
        microbatches_per_update=m,
        method="2bw" if drawn["method"] == "2bw" else "synchronous",
        **options,
    )
    loss = max(abs(a - b) / abs(b) for a, b in zip(losses, expected.losses, strict=True))
    return {"loss": loss, "weights": difference(weights, expected.state_dict)}


if __name__ == "__main__":
    main()
