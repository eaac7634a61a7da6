"""Run by torchrun with the name of a mistake: what each rank raises goes to FOLDER/RANK, if it is ours."""

import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

import pd2bw_fx
from pd2bw_fx.models import build


class Exploding(torch.optim.SGD):
    """Fails in its third step on rank 1."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.count = getattr(self, "count", 0) + 1
        if self.count == 3 and os.environ["RANK"] == "1":
            raise ArithmeticError("the third step went wrong")
        super().step(closure)


def main() -> None:
    mistake, folder, rank = sys.argv[1], Path(sys.argv[2]), os.environ["RANK"]
    torch.manual_seed(0)
    model = build("mlp")
    pipe = pd2bw_fx.split(model, cluster=3 if mistake == "size" else 2, costs="analytic", check=False)
    batch = model.example_inputs(batch_size=4)  # type: ignore[operator]
    if mistake == "batches":
        batch = tuple(tensor.roll(int(rank), dims=0) for tensor in batch)
    try:
        kind = Exploding if mistake == "step" else torch.optim.SGD
        engine = pipe.engine(
            optimizer=lambda parameters: kind(parameters, lr=0.1),
            microbatches_per_update=1 if mistake == "microbatches" else 2,
        )
        for _ in range(6):
            engine.step(batch)
        engine.flush()
    except Exception as error:
        (folder / rank).write_text(f"{type(error).__name__}: {error}")
        time.sleep(1.0)  # torchrun ends all ranks at the first exit: let every one tell
        raise


if __name__ == "__main__":
    main()
