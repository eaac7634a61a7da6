"""Run with RANK and WORLD_SIZE: trains, and one rank ends itself without a word in its third step.

stops.py RANK_THAT_STOPS SIGSTOP|SIGKILL
"""

import os
import signal
import sys
from typing import Any

import torch

import pd2bw_fx
from pd2bw_fx.models import build


class Stopping(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.count = getattr(self, "count", 0) + 1
        if self.count == 3 and os.environ["RANK"] == sys.argv[1]:
            os.kill(os.getpid(), signal.Signals[sys.argv[2]])
        super().step(closure)


def main() -> None:
    torch.manual_seed(0)
    model = build("mlp")
    num_stages = int(os.environ["WORLD_SIZE"])
    pipe = pd2bw_fx.split(model, cluster=num_stages, costs="analytic", check=False)
    engine = pipe.engine(
        optimizer=lambda parameters: Stopping(parameters, lr=0.1),
        microbatches_per_update=num_stages,
        silence_s=4.0 if sys.argv[2] == "SIGSTOP" else 60.0,
    )
    for _ in range(6):
        engine.step(model.example_inputs(batch_size=2 * num_stages))  # type: ignore[operator]
    engine.flush()


if __name__ == "__main__":
    main()
