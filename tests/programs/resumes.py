"""Run by torchrun: trains a GPT with checkpoints on the way, and writes losses and weights.

    resumes.py PIPELINE FOLDER CHECKPOINTS UPDATES [KILL]

PIPELINE was saved before. With KILL, rank 1 is killed in the middle of writing the checkpoint of that update,
the first time. Of more than six updates the first four have checkpoints.
"""

import atexit
import functools
import itertools
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.optim.lr_scheduler import LambdaLR

import pd2bw_fx
from pd2bw_fx.models.text import byte_batches
from pd2bw_fx.runtime import checkpoint


def require_no_threads(kept: list[Any]) -> None:
    """Process groups' threads are joined while what has used them is still there, the engine and its losses.

    One that lets go of a tensor while the interpreter ends would abort this rank.
    """
    names = [(thread / "comm").read_text().strip() for thread in Path("/proc/self/task").iterdir()]
    if found := [name for name in names if "gloo" in name]:
        sys.stderr.write(f"with {len(kept)} kept there are still {found}\n")
        sys.stderr.flush()
        os._exit(1)


def main() -> None:
    saved, folder, checkpoints = (Path(argument) for argument in sys.argv[1:4])
    num_updates = int(sys.argv[4])
    is_first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    kill_at = int(sys.argv[5]) if len(sys.argv) > 5 and is_first else None
    torch.manual_seed(int(os.environ["RANK"]))
    kept: list[Any] = []
    atexit.register(require_no_threads, kept)
    engine = pd2bw_fx.load(saved).engine(
        optimizer=functools.partial(torch.optim.AdamW, lr=1e-3),
        lr_scheduler=lambda optimizer: LambdaLR(optimizer, [lambda t: 0.9**t, lambda t: 1 / (1 + t)]),
        # The groups of GPT's first stage begin with an embedding, those of its last may with a norm.
        parameter_options=lambda name, weight: {"lr": 1e-3} if weight.dim() > 1 else {"lr": 1e-2},
        microbatches_per_update=4,
        max_gradient_norm=1.0,
        weight_average=0.9,
    )
    first = engine.load_checkpoint(checkpoints) if (checkpoints / "latest").exists() else 0
    batches: Any = byte_batches(batch_size=8, sequence_length=32, seed=0, num_batches=num_updates)
    losses = {}
    for batch in itertools.islice(batches, first, None):
        losses[engine.updates] = engine.step(batch)
        if engine.updates % 2 == 0 and (num_updates <= 6 or engine.updates <= 4):
            if engine.updates == kill_at and engine.rank == 1:
                checkpoint.save_tensors = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
            engine.save_checkpoint(checkpoints)
    weights, averaged = engine.state_dict(), engine.averaged_state_dict()
    if engine.rank == 0:
        for name, state in (("weights", weights), ("averaged", averaged)):
            save_file({key: tensor.clone() for key, tensor in state.items()}, folder / f"{name}.safetensors")
        known = {update: float(loss) for update, loss in losses.items()}
        (folder / "losses.json").write_text(json.dumps({"first": first, "losses": list(known.values())}))
    kept += [engine, losses]
    if engine.rank % 2:  # the others are closed at the exit
        engine.close()


if __name__ == "__main__":
    main()
