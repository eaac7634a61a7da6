"""The text of generated loops, for tests of how loops are written."""

from __future__ import annotations

from torch import Tensor, nn

from pd2bw_fx import split


def source_of(model: nn.Module, *batch: Tensor, num_stages: int = 1) -> str:
    pipe = split(model, batch, cluster=2, num_stages=num_stages, costs="analytic", check="full")
    return "\n".join(stage.source for stage in pipe.stages)


def lines_inside(source: str, header: str) -> list[str]:
    """The lines of a loop, without their comments."""
    lines = [line.partition("  # ")[0] for line in source.splitlines()]
    start = next(at for at, line in enumerate(lines) if line.strip() == header)
    indent = len(lines[start]) - len(lines[start].lstrip())
    body = []
    for line in lines[start + 1 :]:
        if not line.startswith(" " * (indent + 1)):
            break
        body.append(line[indent + 4 :])
    return body
