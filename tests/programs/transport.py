"""Run by torchrun on 2 ranks: what links carry through shared memory, and what beside it.

torchrun --nproc-per-node 2 transport.py RESULT.json
"""

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from pd2bw_fx.runtime.channel import TAGS_A_LINK, Inbox, Outbox, Route
from pd2bw_fx.runtime.shared_memory import ranks_in_reach

CPU = torch.device("cpu")
MICROBATCHES = 6
NAMES = ("large", "turned", "small", "absent", "pixels", "later")


def values_of(microbatch: int, rows: int, *, is_sent: bool = False) -> list[Tensor | None]:
    """Two of a mebibyte or more, one of them transposed and of another type; small ones, among them images of
    one pixel, and one that is sent transposed in the first microbatch alone, as which all arrive; none. In
    microbatch 2 most are none, and arrive as zeros."""
    torch.manual_seed(microbatch)
    large = torch.randn(rows, 512, 1024)
    pixels = torch.randn(rows, 3, 1, 1).to(memory_format=torch.channels_last)
    later = torch.randn(5, 4).t()
    if is_sent and microbatch:
        later = later.contiguous()
    small = torch.arange(3) + microbatch
    if microbatch == 2:
        large, small = torch.zeros_like(large), torch.zeros_like(small)
        if is_sent:
            return [None, None, None, None, pixels, later]
    return [large, large.transpose(1, 2).to(torch.bfloat16), small, None, pixels, later]


def send(route: Route) -> None:
    outbox = Outbox(route, NAMES, window=MICROBATCHES)
    for rows in (1, 2):  # the second size has no memory of its own
        for number in range(MICROBATCHES):
            outbox.send(number, rows, values_of(number, rows, is_sent=True))
        dist.barrier()  # nothing is taken before everything is sent: more than there are places
        outbox.settle()


def receive(route: Route) -> dict[str, object]:
    inbox, differing = Inbox(route, NAMES), []
    for rows in (1, 2):
        for number in range(MICROBATCHES):
            inbox.expect(number, rows)
        dist.barrier()
        for number in range(MICROBATCHES):
            pairs = zip(NAMES, inbox.take(number), values_of(number, rows), strict=True)
            differing += [(name, number, rows) for name, found, sent in pairs if not equal(found, sent)]
    return {"differing": differing, "shared": sorted(position for _, position in inbox._shared)}


def send_and_leave(route: Route) -> None:
    outbox = Outbox(route, NAMES, window=MICROBATCHES)
    for number in range(2):
        outbox.send(number, 1, values_of(number, 1, is_sent=True))
    outbox.settle()


def receive_late(route: Route) -> bool:
    """Whether everything arrives of a process that ends as soon as it has settled."""
    inbox, arrived = Inbox(route, NAMES), True
    for number in range(2):
        inbox.expect(number, 1)
    for number in range(2):
        time.sleep(0.5)
        pairs = zip(inbox.take(number), values_of(number, 1), strict=True)
        arrived &= all(equal(found, sent) for found, sent in pairs)
    return arrived


def equal(found: Tensor | None, sent: Tensor | None) -> bool:
    if found is None or sent is None:
        return found is sent
    return found.dtype == sent.dtype and torch.equal(found, sent) and found.stride() == sent.stride()


def main() -> None:
    dist.init_process_group("gloo")
    rank, group = dist.get_rank(), dist.new_group([0, 1])
    reach = ranks_in_reach(group, rank, 2)
    route, last = (
        Route(1 - rank, group, CPU, CPU, number * TAGS_A_LINK, shares_memory=bool(reach))
        for number in range(2)
    )
    if rank == 0:
        send(route)
        send_and_leave(last)
        os._exit(0)
    told = {"reach": sorted(reach), **receive(route), "late": receive_late(last)}
    Path(sys.argv[1]).write_text(json.dumps(told))


if __name__ == "__main__":
    main()
