"""Run by torchrun: trains a GPT with dropout, with checkpoints on the way, and writes losses and weights.

    resumes.py FOLDER CHECKPOINTS UPDATES [KILL]

With KILL, rank 1 is killed in the middle of writing the checkpoint of that update, the first time.
"""

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

import pd2bw_fx
from pd2bw_fx.models.gpt import GPT, GPTConfig
from pd2bw_fx.models.text import byte_batches
from pd2bw_fx.runtime import checkpoint


def main() -> None:
    folder, checkpoints, num_updates = Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
    is_first = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") == "0"
    kill_at = int(sys.argv[4]) if len(sys.argv) > 4 and is_first else None
    torch.manual_seed(0)
    dropout = 0.1 if os.environ["WORLD_SIZE"] == "2" else 0.0
    model = GPT.from_config(GPTConfig(num_layers=2, width=32, dropout=dropout))
    torch.manual_seed(int(os.environ["RANK"]))
    pipe = pd2bw_fx.split(
        model, model.example_inputs(2), cluster=int(os.environ["WORLD_SIZE"]), costs="analytic", check=False
    )
    engine = pipe.engine(
        optimizer=functools.partial(torch.optim.AdamW, lr=1e-3),
        lr_scheduler=functools.partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.9),
        microbatches_per_update=4,
        max_gradient_norm=1.0,
    )
    first = engine.load_checkpoint(checkpoints) if (checkpoints / "latest").exists() else 0
    batches: Any = byte_batches(batch_size=8, sequence_length=32, seed=0, num_batches=num_updates)
    losses = {}
    for batch in itertools.islice(batches, first, None):
        losses[engine.updates] = engine.step(batch)
        if engine.updates % 2 == 0:
            if engine.updates == kill_at and engine.rank == 1:
                checkpoint.save_file = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
            engine.save_checkpoint(checkpoints)
    weights = engine.state_dict()
    if engine.rank == 0:
        save_file({name: tensor.clone() for name, tensor in weights.items()}, folder / "weights.safetensors")
        known = {update: float(loss) for update, loss in losses.items()}
        (folder / "losses.json").write_text(json.dumps({"first": first, "losses": list(known.values())}))
    engine.close()


if __name__ == "__main__":
    main()
