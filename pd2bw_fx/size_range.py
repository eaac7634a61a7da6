"""The batch sizes that a traced program is right for."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self


@dataclass(frozen=True, slots=True)
class SizeRange:
    """The sizes from `least` to `most`, both included, that are multiples of `multiple_of`.

    Without `most`, there is no upper end. Both ends are multiples themselves.
    """

    least: int = 1
    most: int | None = None
    multiple_of: int = 1

    @classmethod
    def only(cls, size: int) -> Self:
        return cls(size, size)

    @property
    def is_one_size(self) -> bool:
        return self.least == self.most

    @property
    def is_open(self) -> bool:
        """Whether every size is in the range."""
        return self.least <= 1 and self.most is None

    def __contains__(self, size: int) -> bool:
        is_between = self.least <= size and (self.most is None or size <= self.most)
        return is_between and size % self.multiple_of == 0

    def nearest(self, size: int) -> int:
        """Returns this size rounded up to the next one in the range, or the largest one in it."""
        larger = max(size + (-size) % self.multiple_of, self.least)
        return larger if self.most is None else min(larger, self.most)

    def __str__(self) -> str:
        if self.is_one_size:
            return f"{self.least} only"
        if self.multiple_of > 1:
            return f"multiples of {self.multiple_of}" + self._between()
        if self.most is None:
            return f"{self.least} or more"
        return f"{self.most} or fewer" if self.least <= 1 else f"{self.least} to {self.most}"

    def _between(self) -> str:
        """Returns where the multiples begin and end, in words; "" if every multiple is in the range."""
        ends = replace(self, multiple_of=1)
        if self.least > self.multiple_of or self.most is not None:
            return f", {ends}"
        return ""

    def to_json(self) -> list[int | None]:
        return [self.least, self.most, *([self.multiple_of] if self.multiple_of > 1 else [])]


ANY_SIZE = SizeRange()
