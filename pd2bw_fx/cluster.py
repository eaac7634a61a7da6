"""The cluster: devices with their memory and speed, and what a transfer between any two of them costs."""

from __future__ import annotations

import json
import math
import os
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from pd2bw_fx.arguments import plain
from pd2bw_fx.cluster_file import parts_of, require_few
from pd2bw_fx.device import Device, checked_devices
from pd2bw_fx.errors import ClusterError, shown
from pd2bw_fx.machine import cores_each, gpu_memory_bytes, machine_memory_bytes, num_gpus, num_threads
from pd2bw_fx.units import counted, parse_bytes

# What a gloo pair on one host does; measured links come from a cluster file.
LOCAL_BYTES_PER_S = 2e9
LOCAL_LATENCY_S = 100e-6


@dataclass(frozen=True, slots=True)
class Cluster:
    """Devices and the link-cost matrix.

    Sending n bytes from a to b takes latency_s[a][b] + n / bytes_per_s[a][b] seconds.
    """

    devices: tuple[Device, ...]
    bytes_per_s: tuple[tuple[float, ...], ...]
    latency_s: tuple[tuple[float, ...], ...]

    if TYPE_CHECKING:  # lists do as well, and become tuples

        def __init__(
            self,
            devices: Sequence[Device],
            bytes_per_s: Sequence[Sequence[float]],
            latency_s: Sequence[Sequence[float]],
        ) -> None: ...

    def __post_init__(self) -> None:
        object.__setattr__(self, "devices", checked_devices(self.devices))
        for key in ("bytes_per_s", "latency_s"):
            object.__setattr__(self, key, _rows(key, getattr(self, key)))
        _check_matrix("bytes_per_s", self.bytes_per_s, self.devices, zero_allowed=False)
        _check_matrix("latency_s", self.latency_s, self.devices, zero_allowed=True)

    def __len__(self) -> int:
        return len(self.devices)

    def transfer_s(self, source: int, target: int, num_bytes: int) -> float:
        """Returns the seconds to send so many bytes between two devices, by index; 0 within one device."""
        self._require_devices(source, target)
        if num_bytes < 0:
            raise ClusterError(f"a message of {num_bytes} bytes; zero or more were expected")
        if source == target:
            return 0.0
        return self.latency_s[source][target] + num_bytes / self.bytes_per_s[source][target]

    @property
    def threads_each(self) -> int:
        """The threads of a process that drives the first device.

        They are this machine's cores divided by the number of CPU devices on that device's host.
        """
        first = self.devices[0]
        beside = [device for device in self.devices if (device.kind, device.host) == ("cpu", first.host)]
        return min(num_threads(), cores_each(max(1, len(beside))))

    @property
    def is_uniform(self) -> bool:
        """Whether all devices are alike but for their names, and all links are alike."""
        unnamed = {replace(device, name="", host="") for device in self.devices}
        links = set[tuple[float, float]]()
        for a, rows in enumerate(zip(self.bytes_per_s, self.latency_s, strict=True)):
            links.update(zip(*(_others(row, a) for row in rows), strict=True))
        return len(unnamed) <= 1 and len(links) <= 1

    @classmethod
    def uniform(
        cls,
        num_devices: int,
        *,
        memory_bytes: int | str | None = None,
        bytes_per_s: float = LOCAL_BYTES_PER_S,
        latency_s: float = LOCAL_LATENCY_S,
        kind: str = "cpu",
        speed: float = 1.0,
    ) -> Self:
        """Returns equal devices on equal links.

        Each has `memory_bytes`, or an equal share of this machine's memory.
        """
        num_devices = plain(num_devices)
        if isinstance(num_devices, bool) or not isinstance(num_devices, int):
            raise ClusterError(f"num_devices is {shown(num_devices)}; a whole number was expected")
        if num_devices < 1:
            raise ClusterError(f"a cluster of {num_devices} devices was asked for; it needs at least one")
        require_few(num_devices)
        try:
            share = machine_memory_bytes() // num_devices
            share = share if memory_bytes is None else parse_bytes(plain(memory_bytes))
        except ValueError as error:
            raise ClusterError(f"memory_bytes: {error}") from None
        devices = tuple(
            Device(f"{kind}:{index}", memory_bytes=share, kind=kind, speed=speed)
            for index in range(num_devices)
        )
        return cls(devices, _constant(num_devices, bytes_per_s), _constant(num_devices, latency_s))

    @classmethod
    def local(cls) -> Self:
        """Returns this machine's CUDA devices, or two CPU processes (four on 8 cores or more)."""
        count = num_gpus()
        if count == 0:
            return cls.uniform(4 if (os.cpu_count() or 2) >= 8 else 2)
        devices = tuple(
            Device(f"cuda:{index}", gpu_memory_bytes(index), kind="cuda") for index in range(count)
        )
        return cls(devices, _constant(count, 25e9), _constant(count, 10e-6))

    @classmethod
    def of(cls, description: Cluster | int | str | Path | None) -> Cluster:
        """Returns a cluster from what `split(cluster=...)` takes: a count, a Cluster, a TOML file, or
        nothing.
        """
        if description is None:
            return cls.local()
        if isinstance(description, Cluster):
            return description
        description = plain(description)
        if isinstance(description, bool) or not isinstance(description, int | str | Path):
            raise ClusterError(
                f"cluster is {shown(description)}; "
                "give a number of devices, a Cluster, or the path of a TOML file"
            )
        if isinstance(description, int):
            local = num_gpus()
            if 0 < description <= local:
                return cls.local().only(range(description))
            return cls.uniform(description)
        if isinstance(description, str) and description.isdigit():
            raise ClusterError(
                f"cluster={description!r} is a text; for {description} devices give the number"
            )
        return cls.from_toml(description)

    def only(self, devices: Sequence[int]) -> Self:
        """Returns the cluster of only these devices, in this order."""
        if not isinstance(devices, Iterable):
            raise ClusterError(
                f"devices is {shown(devices)}; a sequence of indices was expected, such as (0,)"
            )
        chosen = tuple(devices)
        self._require_devices(*chosen)
        return replace(
            self,
            devices=tuple(self.devices[d] for d in chosen),
            bytes_per_s=tuple(tuple(map(self.bytes_per_s[d].__getitem__, chosen)) for d in chosen),
            latency_s=tuple(tuple(map(self.latency_s[d].__getitem__, chosen)) for d in chosen),
        )

    def _require_devices(self, *indices: Any) -> None:
        for index in indices:
            if type(plain(index)) is not int or not 0 <= index < len(self.devices):
                raise ClusterError(
                    f"there is no device {shown(index)}; this cluster has 0 to {len(self.devices) - 1}"
                )

    @classmethod
    def from_toml(cls, path: str | Path) -> Self:
        """Reads a cluster file.

        It has either `[[device]]` tables with full matrices `bytes_per_s` and `latency_s` at the top (rows
        send, columns receive), or `[[node]]` groups of equal devices, each with its links `inside`, and one
        table `[between]` for the links of different nodes. A link that differs in its two directions is
        refused as a mistake unless the file says `asymmetric = true`.

        Raises ClusterError naming the file and the entry that is missing, negative or contradictory.
        """
        path = Path(path)
        try:
            data = tomllib.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise ClusterError(f"cluster file {path} cannot be read: {error.strerror}") from error
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise ClusterError(f"cluster file {path} is no valid TOML: {error}") from error
        try:
            parts = parts_of(data)
            cluster = cls(
                tuple(Device(**given) for given in parts.devices), parts.bytes_per_s, parts.latency_s
            )
            if not parts.asymmetric:
                cluster._check_symmetric()
        except ClusterError as error:
            raise ClusterError(f"cluster file {path}: {error}") from None
        return cluster

    def _check_symmetric(self) -> None:
        if self._is_symmetric():
            return
        for key, matrix in (("bytes_per_s", self.bytes_per_s), ("latency_s", self.latency_s)):
            for a in range(len(self)):
                for b in range(a):
                    if matrix[a][b] != matrix[b][a]:
                        raise ClusterError(
                            f"{key}[{a}][{b}] is {matrix[a][b]:g} but {key}[{b}][{a}] is {matrix[b][a]:g}; "
                            "if the two directions really differ, say asymmetric = true"
                        )

    def to_toml(self) -> str:
        """Returns a cluster file with full matrices, from which `from_toml` reads an equal cluster."""
        lines = [f"asymmetric = {'false' if self._is_symmetric() else 'true'}  # rows send, columns receive"]
        for key, matrix in (("bytes_per_s", self.bytes_per_s), ("latency_s", self.latency_s)):
            rows = [f"    [{', '.join(f'{entry!r}' for entry in row)}]," for row in matrix]
            lines += [f"{key} = [", *rows, "]"]
        for device in self.devices:
            entries = asdict(device)
            entries["memory"] = entries.pop("memory_bytes")
            lines += ["", "[[device]]"]
            lines += [f"{key} = {_in_toml(value)}" for key, value in entries.items()]
        return "\n".join(lines) + "\n"

    def _is_symmetric(self) -> bool:
        return all(
            _others(row, at) == _others(column, at)
            for matrix in (self.bytes_per_s, self.latency_s)
            for at, (row, column) in enumerate(zip(matrix, zip(*matrix, strict=True), strict=True))
        )

    def to_json(self) -> dict[str, Any]:
        """What JSON can hold, for `from_json`."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """What `to_json` gave.

        Raises ClusterError for devices or links that cannot be, KeyError where an entry is missing.
        """
        return cls(
            tuple(Device(**device) for device in data["devices"]),
            tuple(tuple(row) for row in data["bytes_per_s"]),
            tuple(tuple(row) for row in data["latency_s"]),
        )


def _constant(size: int, value: float) -> tuple[tuple[float, ...], ...]:
    return tuple((value,) * a + (0.0,) + (value,) * (size - a - 1) for a in range(size))


def _in_toml(value: str | float) -> str:
    """Returns a string as JSON has it, with TOML's escape of eight digits for JSON's two of four."""
    text = json.dumps(value, ensure_ascii=False)
    return "".join(sign if " " <= sign <= "~" else f"\\U{ord(sign):08x}" for sign in text)


def _others(row: tuple[float, ...], at: int) -> tuple[float, ...]:
    return row[:at] + row[at + 1 :]


def _rows(key: str, matrix: Any) -> tuple[tuple[float, ...], ...]:
    """Returns the matrix in tuples and in Python's own numbers."""
    if not _is_list(matrix) or not all(_is_list(row) for row in matrix):
        raise ClusterError(
            f"{key} is {shown(matrix)}; a matrix was expected, with one row a sending device "
            "(Cluster.uniform makes one of equal links)"
        )
    return tuple(
        row if isinstance(row, tuple) and _are_numbers(row) else tuple(map(plain, row)) for row in matrix
    )


def _is_list(value: Any) -> bool:
    return isinstance(value, Iterable) and not isinstance(value, str)


def _check_matrix(
    key: str, matrix: tuple[tuple[float, ...], ...], devices: Sequence[Device], *, zero_allowed: bool
) -> None:
    size = len(devices)
    if len(matrix) != size:
        raise ClusterError(
            f"{key} has {counted(len(matrix), 'row')} for {counted(size, 'device')}; it needs one row a "
            "device"
        )
    for a, row in enumerate(matrix):
        if len(row) != size:
            raise ClusterError(f"{key}[{a}] has {counted(len(row), 'entry')} for {counted(size, 'device')}")
        # In a large cluster most links are alike, and a check of each would take long.
        if _are_numbers(row) and all(_is_link(value, zero_allowed) for value in {*_others(row, a)}):
            continue
        for b, value in enumerate(row):
            if a != b and not _is_link(value, zero_allowed):
                bound = "zero or more" if zero_allowed else "more than zero"
                raise ClusterError(
                    f"{key}[{a}][{b}] ({devices[a].name} -> {devices[b].name}) is "
                    f"{format(value, 'g') if _are_numbers((value,)) else shown(value)}; "
                    f"it must be {bound} and finite"
                )


def _are_numbers(row: Sequence[Any]) -> bool:
    return {*map(type, row)} <= {int, float}


def _is_link(value: Any, zero_allowed: bool) -> bool:
    return _are_numbers((value,)) and 0 <= value < math.inf and (zero_allowed or value > 0)
