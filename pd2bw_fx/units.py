"""Bytes and seconds, as people write and read them."""

from __future__ import annotations

import math
import re

_UNITS = {
    "": 1, "b": 1,
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?(?:[eE][0-9]+)?)\s*([A-Za-z]*)\s*")


def parse_bytes(text: int | float | str) -> int:
    """Returns a number of bytes from 17179869184, "16 GiB" or "16GB".

    Raises ValueError for anything else, also for a text without a unit.
    """
    expected = 'write e.g. 17179869184, "16 GiB" or "16 GB"'
    if isinstance(text, bool) or not isinstance(text, int | float | str):
        raise ValueError(f"{text!r} is no number of bytes; {expected}")
    if isinstance(text, str):
        match = _SIZE.fullmatch(text)
        if match is None or match[2].lower() not in _UNITS:
            raise ValueError(f"{text!r} is no number of bytes; {expected}")
        if not match[2]:
            raise ValueError(f"{text!r} is a number of bytes without a unit; {expected}")
        number = float(match[1]) * _UNITS[match[2].lower()]
    else:
        number = text
    if not math.isfinite(number):
        raise ValueError(f"{text!r} is no finite number of bytes; {expected}")
    if not isinstance(text, str) and number != int(number):
        raise ValueError(f"{text!r} is no whole number of bytes; {expected}")
    return int(number)


def counted(number: int, noun: str) -> str:
    """ "1 block", "2 blocks", "3 microbatches", "4 entries"."""
    if number == 1:
        return f"1 {noun}"
    if noun.endswith("y") and noun[-2] not in "aeiou":
        return f"{number} {noun[:-1]}ies"
    return f"{number} {noun}{'es' if noun.endswith(('ch', 's', 'x')) else 's'}"


def are(number: int) -> str:
    """Returns the verb after a counted noun: "1 block is", "2 blocks are"."""
    return "is" if number == 1 else "are"


def were(number: int) -> str:
    """ "1 block was", "2 blocks were"."""
    return "was" if number == 1 else "were"


def format_bytes(num_bytes: float) -> str:
    """Returns three digits and a binary unit: "1.5 GiB"."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(num_bytes) < 999.5 or unit == "TiB":  # a fourth digit would be written as a power of ten
            break
        num_bytes /= 1024
    return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.3g} {unit}"


def format_seconds(seconds: float) -> str:
    """Returns three digits and a unit that fits: "12.3 ms". Less than a picosecond is rounding: "0 s"."""
    if abs(seconds) >= 999.5:
        return f"{seconds:.0f} s"
    for scale, unit in ((1.0, "s"), (1e-3, "ms"), (1e-6, "us")):
        if abs(seconds) >= 0.9995 * scale:
            return f"{seconds / scale:.3g} {unit}"
    return "0 s" if abs(seconds) < 1e-12 else f"{seconds / 1e-6:.3g} us"
