"""Models with a value that several stages read: an encoding, and rows that are made of weights alone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import pd2bw_fx
from pd2bw_fx.cluster import Cluster
from pd2bw_fx.constraints import Constraints

NEAR, FAR = 1e9, 1e6  # bytes per second


class Readers(nn.Module):
    """Every layer reads what `encode` returns, as a decoder's layers read an encoding."""

    def __init__(self, num_layers: int = 3) -> None:
        super().__init__()
        self.encode = nn.Linear(6, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(num_layers))

    def forward(self, x: Tensor) -> Tensor:
        encoded = hidden = self.encode(x)
        for layer in self.layers:
            hidden = torch.tanh(layer(hidden)) * encoded
        return hidden.square().mean()

    def example_inputs(self, batch_size: int = 4) -> tuple[Tensor]:
        generator = torch.Generator().manual_seed(1)
        return (torch.randn(batch_size, 6, dtype=torch.float64, generator=generator),)


class UnitRows(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 6))

    def forward(self) -> Tensor:
        return F.normalize(self.weight, dim=1)


class SharedRows(nn.Module):
    """What `rows` returns is made of its weight, and used in its own stage and in the next one."""

    def __init__(self) -> None:
        super().__init__()
        self.encode, self.decode, self.rows = nn.Linear(6, 6), nn.Linear(6, 6), UnitRows()

    def forward(self, x: Tensor) -> Tensor:
        hidden, rows = torch.tanh(self.encode(x)), self.rows()
        hidden = torch.tanh(F.linear(hidden, rows))
        return F.linear(self.decode(hidden), rows).square().mean()

    example_inputs = Readers.example_inputs


def two_nodes(num_devices: int, far_bytes_per_s: float, near_bytes_per_s: float = NEAR) -> Cluster:
    """Makes a cluster with the first device on one node and the others on another."""
    rates = [
        [far_bytes_per_s if (a == 0) != (b == 0) else near_bytes_per_s for b in range(num_devices)]
        for a in range(num_devices)
    ]
    delays = [[0.0 if a == b else 1e-6 for b in range(num_devices)] for a in range(num_devices)]
    devices = Cluster.uniform(num_devices).devices
    return Cluster(devices, tuple(map(tuple, rates)), tuple(map(tuple, delays)))


def readers(num_layers: int = 3) -> Readers:
    torch.manual_seed(0)
    return Readers(num_layers).double()


def readers_in_stages(
    far_bytes_per_s: float, *, near_bytes_per_s: float = NEAR, num_layers: int = 3, **options: Any
) -> tuple[nn.Module, pd2bw_fx.Pipeline]:
    """Splits `Readers` into a stage for `encode` and one for each layer."""
    model = readers(num_layers)
    at = {"encode": 0} | {f"layers.{number}": number + 1 for number in range(num_layers)}
    pipe = pd2bw_fx.split(
        model,
        cluster=two_nodes(num_layers + 1, far_bytes_per_s, near_bytes_per_s),
        microbatches_per_update=num_layers + 1,
        constraints=Constraints(stage_of=at),
        costs="analytic",
        **options,
    )
    return model, pipe


def shared_rows() -> SharedRows:
    torch.manual_seed(0)
    return SharedRows().double()


def shared_rows_in_stages() -> pd2bw_fx.Pipeline:
    at = {"encode": 0, "rows": 1, "linear_1": 1, "decode": 2}
    return pd2bw_fx.split(
        shared_rows(), cluster=3, constraints=Constraints(stage_of=at), costs="analytic", check=False
    )
