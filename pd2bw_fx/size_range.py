"""The batch sizes that a traced program is right for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self


@dataclass(frozen=True, slots=True)
class SizeRange:
    """From `least` to `most` samples, both included; without `most`, any number from `least` on."""

    least: int = 1
    most: int | None = None

    @classmethod
    def only(cls, size: int) -> Self:
        return cls(size, size)

    @property
    def is_one_size(self) -> bool:
        return self.least == self.most

    @property
    def is_open(self) -> bool:
        """Whether every size is right."""
        return self.least <= 1 and self.most is None

    def __contains__(self, size: int) -> bool:
        return self.least <= size and (self.most is None or size <= self.most)

    def __str__(self) -> str:
        if self.is_one_size:
            return f"{self.least} only"
        if self.most is None:
            return f"{self.least} or more"
        return f"{self.most} or fewer" if self.least <= 1 else f"{self.least} to {self.most}"

    def to_json(self) -> list[int | None]:
        return [self.least, self.most]


ANY_SIZE = SizeRange()
