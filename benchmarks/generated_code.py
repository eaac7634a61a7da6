"""Print docs/GENERATED_CODE.md: a whole stage of GPT-2 as it is generated, with what to look at.

    python benchmarks/generated_code.py > docs/GENERATED_CODE.md

GPT-2 with its published sizes, on tensors without data: nothing is downloaded, and no weight is allocated.
"""

from __future__ import annotations

import sys

import torch
import transformers as hf

from pd2bw_fx.cluster import Cluster
from pd2bw_fx.passes.coarsen import coarsen
from pd2bw_fx.passes.codegen import generate
from pd2bw_fx.passes.normalise import normalise
from pd2bw_fx.passes.partition import partition
from pd2bw_fx.passes.profile import profile
from pd2bw_fx.passes.trace import trace
from pd2bw_fx.stage import StageProgram

TEXT = """# What a generated stage looks like

Below is all of stage 1 of 2 of GPT-2 (124 million parameters, from transformers {version}, unchanged), as
`split` writes it. This page is made by

    python benchmarks/generated_code.py > docs/GENERATED_CODE.md

and a test checks that it is current. What to look at:

- The head says where inputs come from and outputs go, which parameters are tied to another stage's, what
  was predicted for the stage, and why it is cut here.
- Classes, attributes, parameters and variables have the model's own names, also second names
  (`residual = hidden_states`). A value that the author did not name is called after its use, and one that
  outlives its name after the list that it is put into (`skips.append(x)`). The comment at the end of a line
  is the author's line, with the shape where it changes.
- A class is written once, however many blocks there are of it, and equal blocks run in a loop: this stage has
  {blocks} of them, and would be as long with twice as many. Sizes that differ are arguments. A loop
  over numbers (steps of time, a layer that is used repeatedly), which a trace unrolls, is a loop again, with
  the lists that it fills or goes over (the skips of a U-Net).
- Layers of torch.nn are called as layers, nn.MultiheadAttention among them, wherever no cut divides them.
  They may have a norm: `self.conv = weight_norm(nn.Conv1d(80, 512, 7))`.
- Masks and positions are computed here rather than sent, and labels are an input of the stage itself.
- No batch size and no device is written down: both are read from the inputs. A size that a forward reads
  often has its name in the comments there: `batch = hidden_states.shape[0]`.
- It imports torch and nothing else: `python stage_1.py` runs it forward and backward, and
  `load_state_dict(load_file("stage_1.safetensors"))` gives it its weights. Untraced
  functions (`pd2bw_fx.untraced`) and a library's own operators are called by their registered names: import
  the script or library that registers them first.
- It computes in the model's own order, so that loss and gradients are the model's bit for bit.

```python
{source}```
"""


def stages() -> tuple[StageProgram, ...]:
    """GPT-2 for two equal devices."""
    with torch.device("meta"):
        model = hf.GPT2LMHeadModel(hf.GPT2Config()).train()
        tokens = torch.zeros(4, 1024, dtype=torch.int64)
    cluster = Cluster.uniform(2, memory_bytes="24 GiB", bytes_per_s=1.25e8)  # gigabit
    traced = trace(model, (), {"input_ids": tokens, "labels": tokens})
    graph = normalise(traced)
    costs = profile(graph, traced.examples, device=cluster.devices[0], method="analytic")
    return generate(graph, partition(coarsen(graph, costs, cluster), cluster, num_stages=2))


def page() -> str:
    program = stages()[1]
    blocks = len({name.split(".")[2] for name in program.parameters if name.startswith("transformer.h.")})
    return TEXT.format(version=hf.__version__, blocks=blocks, source=program.source)


if __name__ == "__main__":
    hf.logging.set_verbosity_error()
    sys.stdout.write(page())
