"""Train a GPT on real text with 2BW, one process a stage:

    torchrun --nproc-per-node 2 examples/train_gpt.py

Lines marked + are what a script for one device gains.
"""

import argparse

import torch

import pd2bw_fx  # +
from pd2bw_fx.models.gpt import GPT, GPTConfig
from pd2bw_fx.models.text import byte_batches


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a GPT on the text that ships with Python")
    parser.add_argument("--updates", type=int, default=200)
    options = parser.parse_args()

    torch.manual_seed(0)
    model = GPT.from_config(GPTConfig(sequence_length=64, width=128))
    batches = byte_batches(batch_size=32, sequence_length=64, seed=0, num_batches=options.updates)
    pipe = pd2bw_fx.split(model, model.example_inputs(batch_size=8), cluster=2)  # +
    engine = pipe.engine(  # +
        optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=3e-4)
    )
    for update, batch in enumerate(batches):
        loss = engine.step(batch)  # + in place of forward, backward and optimizer.step
        if update % 20 == 0:
            value = float(loss)  # every rank may read it
            if engine.rank == 0:
                print(f"update {update}: loss {value:.3f}", flush=True)
    held_out = next(byte_batches(batch_size=32, sequence_length=64, seed=1, split="validation"))
    print(f"rank {engine.rank}: validation loss {engine.eval(held_out):.3f}")  # +
    model.load_state_dict(engine.state_dict())  # + the whole model, on every rank
    engine.close()  # +


if __name__ == "__main__":
    main()
