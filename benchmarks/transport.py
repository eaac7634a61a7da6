"""A tensor from one process of this host to another: through gloo's socket, and through shared memory.

    python benchmarks/transport.py [--rounds 30]

The two take turns. First each message is answered while nothing else is done, and the fastest of the rounds
is told. Then both processes compute all the time, and what counts is how long they are kept from it: by the
sending, and by the taking of a message that was sent long before (the median of the rounds).
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from launch import under_torchrun

from pd2bw_fx.runtime.channel import Inbox, Outbox, Route

KIBIBYTES = (4, 64, 256, 1024, 4096, 16384)
CPU = torch.device("cpu")
COMPUTE_S = 0.01


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
    dist.init_process_group("gloo")
    rank, answers = dist.get_rank(), dist.new_group([0, 1])
    groups = {shares: dist.new_group([0, 1]) for shares in (False, True)}
    for size in KIBIBYTES:
        tensor = torch.ones(size * 256)
        routes = {s: Route(1 - rank, group, CPU, CPU, 0, shares_memory=s) for s, group in groups.items()}
        ends = {
            shares: Outbox(route, ("x",), window=1) if rank == 0 else Inbox(route, ("x",))
            for shares, route in routes.items()
        }
        answered, kept = ({shares: list[float]() for shares in ends} for _ in range(2))
        for number in range(2 * rounds):
            for shares, end in ends.items():
                if number < rounds:
                    answered[shares].append(answered_s(end, tensor, number, answers))
                else:
                    kept[shares].append(kept_s(end, tensor, number))
        both: list[list[float]] = [[], []]
        dist.all_gather_object(both, [statistics.median(kept[shares]) * 1e3 for shares in ends])
        if rank == 0:
            tell(size, [min(answered[shares]) * 1e3 for shares in ends], *both)
    dist.destroy_process_group()


def tell(size: int, alone_ms: list[float], sending_ms: list[float], taking_ms: list[float]) -> None:
    columns = [
        f"{name}: answered {alone:6.2f} ms, keeps from computing {sends:5.2f} + {takes:5.2f} ms"
        for name, alone, sends, takes in zip(
            ("socket", "memory"), alone_ms, sending_ms, taking_ms, strict=True
        )
    ]
    print(f"{size:>6} KiB   " + "   ".join(columns), flush=True)


def answered_s(end: Inbox | Outbox, tensor: torch.Tensor, number: int, answers: dist.ProcessGroup) -> float:
    dist.barrier()
    began_s = time.perf_counter()
    if isinstance(end, Outbox):
        end.send(number, tensor.shape, [tensor])
        dist.recv(torch.empty(1), 1, group=answers)
    else:
        end.expect(number, tensor.shape)
        end.take(number)
        dist.send(torch.ones(1), 0, group=answers)
    return time.perf_counter() - began_s


def kept_s(end: Inbox | Outbox, tensor: torch.Tensor, number: int) -> float:
    """Both compute before and after; the receiver long enough for the message to be there."""
    dist.barrier()
    if isinstance(end, Outbox):
        compute(COMPUTE_S)
        took_s = timed(lambda: end.send(number, tensor.shape, [tensor]))
        compute(2 * COMPUTE_S)
        return took_s
    took_s = timed(lambda: end.expect(number, tensor.shape))
    compute(2 * COMPUTE_S)
    return took_s + timed(lambda: end.take(number))


def timed(call: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    call()
    return time.perf_counter() - began_s


def compute(seconds: float) -> None:
    matrix = torch.ones(128, 128)
    until_s = time.perf_counter() + seconds
    while time.perf_counter() < until_s:
        matrix @ matrix


if __name__ == "__main__":
    main()
