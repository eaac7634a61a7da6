"""Do the times of single operators add up to the time of the whole model?

    python benchmarks/profiler.py              # models whose operators are long enough to be timed alone
    python benchmarks/profiler.py gpt resnet   # small ones by name: there, calling modules takes its share

`alone` is the sum over operators, each repeated by itself; `whole` is the eager model's own time; `ratio` is
the one over the other. `estimate` is the analytic cost, which knows nothing of this machine but its device
entry. Exits with 1 if one of the large models is off by more than 15%.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Mapping

from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from pd2bw_fx.device import Device
from pd2bw_fx.models import MODELS, build
from pd2bw_fx.models.bert import Bert, BertConfig
from pd2bw_fx.models.gpt import GPT, GPTConfig
from pd2bw_fx.models.mlp import MLP, MLPConfig
from pd2bw_fx.models.resnet import ResNet, ResNetConfig
from pd2bw_fx.passes.normalise import normalise
from pd2bw_fx.passes.profile import profile
from pd2bw_fx.passes.trace import trace

TOLERANCE = 0.15
MICROBATCH_SIZE = 4
DEVICE = Device("cpu:0", memory_bytes=2**34)

LARGE: Mapping[str, Callable[[], nn.Module]] = {
    "mlp, width 2048": lambda: MLP(MLPConfig(num_inputs=2048, width=2048)),
    "gpt, width 384": lambda: GPT(GPTConfig(4096, sequence_length=128, num_heads=6, width=384)),
    "bert, width 384": lambda: Bert(BertConfig(4096, sequence_length=128, num_heads=6, width=384)),
    "resnet18, images of 96": lambda: ResNet(
        ResNetConfig((2, 2, 2, 2), width=64, image_size=96, num_classes=1000, large_stem=True)
    ),
}


def compare(model: nn.Module) -> tuple[list[str], float]:
    """A row of the table, and how far the sum of forward and backward is from the whole."""
    inputs: tuple[Tensor, ...] = model.example_inputs(MICROBATCH_SIZE)  # type: ignore[operator]
    traced = trace(model, inputs, {})
    graph = normalise(traced)
    began = time.perf_counter()
    alone = profile(graph, traced.examples, device=DEVICE, method="measured")
    took_s = time.perf_counter() - began
    # With `whole` given, times are scaled to it, so that their sum is the whole model's time.
    whole = profile(graph, traced.examples, device=DEVICE, method="measured", whole=traced.call)
    estimate = profile(graph, traced.examples, device=DEVICE, method="analytic")
    row = [str(len(graph.operators)), f"{took_s:.1f}"]
    for field in ("forward_s", "backward_s"):
        alone_s, whole_s = getattr(alone, field), getattr(whole, field)
        row += [f"{alone_s * 1e3:.1f}", f"{whole_s * 1e3:.1f}", f"{alone_s / whole_s:.2f}"]
        row.append(f"{getattr(estimate, field) * 1e3:.1f}")
    ratio = (alone.forward_s + alone.backward_s) / (whole.forward_s + whole.backward_s)
    return row, abs(ratio - 1)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", choices=[*MODELS, []], help="small models; none: the large ones")
    chosen = parser.parse_args().models
    table = Table("model", "operators", "profiled in s", title="milliseconds a microbatch")
    for direction in ("forward", "backward"):
        for column in ("alone", "whole", "ratio", "estimate"):
            table.add_column(f"{direction}\n{column}", justify="right")
    worst = 0.0
    for name in chosen or LARGE:
        row, error = compare(build(name) if chosen else LARGE[name]())
        table.add_row(name, *row)
        worst = max(worst, error)
    console = Console()
    console.print(table)
    if chosen:
        return 0
    console.print(f"forward and backward together: off by at most {worst:.0%} (allowed {TOLERANCE:.0%})")
    return int(worst > TOLERANCE)


if __name__ == "__main__":
    sys.exit(main())
