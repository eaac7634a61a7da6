"""Run by torchrun: a sweep goes on after an engine that failed on rank 1, while rank 0 waits in it.

    torchrun --nproc-per-node 2 sweeps.py PIPELINE [open]

PIPELINE is a saved one of `mlp`. `open`: the engine that failed stays open.
"""

import sys
from contextlib import ExitStack

import torch

import pd2bw_fx
from pd2bw_fx.models import build
from tests.programs.engine_errors import Exploding


def main() -> None:
    pipe = pd2bw_fx.load(sys.argv[1])
    batch = build("mlp").example_inputs(batch_size=4)  # type: ignore[operator]
    for kind in (Exploding, torch.optim.SGD):
        engine = pipe.engine(
            optimizer=lambda parameters, kind=kind: kind(parameters, lr=0.1),
            microbatches_per_update=2,
            silence_s=3.0,
        )
        try:
            with ExitStack() as closing:
                if "open" not in sys.argv:
                    closing.enter_context(engine)
                for _ in range(6):
                    engine.step(batch)
        except ArithmeticError as error:
            print(f"left out: {error}", flush=True)


if __name__ == "__main__":
    main()
