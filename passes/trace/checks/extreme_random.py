"""Python's and numpy's random numbers at their extremes.

A forward that skips a layer with a small probability mostly takes the same branch twice. With the least and
the largest random numbers it does not.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

_NUM_WORDS = 624  # the length of a Mersenne twister's state
_NUM_EXTREME = 200  # two words a number; fewer than all, since rejection samplers draw until they accept one
_LEAST, _LARGEST = 0x00000040, 0x12DD9BB3  # state words whose outputs are 0x40 and all bits set


def calls_by_chance() -> list[AbstractContextManager[None]]:
    """Returns contexts for calls to compare: the least numbers, the largest, and two other seeds."""
    return [
        extreme_numbers(largest=False),
        extreme_numbers(largest=True),
        _seeded(1),
        _seeded(2),
    ]


@contextmanager
def extreme_numbers(*, largest: bool) -> Iterator[None]:
    """Inside, the next hundred `random.random()` and `numpy.random.rand()` are almost 0, or almost 1.

    They are not 0, which would meet a rate of 0 in a comparison by `<=`. Both generators are restored
    afterwards.
    """
    others = random.Random(0)
    words = [_LARGEST if largest else _LEAST] * _NUM_EXTREME
    words += [others.getrandbits(32) for _ in range(_NUM_WORDS - _NUM_EXTREME)]
    with keep_random_numbers():
        random.setstate((3, (*words, 0), None))
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            numpy.random.set_state(("MT19937", words, 0))
        yield


@contextmanager
def _seeded(seed: int) -> Iterator[None]:
    with keep_random_numbers():
        random.seed(seed)
        numpy = sys.modules.get("numpy")
        if numpy is not None:
            numpy.random.seed(seed)
        yield


@contextmanager
def keep_random_numbers() -> Iterator[None]:
    """Restores the states of Python's and numpy's random generators afterwards."""
    numpy = sys.modules.get("numpy")
    state: Any = None if numpy is None else numpy.random.get_state()
    own = random.getstate()
    try:
        yield
    finally:
        random.setstate(own)
        if numpy is not None:
            numpy.random.set_state(state)
