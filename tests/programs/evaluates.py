"""Run by torchrun: trains an update of a saved pipeline, and tries to evaluate it.

torchrun --nproc-per-node 2 evaluates.py FOLDER RESULT.txt
"""

import sys
from pathlib import Path

import torch

import pd2bw_fx
from pd2bw_fx.errors import InputError


def main() -> None:
    pipe = pd2bw_fx.load(sys.argv[1])
    engine = pipe.engine(optimizer=lambda p: torch.optim.SGD(p, lr=0.1), microbatches_per_update=2)
    batch = torch.ones(4, 8)
    engine.step(batch)
    try:
        told = str(float(engine.eval(batch)))
    except InputError as error:
        told = f"InputError: {error}"
    engine.flush()
    if engine.rank == 0:
        Path(sys.argv[2]).write_text(told)
    engine.close()


if __name__ == "__main__":
    main()
