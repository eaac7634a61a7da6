"""Run by torchrun: another of these programs, with its engines on a GPU, or with links that block as nccl's.

    torchrun --nproc-per-node N with_backend.py cuda equals_methods.py RESULT.json

cuda       on the GPU that this rank has, whether others have it too or not
nccl       the same, over nccl even where ranks share a GPU: each tells nccl that it is a machine of its own
in-order   on the CPU, over an InOrderTransport
"""

import os
import runpy
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pd2bw_fx.runtime.options import EngineOptions
from tests.in_order_transport import InOrderTransport


def choose(**chosen: Any) -> None:
    """Sets options of every engine that is not given them itself."""
    of = EngineOptions.of

    def with_choice(options: Mapping[str, Any], *others: str) -> EngineOptions:
        return of({**chosen, **options}, *others)

    EngineOptions.of = with_choice  # type: ignore[method-assign, assignment]


def main() -> None:
    where, program = sys.argv[1:3]
    if where == "in-order":
        InOrderTransport().install()
    else:
        choose(device="cuda", backend="nccl" if where == "nccl" else "gloo")
    if where == "nccl":
        os.environ |= {"NCCL_HOSTID": f"machine{os.environ['RANK']}", "NCCL_SOCKET_IFNAME": "lo"}
    del sys.argv[1:3]
    runpy.run_path(str(Path(__file__).parent / program), run_name="__main__")


if __name__ == "__main__":
    main()
