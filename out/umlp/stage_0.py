"""Stage 0 of 2 of UMLP, for cpu:0.

Takes
    x: float32 (batch, 8), an input of the model
Gives
    x: float32 (batch, 8), to stage 1
    x_2: float32 (batch, 8), to stage 1
    x_3: float32 (batch, 8), to stage 1
Holds 216 parameters (864 B).
Predicted for a microbatch: 30.2 us forward, 30.5 us backward; memory 6.5 KiB of 11.8 GiB.
Cut here
    behind it x, x_2, x_3 cross, 768 B, gradient included
    its load is 661 us, 600 us of it on its links; the bottleneck is stage 1 with 672 us
    no other 2 stages that fit have a lower one
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class UMLPStage0(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.downs = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = F.relu(self.downs[0](x))  # f5_ports.py:13
        x_2 = F.relu(self.downs[1](x))  # f5_ports.py:13
        x_3 = F.relu(self.downs[2](x_2))  # f5_ports.py:13
        return x, x_2, x_3


def main() -> None:
    """Forward and backward once, on random inputs and weights."""
    stage = UMLPStage0()
    for parameter in stage.parameters():
        nn.init.normal_(parameter, std=0.02)
    x = torch.randn((4, 8))
    returned = stage(x)
    results = returned if isinstance(returned, tuple) else (returned,)
    for result in results:
        if result.requires_grad:
            result.sum().backward(retain_graph=True)
    for result in results:
        print(tuple(result.shape), result.dtype)


if __name__ == "__main__":
    main()
