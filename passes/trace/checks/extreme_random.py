"""Python's and numpy's random numbers at their extremes.

A forward that leaves a layer out with a small probability mostly goes the same way twice. With the least and
the largest numbers that there are it does not.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

_NUM_WORDS = 624  # of a Mersenne twister's state
_NUM_EXTREME = 200  # two words a number; fewer than all, for samplers draw until a number pleases them
_LEAST, _LARGEST = 0x00000040, 0x12DD9BB3  # words that are given out as 0x40 and as all bits


def calls_by_chance() -> list[AbstractContextManager[None]]:
    """To be called in, one after another, and compared: the least numbers, the largest, and two of any."""
    return [
        extreme_numbers(largest=False),
        extreme_numbers(largest=True),
        _seeded(1),
        _seeded(2),
    ]


@contextmanager
def extreme_numbers(*, largest: bool) -> Iterator[None]:
    """Inside, the next hundred `random.random()` and `numpy.random.rand()` are almost 0, or almost 1.

    Not 0, for a rate of 0 is never met, whether it is asked for by < or by <=. Both generators are as before
    afterwards.
    """
    others = random.Random(0)
    words = [_LARGEST if largest else _LEAST] * _NUM_EXTREME
    words += [others.getrandbits(32) for _ in range(_NUM_WORDS - _NUM_EXTREME)]
    with random_numbers_kept():
        random.setstate((3, (*words, 0), None))
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            numpy.random.set_state(("MT19937", words, 0))
        yield


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    with random_numbers_kept():
        random.seed(seed)
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            numpy.random.seed(seed)
        yield


@contextmanager
def random_numbers_kept() -> Iterator[None]:
    numpy = sys.modules.get("numpy")
    state: Any = None if numpy is None else numpy.random.get_state()
    own = random.getstate()
    try:
        yield
    finally:
        random.setstate(own)
        if numpy is not None:
            numpy.random.set_state(state)
