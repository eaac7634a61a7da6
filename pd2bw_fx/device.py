"""A device: its memory and its speed."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from pd2bw_fx.arguments import made_with_known_options, make_plain
from pd2bw_fx.cluster_file import KINDS, USUAL_RATES, require_few
from pd2bw_fx.errors import ClusterError, shown
from pd2bw_fx.units import parse_bytes


@made_with_known_options
@dataclass(frozen=True, slots=True)
class Device:
    """One accelerator or one CPU process.

    `speed` divides operator times that were measured or estimated for the reference device (1.0 is that
    device). `flops_per_s` and `memory_bytes_per_s` serve the analytic estimate, where nothing can be
    measured; by default they are those of a CPU, or of a GPU where `kind` is "cuda". A device with other
    rates than the first one is estimated by its rates, and not by its speed. In a cluster file, a device that
    states no rates has those of the first; in Python, pass the same rates for both where speed is to count.

    `memory_bytes` may be given as a text such as "8 GiB". Raises ClusterError for a text that is no size.
    """

    name: str
    memory_bytes: int
    kind: str = "cpu"
    speed: float = 1.0
    flops_per_s: float = None  # type: ignore[assignment]  # __post_init__ takes that of its kind
    memory_bytes_per_s: float = None  # type: ignore[assignment]
    host: str = "localhost"

    if TYPE_CHECKING:  # a text becomes a number

        def __init__(
            self,
            name: str,
            memory_bytes: int | str,
            kind: str = "cpu",
            speed: float = 1.0,
            flops_per_s: float | None = None,
            memory_bytes_per_s: float | None = None,
            host: str = "localhost",
        ) -> None: ...

    def __post_init__(self) -> None:
        for key, usual in USUAL_RATES.get(str(self.kind), USUAL_RATES["cpu"]).items():
            if getattr(self, key) is None:
                object.__setattr__(self, key, usual)
        make_plain(self, "memory_bytes", "speed", "flops_per_s", "memory_bytes_per_s")
        given: Any = self.memory_bytes
        if isinstance(given, str):
            try:
                object.__setattr__(self, "memory_bytes", parse_bytes(given))
            except ValueError as error:
                raise ClusterError(f"device {shown(self.name)}: memory_bytes: {error}") from None
        if isinstance(given, float) and given.is_integer():  # 16e9
            object.__setattr__(self, "memory_bytes", int(given))

    def roof_s(self, flops: float, num_bytes: float) -> float:
        """Returns the seconds of the arithmetic or of the memory traffic, whichever are more (the
        roofline).
        """
        return max(flops / self.flops_per_s, num_bytes / self.memory_bytes_per_s)


def checked_devices(devices: Any) -> tuple[Device, ...]:
    """Returns the devices of a cluster in a tuple. Raises ClusterError for what cannot be one."""
    if isinstance(devices, str) or not isinstance(devices, Iterable):
        raise ClusterError(f"devices is {shown(devices)}; a tuple of Device was expected")
    own = tuple(devices)
    for at, device in enumerate(own):
        if not isinstance(device, Device):
            raise ClusterError(f"devices[{at}] is {shown(device)}; a Device was expected")
        _check_device(device)
    if not own:
        raise ClusterError("a cluster needs at least one device")
    require_few(len(own))
    name, count = Counter(device.name for device in own).most_common(1)[0]
    if count > 1:
        raise ClusterError(f"two devices are named {name!r}; give each a name of its own")
    return own


def _check_device(device: Device) -> None:
    for key in ("name", "host"):
        if not isinstance(getattr(device, key), str):
            raise ClusterError(
                f"device {shown(device.name)}: {key} is {shown(getattr(device, key))}; a text was expected"
            )
    if device.kind not in KINDS:
        known = " or ".join(map(repr, KINDS))
        raise ClusterError(f"device {device.name!r}: kind is {shown(device.kind)}; {known} was expected")
    for key in ("memory_bytes", "speed", "flops_per_s", "memory_bytes_per_s"):
        value = getattr(device, key)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
            raise ClusterError(
                f"device {device.name!r}: {key} is {shown(value)}; it must be a number, positive and finite"
            )
    if not isinstance(device.memory_bytes, int):
        raise ClusterError(
            f"device {device.name!r}: memory_bytes is {device.memory_bytes}; it must be a whole number"
        )
