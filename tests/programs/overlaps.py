"""Run by torchrun on 4 ranks: when the gradients of two replicated stages start on their way.

torchrun --nproc-per-node 4 overlaps.py RESULT.json     {update: [[action at work, numbers sent], ...]}
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import pd2bw_fx
from pd2bw_fx.models import build
from pd2bw_fx.runtime import gradient_sums


def main() -> None:
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    model = build("mlp")
    pipe = pd2bw_fx.split(model, cluster=2, costs="analytic", check=False) if dist.get_rank() == 0 else None
    engine = pd2bw_fx.Engine.from_pipeline(
        pipe,
        optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1),
        microbatches_per_update=4,
        replicas=2,
    )
    sent: dict[int, list[tuple[str, int]]] = {}
    start = gradient_sums.start_adding

    def watched(among: Any, tensor: Tensor) -> dist.Work:
        sent.setdefault(engine.updates, []).append((str(engine._runner.current), tensor.numel()))
        return start(among, tensor)

    gradient_sums.start_adding = watched
    for _ in range(4):
        engine.step(model.example_inputs(batch_size=4))
    engine.flush()
    if engine.rank == 0:
        parameters = sum(t.numel() for t in engine.tensors().values())
        Path(sys.argv[1]).write_text(json.dumps({"parameters": parameters, "sent": sent}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
