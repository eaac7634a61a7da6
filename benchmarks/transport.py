"""A tensor from one process of this host to another: through gloo's socket, and through shared memory.

    python benchmarks/transport.py [--rounds 30]

The two take turns; each message is answered, and the fastest of the rounds is told.
"""

from __future__ import annotations

import argparse
import os
import time

import torch
import torch.distributed as dist
from launch import under_torchrun

from pd2bw_fx.runtime import channel
from pd2bw_fx.runtime.channel import Inbox, Outbox, Route

KIBIBYTES = (64, 256, 1024, 4096, 16384)
CPU = torch.device("cpu")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=30)
    options = parser.parse_args()
    if "RANK" in os.environ:
        work(options.rounds)
        return
    under_torchrun(__file__, 2)


def work(rounds: int) -> None:
    torch.set_num_threads(1)
    channel.FROM_BYTES = 0  # every size through memory, where a link has any
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    ends: dict[bool, Inbox | Outbox] = {}
    for shares in (False, True):
        route = Route(1 - rank, dist.new_group([0, 1]), CPU, 0, shares_memory=shares)
        ends[shares] = Outbox(route, ("x",), window=1) if rank == 0 else Inbox(route, ("x",))
    answers = dist.new_group([0, 1])
    for size in KIBIBYTES:
        tensor = torch.ones(size * 256)
        fastest = {False: float("inf"), True: float("inf")}
        if rank == 0:
            ends[True] = Outbox(ends[True].route, ("x",), window=1)  # with memory for this size
        else:
            ends[True] = Inbox(ends[True].route, ("x",))
        for number in range(rounds):
            for shares, end in ends.items():
                dist.barrier()
                began_s = time.perf_counter()
                if isinstance(end, Outbox):
                    end.send(number, size, [tensor])
                    dist.recv(torch.empty(1), 1, group=answers)
                else:
                    end.expect(number, size)
                    end.take(number)
                    dist.send(torch.ones(1), 0, group=answers)
                fastest[shares] = min(fastest[shares], time.perf_counter() - began_s)
        if rank == 0:
            socket_ms, memory_ms = fastest[False] * 1e3, fastest[True] * 1e3
            print(f"{size:>6} KiB   socket {socket_ms:6.2f} ms   memory {memory_ms:6.2f} ms", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
