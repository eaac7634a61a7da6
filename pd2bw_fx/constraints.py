"""What the user fixes before the planner chooses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Constraints:
    """Wishes that a plan must grant, or be refused.

    A name is an operator's ("linear_3") or a module's path ("blocks.3.attention"), which means all operators
    of that module and of those inside it; `*` in a path stands for one part of it ("blocks.*.attention").

    - `stage_of`: these on this stage;
    - `device_of`: these on the stage that this device (by name or index in the cluster) takes;
    - `together`: all that the names of one entry mean on one stage;
    - `whole`: no cut inside any of these modules; with `*`, each module that matches by itself;
    - `memory_bytes`: at most so much of a device's memory ("12 GiB" or a number), by its name or index.
    """

    stage_of: Mapping[str, int] = field(default_factory=dict)
    device_of: Mapping[str, str | int] = field(default_factory=dict)
    together: tuple[tuple[str, ...], ...] = ()
    whole: tuple[str, ...] = ()
    memory_bytes: Mapping[str | int, int | str] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return any((self.stage_of, self.device_of, self.together, self.whole, self.memory_bytes))
