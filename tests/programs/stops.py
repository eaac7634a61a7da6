"""Run with RANK and WORLD_SIZE: trains, and one rank ends itself in its third step, or after it.

stops.py FOLDER RANK_THAT_STOPS SIGSTOP|SIGKILL    SILENCE_S    without a word, in the optimizer
stops.py FOLDER RANK_THAT_STOPS error|exit|return  SILENCE_S    by an error or sys.exit between two steps, or
                                                                as if it were done
stops.py FOLDER RANK            half               SILENCE_S    does not, but gives half a batch

FOLDER has a pipeline of the model `mlp`, with a stage for each rank.
"""

import os
import signal
import sys
from typing import Any

import torch

import pd2bw_fx
from pd2bw_fx.models import build

IS_TO_STOP, HOW = os.environ["RANK"] == sys.argv[2], sys.argv[3]


class Stopping(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.count = getattr(self, "count", 0) + 1
        if self.count == 3 and IS_TO_STOP and HOW in ("SIGSTOP", "SIGKILL"):
            os.kill(os.getpid(), signal.Signals[HOW])
        super().step(closure)


def main() -> None:
    torch.manual_seed(0)
    model = build("mlp")
    pipe = pd2bw_fx.load(sys.argv[1])
    num_stages = pipe.plan.num_stages
    engine = pipe.engine(
        optimizer=lambda parameters: Stopping(parameters, lr=0.1),
        microbatches_per_update=num_stages,
        silence_s=float(sys.argv[4]),
    )
    for update in range(6):
        if update == 3 and IS_TO_STOP and HOW == "error":
            raise ArithmeticError("the fourth batch went wrong")
        if update == 3 and IS_TO_STOP and HOW == "exit":
            sys.exit(3)
        if update == 3 and IS_TO_STOP and HOW == "return":
            break
        is_half = update == 3 and IS_TO_STOP and HOW == "half"
        batch_size = num_stages if is_half else 2 * num_stages
        engine.step(model.example_inputs(batch_size=batch_size))  # type: ignore[operator]
    engine.flush()


if __name__ == "__main__":
    main()
