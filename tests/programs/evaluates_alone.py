"""Run by torchrun on two ranks, of which the first alone evaluates: what each of them then raises goes to
FOLDER/RANK. Nobody waits for anybody."""

import os
import sys
from pathlib import Path

import torch
from torch import Tensor, nn

import pd2bw_fx


class MeanSquare(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.square().mean()


class TwoHeads(nn.Module):
    """The loss is of the first layer; the last stage returns no number."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.judge = nn.Linear(8, 8), nn.Linear(8, 8), MeanSquare()

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        hidden = self.first(x)
        return {"loss": self.judge(hidden), "found": self.last(hidden)}


def main() -> None:
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    batches = list(torch.randn(6, 8, 8))
    pipe = pd2bw_fx.split(
        TwoHeads(),
        (batches[0],),
        cluster=2,
        costs="analytic",
        check=False,
        microbatches_per_update=2,
        constraints=pd2bw_fx.Constraints(stage_of={"first": 0, "last": 1, "judge": 0}),
    )
    told = "nothing"
    try:
        engine = pipe.engine(optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1))
        losses = []
        for update, batch in enumerate(batches):
            losses.append(engine.step(batch))
            if update == 2 and rank == 0:
                float(engine.eval(batch))
        for loss in losses:
            float(loss)
    except (pd2bw_fx.InputError, pd2bw_fx.WorkerError) as error:
        told = str(error)
    (Path(sys.argv[1]) / str(rank)).write_text(told)


if __name__ == "__main__":
    main()
