"""Run by torchrun on one rank: what is done with a model that is on a device that is not the CPU."""

import tempfile

import torch
from torch import Tensor, nn

import pd2bw_fx
from pd2bw_fx.models import build
from pd2bw_fx.passes.trace.checks.second_call import _others
from pd2bw_fx.passes.trace.inputs import find_example_inputs, flatten_arguments
from pd2bw_fx.passes.trace.program import Program
from pd2bw_fx.passes.verify import another_example
from tests.accelerator import DEVICE, Accelerator


class Columns(nn.Module):
    """Two columns with vocabularies of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.few, self.many = nn.Embedding(3, 8), nn.Embedding(50, 8)
        self.last = nn.Linear(8, 2)

    def forward(self, columns: Tensor, age: Tensor, targets: Tensor) -> Tensor:
        hidden = self.few(columns[:, 0]) + self.many(columns[:, 1]) * age[:, None]
        return nn.functional.cross_entropy(self.last(hidden), targets)


def main() -> None:
    torch.manual_seed(0)
    columns = torch.stack([torch.arange(6) % 3, torch.arange(40, 46)], dim=1)
    batch = (columns, torch.rand(6), torch.arange(6) % 2)
    pipe = pd2bw_fx.split(Columns(), batch, cluster=2, costs="analytic", check="fast")
    with tempfile.TemporaryDirectory() as folder:
        pipe.save(f"{folder}/kept")
        loaded = pd2bw_fx.load(f"{folder}/kept")
    with torch.device("meta"):
        nowhere = tuple(tensor.to("meta") for tensor in batch)
        empty = pd2bw_fx.split(Columns(), nowhere, cluster=2, costs="analytic")
    with Accelerator(), torch.device(DEVICE):
        model = Columns()
        there = tuple(tensor.to(DEVICE) for tensor in batch)
        assert loaded.verify(model).exact
        assert loaded.verify(model, example_args=there).exact
        empty.load_state_dict(model.state_dict())
        assert empty.verify(model).exact
        assert {tensor.device for tensor in empty.example.values()} == {DEVICE}

        offering = build("mlp")
        offering.example_inputs = lambda: (torch.ones(2, device="cpu"), {"y": torch.ones(2, device="cpu")})
        args, _ = find_example_inputs(offering)
        assert (args[0].device, args[1]["y"].device) == (DEVICE, DEVICE)

        flat = flatten_arguments(model, there, {})
        given = dict(zip(flat.names, flat.tensors, strict=True))
        known = [set(column.tolist()) for column in columns.T]
        for other in (_others(Program(model, flat, None), given), another_example(pipe.graph, given)):
            found = other["columns"].cpu()
            assert other["columns"].device == DEVICE
            assert found.tolist() != columns.tolist()
            assert all(set(column.tolist()) <= own for column, own in zip(found.T, known, strict=True))


if __name__ == "__main__":
    main()
