"""Run by torchrun on two ranks: the same training on CPUs, and with either rank on a device that is not one;
losses and weights as JSON from rank 0.

mixed_devices.py RESULT.json
"""

import json
import sys
from pathlib import Path

import torch

import pd2bw_fx
from pd2bw_fx.models import build
from tests.accelerator import DEVICE, Accelerator
from tests.programs.other_device import trained


def main() -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    torch.manual_seed(0)
    model = build("mlp")
    example = model.example_inputs()  # type: ignore[operator]
    batch = tuple(torch.cat([tensor] * 4) for tensor in example)
    pipe = pd2bw_fx.split(model, example, cluster=2, costs="analytic", check=False)
    found = []
    for devices in (("cpu", "cpu"), ("cpu", DEVICE), (DEVICE, "cpu")):
        with Accelerator():
            own = devices[torch.distributed.get_rank()]
            losses, weights, _ = trained(pipe, batch, {"max_gradient_norm": 1.0, "device": own})
        found.append((losses, weights))
    if torch.distributed.get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(found))
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
