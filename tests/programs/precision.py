"""Run by torchrun: bf16 and fp16 against torch's own autocast and GradScaler in one process.

precision.py RESULT.json
"""

import functools
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import pd2bw_fx

UPDATES, M = 6, 2
SGD = functools.partial(torch.optim.SGD, lr=1e-3)
FALLING = functools.partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.5)


class Net(nn.Module):
    """`steep` makes gradients that overflow fp16 under the first loss scales."""

    def __init__(self, steep: float) -> None:
        super().__init__()
        self.steep = steep
        self.first, self.second, self.third = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 1)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        hidden = torch.tanh(self.second(torch.relu(self.first(x))))
        return nn.functional.mse_loss(self.third(hidden).float(), target) * self.steep


def reference(model: nn.Module, batches: list[Any], dtype: torch.dtype) -> tuple[list[float], float]:
    optimizer = SGD(model.parameters())
    scheduler = FALLING(optimizer)
    scaler = torch.amp.GradScaler("cpu", enabled=dtype is torch.float16)
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        total = 0.0
        for x, target in zip(*(tensor.chunk(M) for tensor in batch), strict=True):
            with torch.autocast("cpu", dtype):
                loss = model(x, target)
            scaler.scale(loss / M).backward()  # type: ignore[no-untyped-call]
            total += loss.item() / M
        scale = scaler.get_scale()
        scaler.step(optimizer)
        scaler.update()
        if scaler.get_scale() >= scale:  # as torch's users are told: the optimizer has stepped
            scheduler.step()
        losses.append(total)
    return losses, scaler.get_scale() if dtype is torch.float16 else 1.0


def main() -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    results = {}
    for precision, dtype, steep in (
        ("bf16", torch.bfloat16, 1.0),
        ("fp16", torch.float16, 1.0),
        ("fp16", torch.float16, 64.0),
    ):
        torch.manual_seed(0)
        model = Net(steep)
        batches = [(torch.randn(8, 8), torch.randn(8, 1)) for _ in range(UPDATES)]
        pipe = None
        if os.environ["RANK"] == "0":
            pipe = pd2bw_fx.split(model, batches[0], cluster=2, costs="analytic", check=False)
        engine = pd2bw_fx.Engine.from_pipeline(
            pipe,
            optimizer=SGD,
            lr_scheduler=FALLING,
            microbatches_per_update=M,
            method="1f1b",
            precision=precision,
        )
        losses = [float(engine.step(batch)) for batch in batches]
        weights = engine.state_dict()
        scale = engine.loss_scale
        if pipe is not None:
            expected, expected_scale = reference(model, batches, dtype)
            furthest = max(float((weights[n] - p.detach()).abs().max()) for n, p in model.named_parameters())
            results[f"{precision} {steep}"] = {
                "losses": [losses, expected],
                "scales": [scale, expected_scale],
                "weights": furthest,
            }
    if pipe is not None:
        Path(sys.argv[1]).write_text(json.dumps(results, indent=1))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
