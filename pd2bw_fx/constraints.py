"""Constraints on a plan that the user sets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

from pd2bw_fx.arguments import made_with_known_options, plain, require_kind
from pd2bw_fx.errors import InputError, shown


@made_with_known_options
@dataclass(frozen=True, slots=True)
class Constraints:
    """Constraints that a plan satisfies, or is refused.

    A name is an operator's ("linear_3") or a module's path ("blocks.3.attention"), which means all operators
    of that module and of those inside it; `*` in a path stands for one part of it ("blocks.*.attention").

    - `stage_of`: these are on this stage;
    - `device_of`: these are on the stage that is on this device (by name or index in the cluster), or on one
      of a tuple of devices; where a device has several stages, on any of them;
    - `together`: everything that the names of one entry mean is on one stage;
    - `whole`: no cut is inside any of these modules; with `*`, inside each module that matches;
    - `memory_bytes`: the plan uses at most so much of a device's memory ("12 GiB" or a number), by its name
      or index.
    """

    stage_of: Mapping[str, int] = field(default_factory=dict)
    device_of: Mapping[str, str | int | Sequence[str | int]] = field(default_factory=dict)
    together: tuple[tuple[str, ...], ...] = ()
    whole: tuple[str, ...] = ()
    memory_bytes: Mapping[str | int, int | str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in _MAPPINGS:
            given = getattr(self, name)
            require_kind(name, given, Mapping, "a mapping of names")
            object.__setattr__(self, name, {key: plain(value) for key, value in given.items()})
        for name in ("together", "whole"):
            value = getattr(self, name)
            if isinstance(value, str) or not isinstance(value, Sequence):
                raise InputError(f"{name} is {shown(value)}; a tuple was expected, such as ({shown(value)},)")
        for names in (self.whole, *self.together):
            wrong = [name for name in names if not isinstance(name, str)]
            if wrong:
                raise InputError(
                    f"{wrong[0]!r} among together or whole; the name of an operator or a module was expected"
                )
        for name, devices in self.device_of.items():
            if isinstance(devices, tuple | list) and not devices:
                raise InputError(
                    f"device_of[{name!r}] names no device; one or more of the cluster's were expected: leave "
                    "it out where any will do"
                )
        for device, limit in self.memory_bytes.items():
            if isinstance(limit, bool) or not isinstance(limit, int | float | str):
                raise InputError(
                    f"memory_bytes[{device!r}] is {shown(limit)}; a number of bytes or a text such as "
                    "'12 GiB' was expected"
                )

    def __bool__(self) -> bool:
        return any((self.stage_of, self.device_of, self.together, self.whole, self.memory_bytes))

    def to_json(self) -> dict[str, Any]:
        """Returns mappings as lists of pairs: JSON would turn numbers that are keys into strings."""
        return {name: [list(pair) for pair in getattr(self, name).items()] for name in _MAPPINGS} | {
            "together": [list(names) for names in self.together],
            "whole": list(self.whole),
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """What `to_json` gave. Raises InputError as the constructor does, KeyError for a missing entry."""
        together = tuple(tuple(names) for names in data["together"])
        mappings = {name: dict(data[name]) for name in _MAPPINGS}
        return cls(together=together, whole=tuple(data["whole"]), **mappings)


_MAPPINGS = ("stage_of", "device_of", "memory_bytes")
