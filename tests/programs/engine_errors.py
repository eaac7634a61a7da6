"""Run by torchrun with a saved pipeline of `mlp` and names of mistakes: what each rank raises at each goes to
FOLDER/MISTAKE.RANK.

    torchrun --nproc-per-node 2 engine_errors.py PIPELINE FOLDER MISTAKE ..

The last one ends the run, as it would a user's.
"""

import os
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
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


def make(mistake: str, saved: str, folder: Path) -> None:
    model, pipe = build("mlp"), pd2bw_fx.load(saved)
    if mistake == "size":
        pipe = pd2bw_fx.split(model, cluster=3, costs="analytic", check=False)
    batch = model.example_inputs(batch_size=4)  # type: ignore[operator]
    if mistake == "batches":
        batch = tuple(tensor.roll(int(os.environ["RANK"]), dims=0) for tensor in batch)
    kind = Exploding if mistake == "step" else torch.optim.SGD
    differs = os.environ["RANK"] == "1"
    engine = pipe.engine(
        optimizer=lambda parameters: kind(parameters, lr=0.1),
        max_gradient_norm=1.0 if differs and mistake == "clipping" else None,
        method="1f1b" if differs and mistake == "method" else None,
        microbatches_per_update={"microbatches": 1, "count": "2"}.get(mistake, 2),  # type: ignore[arg-type]
    )
    for update in range(6):
        if mistake == "shuffling" and update == 3:
            batch = (batch[0], batch[1].roll(int(os.environ["RANK"]), dims=0))
        engine.step(batch)
    engine.flush()
    if mistake == "evaluation":
        engine.eval(tuple(tensor.roll(int(os.environ["RANK"]), dims=0) for tensor in batch))
    if mistake == "disk":
        try:
            with full_disk_on(rank=1):
                engine.save_checkpoint(folder / "checkpoints")
        except pd2bw_fx.InputError:
            engine.step(batch)
            engine.save_checkpoint(folder / "checkpoints")
            raise


@contextmanager
def full_disk_on(*, rank: int) -> Iterator[None]:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if os.environ["RANK"] == str(rank):
        resource.setrlimit(resource.RLIMIT_FSIZE, (64, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def main() -> None:
    saved, folder, *mistakes = sys.argv[1:]
    for mistake in mistakes:
        try:
            make(mistake, saved, Path(folder))
        except Exception as error:
            told = f"{type(error).__name__}: {error}"
            (Path(folder) / f"{mistake}.{os.environ['RANK']}").write_text(told)
            if mistake == mistakes[-1]:
                time.sleep(1.0)  # torchrun ends all ranks at the first exit: let every one tell
                raise


if __name__ == "__main__":
    main()
