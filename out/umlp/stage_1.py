"""Stage 1 of 2 of UMLP, for cpu:1.

Takes
    x_3: float32 (batch, 8), from stage 0, its gradient goes back
    x_2: float32 (batch, 8), from stage 0, its gradient goes back
    x: float32 (batch, 8), from stage 0, its gradient goes back
Gives
    output: float32 (batch, 8), the output of the model
Holds 408 parameters (1.59 KiB).
Predicted for a microbatch: 35.5 us forward, 35.9 us backward; memory 10.1 KiB of 11.8 GiB.
Cut here
    before it x, x_2, x_3 cross, 768 B, gradient included
    its load is 672 us, 600 us of it on its links: the bottleneck
    no other 2 stages that fit have a lower one
"""

import torch
from torch import Tensor, nn


class UMLPStage1(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ups = nn.ModuleList(nn.Linear(16, 8) for _ in range(3))

    def forward(self, x_3: Tensor, x_2: Tensor, x: Tensor) -> Tensor:
        tanh = x_3.tanh()  # f5_ports.py:15
        linear = self.ups[0](torch.cat([tanh, x_3], dim=-1))  # f5_ports.py:17
        linear = self.ups[1](torch.cat([linear, x_2], dim=-1))  # f5_ports.py:17
        x = self.ups[2](torch.cat([linear, x], dim=-1))  # f5_ports.py:17
        return x


def main() -> None:
    """Forward and backward once, on random inputs and weights."""
    stage = UMLPStage1()
    for parameter in stage.parameters():
        nn.init.normal_(parameter, std=0.02)
    x_3 = torch.randn((4, 8), requires_grad=True)
    x_2 = torch.randn((4, 8), requires_grad=True)
    x = torch.randn((4, 8), requires_grad=True)
    returned = stage(x_3, x_2, x)
    results = returned if isinstance(returned, tuple) else (returned,)
    for result in results:
        if result.requires_grad:
            result.sum().backward(retain_graph=True)
    for result in results:
        print(tuple(result.shape), result.dtype)


if __name__ == "__main__":
    main()
