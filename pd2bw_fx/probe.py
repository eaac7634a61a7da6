"""`pd2bw-fx probe`: measures the devices and links of a job, with one process a device.

A link is timed by sending n bytes from a to b, which answers with a few: that takes latency(a, b) +
latency(b, a) + n / bandwidth(a, b). A line is fitted through several n, each point weighted by its own time.
Clocks of two machines are not compared, so the two latencies of a pair are taken as equal.

All that is compared is measured in turns, again and again, and the lower quartile counts: other programs on
the machine only make a sample longer, and for a while at a time.
"""

from __future__ import annotations

import itertools
import math
import os
import socket
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from pd2bw_fx.cluster import Cluster
from pd2bw_fx.device import Device
from pd2bw_fx.errors import ClusterError, InputError
from pd2bw_fx.machine import machine_memory_bytes
from pd2bw_fx.runtime.failure import name_peer_in_errors
from pd2bw_fx.runtime.groups import Groups

SIZES = (2**10, 2**14, 2**17, 2**19, 2**21, 2**23)
_ROUNDS = 20
_TIMEOUT_S = 600.0
_MORE_TRIES = 10
_LEAST_SHARE = 0.1  # the least time of the largest message's bytes, as a share of the latencies
_ENOUGH_S = 1.5  # to measure one device
_MEMORY_STEP = 2**26  # memory is rounded down to this: devices of one make differ by what drivers keep


@dataclass(frozen=True, slots=True)
class _Seen:
    """What one rank has measured of its own device; `step_s` is one training step of a fixed small layer.

    `machine` is torchrun's number of the machine: two machines may have one name.
    """

    device: Device
    step_s: float
    machine: int = 0


@dataclass(frozen=True, slots=True)
class _ProbeTransport:
    """How tensors go between ranks, as in training: on the device, or through the host's memory."""

    group: dist.ProcessGroup
    device: torch.device
    wire: torch.device

    def send(self, tensor: Tensor, other: int) -> None:
        dist.send(tensor.to(self.wire), other, group=self.group)

    def receive(self, tensor: Tensor, other: int) -> None:
        there = tensor if tensor.device == self.wire else torch.empty_like(tensor, device=self.wire)
        dist.recv(there, other, group=self.group)
        tensor.copy_(there)


def probe(kind: str, *, tolerance: float = 0.1) -> Cluster:
    """Returns the cluster of all ranks, rank r's device as the r-th; every rank calls it, with one result.

    All devices compute at the same time, as they do in training, and links are timed one after another.
    Speeds are relative to rank 0's, where operators are measured. Figures that differ by less than
    `tolerance` are replaced by their median: devices that are alike should look alike to the planner. 0 keeps
    what was measured.

    Raises InputError for a rank without a device of that kind, ClusterError for a link whose times fit no
    line.
    """
    if not 0 <= tolerance < 1:
        raise InputError(f"tolerance is {tolerance}; a share from 0 to below 1 was expected")
    device = _own_device(kind)
    with name_peer_in_errors(None):
        dist.barrier()
    own = _seen(device)
    seen = [own] * dist.get_world_size()
    with name_peer_in_errors(None):
        dist.all_gather_object(seen, own)
        groups = Groups(dist.get_world_size(), _TIMEOUT_S, device=device)
        links = _fitted_links(_ProbeTransport(groups.of_all(), device, groups.wire), SIZES)
        groups.close()
    return _cluster(seen, links, tolerance)


def _own_device(kind: str) -> torch.device:
    if kind == "cpu":
        return torch.device("cpu")
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    if local_rank >= torch.cuda.device_count():
        raise InputError(
            f"process {local_rank} of {socket.gethostname()} has no GPU of its own: there are "
            f"{torch.cuda.device_count()}; start one process for each, or probe with --device cpu"
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def _seen(device: torch.device) -> _Seen:
    side, count = (4096, 2**26) if device.type == "cuda" else (512, 2**22)
    a, b = torch.rand(side, side, device=device), torch.rand(side, side, device=device)
    source, target = torch.rand(count, device=device), torch.empty(count, device=device)
    product_s, copy_s, step_s = _in_turns(
        (lambda: torch.mm(a, b), lambda: target.copy_(source), _training_step(device)), device
    )
    if device.type == "cuda":
        memory_bytes = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
    else:
        memory_bytes = machine_memory_bytes() // int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    described = Device(
        f"{device.type}:{os.environ.get('LOCAL_RANK', '0')}",
        memory_bytes=memory_bytes - memory_bytes % _MEMORY_STEP,
        kind=device.type,
        flops_per_s=2 * side**3 / product_s,
        memory_bytes_per_s=2 * source.nbytes / copy_s,
        host=socket.gethostname(),
    )
    return _Seen(described, step_s, int(os.environ.get("GROUP_RANK", "0")))


def _training_step(device: torch.device) -> Callable[[], object]:
    """Returns a forward and backward of two matrix products and what is between them in a transformer."""
    rows, width = (4096, 2048) if device.type == "cuda" else (256, 256)
    layers = nn.Sequential(
        nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
    ).to(device)
    x = torch.rand(rows, width, device=device, requires_grad=True)
    seed = torch.ones_like(x)
    wanted = (x, *layers.parameters())
    return lambda: torch.autograd.grad(layers(x), wanted, seed)


def _in_turns(runs: Sequence[Callable[[], object]], device: torch.device) -> list[float]:
    """Returns the seconds of each run."""
    samples: list[list[float]] = [[] for _ in runs]
    began_s = time.perf_counter()
    while len(samples[0]) <= _ROUNDS or time.perf_counter() - began_s < _ENOUGH_S:
        for run, own in zip(runs, samples, strict=True):
            _wait(device)
            began = time.perf_counter()
            run()
            _wait(device)
            own.append(time.perf_counter() - began)
    return [_lower_quartile(own[1:]) for own in samples]  # the first ones meet cold allocators


def _lower_quartile(samples: Sequence[float]) -> float:
    return statistics.quantiles(samples, n=4)[0]


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _fitted_links(
    transport: _ProbeTransport, sizes: Sequence[int]
) -> dict[tuple[int, int], tuple[float, float]]:
    """Returns the latency and bandwidth of each link.

    Where the times of one fit no line, all links are timed again, and the shortest of all times count: on a
    machine where something else computes on every core, most messages wait for a turn of the scheduler, which
    is as long for few bytes as for many. Every rank has the times of all, so that all do the same.
    """
    seconds = _links(transport, sizes, _lower_quartile)
    for _ in range(_MORE_TRIES):
        try:
            return {pair: _fitted(pair, sizes, points) for pair, points in seconds.items()}
        except ClusterError:
            again = _links(transport, sizes, min)
            seconds = {pair: list(map(min, points, again[pair])) for pair, points in seconds.items()}
    return {pair: _fitted(pair, sizes, points) for pair, points in seconds.items()}


def _links(
    transport: _ProbeTransport, sizes: Sequence[int], summary: Callable[[Sequence[float]], float]
) -> dict[tuple[int, int], list[float]]:
    """Returns the seconds for each size there and a few bytes back, by (sender, receiver), summarized."""
    rank, count = dist.get_rank(), dist.get_world_size()
    buffers = [torch.zeros(num_bytes, dtype=torch.uint8, device=transport.device) for num_bytes in sizes]
    own: dict[tuple[int, int], list[float]] = {}
    for first, second in itertools.combinations(range(count), 2):
        if rank in (first, second):
            other = second if rank == first else first
            samples = _to_and_fro(transport, buffers, other, goes_first=rank == first)
            own[rank, other] = [summary(each[2:]) for each in samples]  # the first ones open the connection
        dist.barrier()
    gathered = [own] * count
    dist.all_gather_object(gathered, own)
    return {pair: seconds for part in gathered for pair, seconds in part.items()}


def _to_and_fro(
    transport: _ProbeTransport, buffers: Sequence[Tensor], other: int, *, goes_first: bool
) -> list[list[float]]:
    """Returns the seconds of each buffer to the other rank, many times; the two directions take turns."""
    answer = torch.zeros(8, dtype=torch.uint8, device=transport.device)
    samples: list[list[float]] = [[] for _ in buffers]
    for sends in (goes_first, not goes_first) * _ROUNDS:
        for buffer, own in zip(buffers, samples, strict=True):
            if sends:
                _wait(buffer.device)
                began = time.perf_counter()
                transport.send(buffer, other)
                transport.receive(answer, other)
                _wait(buffer.device)
                own.append(time.perf_counter() - began)
            else:
                transport.receive(buffer, other)
                transport.send(answer, other)
    return samples


def fitted_link(sizes: Sequence[int], seconds: Sequence[float]) -> tuple[float, float]:
    """Fits (latency_s, bytes_per_s) to seconds = 2 latency + size / bandwidth, in relative errors' squares.

    Raises ClusterError where larger messages do not take longer, or so little longer that it may be noise.
    """
    n, t = np.array(sizes, dtype=float), np.array(seconds)
    both_s, per_byte_s = np.linalg.lstsq(np.stack([1 / t, n / t], axis=1), np.ones(len(t)), rcond=None)[0]
    if both_s < 0:
        both_s, per_byte_s = 0.0, (n / t).sum() / ((n / t) ** 2).sum()
    if per_byte_s * n[-1] <= _LEAST_SHARE * both_s:
        raise ClusterError(
            f"{sizes[-1]} bytes took {seconds[-1]:.2g} s and {sizes[0]} bytes {seconds[0]:.2g} s, so there "
            "is no bandwidth in it; probe again while nothing else runs"
        )
    return float(both_s / 2), float(1 / per_byte_s)


def _fitted(pair: tuple[int, int], sizes: Sequence[int], seconds: Sequence[float]) -> tuple[float, float]:
    try:
        return fitted_link(sizes, seconds)
    except ClusterError as error:
        raise ClusterError(f"link from rank {pair[0]} to rank {pair[1]}: {error}") from None


def _cluster(
    seen: Sequence[_Seen], links: dict[tuple[int, int], tuple[float, float]], tolerance: float
) -> Cluster:
    pairs, ranks = sorted(links), range(len(seen))
    latencies = dict(zip(pairs, levelled([links[pair][0] for pair in pairs], tolerance), strict=True))
    rates = dict(zip(pairs, levelled([links[pair][1] for pair in pairs], tolerance), strict=True))
    return Cluster(
        tuple(_devices(seen, tolerance)),
        tuple(tuple(rates.get((a, b), 0.0) for b in ranks) for a in ranks),
        tuple(tuple(latencies.get((a, b), 0.0) for b in ranks) for a in ranks),
    )


def _devices(seen: Sequence[_Seen], tolerance: float) -> list[Device]:
    devices = [replace(each.device, host=host) for each, host in zip(seen, _hosts(seen), strict=True)]
    step_s = levelled([each.step_s for each in seen], tolerance)
    flops = levelled([device.flops_per_s for device in devices], tolerance)
    traffic = levelled([device.memory_bytes_per_s for device in devices], tolerance)
    are_together = len({device.host for device in devices}) == 1
    return [
        replace(
            device,
            name=device.name if are_together else f"{device.name}@{device.host}",
            speed=_three_digits(step_s[0] / step_s[rank]),
            flops_per_s=flops[rank],
            memory_bytes_per_s=traffic[rank],
        )
        for rank, device in enumerate(devices)
    ]


def _hosts(seen: Sequence[_Seen]) -> list[str]:
    """Returns the names of the machines, with their numbers where several have the same name."""
    machines = {(each.device.host, each.machine) for each in seen}
    shared = Counter(host for host, _ in machines)
    return [
        f"{each.device.host}-{each.machine}" if shared[each.device.host] > 1 else each.device.host
        for each in seen
    ]


def levelled(values: Sequence[float], tolerance: float) -> list[float]:
    """Returns each value as the median of those near it, to three digits.

    From the smallest up, values within `tolerance` of a group's first one belong to that group.
    """
    groups: list[list[int]] = []
    for at in sorted(range(len(values)), key=values.__getitem__):
        if groups and values[at] <= values[groups[-1][0]] * (1 + tolerance):
            groups[-1].append(at)
        else:
            groups.append([at])
    written = list(values)
    for group in groups:
        middle = _three_digits(statistics.median(values[at] for at in group))
        for at in group:
            written[at] = middle
    return written


def _three_digits(value: float) -> float:
    return float(f"{value:.3g}") if math.isfinite(value) else value
