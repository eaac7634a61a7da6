"""Run by torchrun: the last rank is done after an evaluation, while the first is busy for SECONDS.

torchrun --nproc-per-node 2 closes.py SECONDS RESULT.txt
"""

import sys
import time
from pathlib import Path

import torch

import pd2bw_fx
from pd2bw_fx.models import build


def main() -> None:
    torch.manual_seed(0)
    model = build("mlp")
    pipe = pd2bw_fx.split(model, cluster=2, num_stages=2, costs="analytic", check=False)
    engine = pipe.engine(optimizer=lambda p: torch.optim.SGD(p, lr=0.1), microbatches_per_update=2)
    batch = model.example_inputs(batch_size=4)  # type: ignore[operator]
    engine.step(batch)
    engine.flush()
    engine.eval(batch)
    if engine.rank == 0:
        time.sleep(float(sys.argv[1]))
    began = time.monotonic()
    engine.close()
    if engine.rank == 1:
        Path(sys.argv[2]).write_text(str(time.monotonic() - began))


if __name__ == "__main__":
    main()
