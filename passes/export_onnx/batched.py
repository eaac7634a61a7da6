"""Finds the batch axis of inputs and outputs from the names of sizes in a folder's manifest."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from pd2bw_fx.errors import InputError

_SHORT = frozenset({"b", "bs", "n"})  # names that other tools than torch use
_UNNAMED = "_axis_0"  # so ends what a first axis is called that has no name in the file
_OTHER = re.compile(r"time|seq|len|frame|step|token|word", re.IGNORECASE)


def batch_symbol(manifest: Mapping[str, Any]) -> str | None:
    """Returns the symbol of the batch size, or None where it cannot be told.

    It is the one that is called so, or else the one of all inputs' first axes.
    """
    shapes = [entry["shape"] for entry in manifest["inputs"] if entry["shape"]]
    sizes = dict.fromkeys(size for shape in shapes for size in shape if isinstance(size, str))
    names = [size for size in sizes if size.isidentifier()]
    called = [name for name in names if "batch" in name.lower()]
    called = called or [name for name in names if name.lower() in _SHORT]
    if called:
        return called[0] if len(called) == 1 else None
    firsts = list(dict.fromkeys(shape[0] for shape in shapes if isinstance(shape[0], str)))
    if len(firsts) != 1:
        return None
    is_named = not firsts[0].endswith(_UNNAMED)
    if len(sizes) > 1 and is_named and _OTHER.search(firsts[0]):
        return None
    return firsts[0]


def batch_place(entry: Mapping[str, Any], symbol: str) -> int | None:
    """Returns the batch axis of a tensor, or None where it has none.

    Raises InputError where the batch's size is that of several axes, as in a matrix of samples by samples,
    or where the tensor's axes are not known.
    """
    if entry["shape"] is None:
        raise InputError(
            f"{entry['name']!r} has no fixed number of axes, so it cannot be told along which its samples "
            "stand; run with num_microbatches=1"
        )
    following = [
        axis
        for axis, size in enumerate(entry["shape"])
        if size == symbol or re.search(rf"\b{re.escape(symbol)}\b", str(size))
    ]
    if not following:
        return None
    if len(following) > 1 or entry["shape"][following[0]] != symbol:
        sizes = ", ".join(map(str, entry["shape"]))
        raise InputError(
            f"{entry['name']!r} has the shape ({sizes}), so it cannot be made of microbatches; run with "
            "num_microbatches=1"
        )
    return following[0]
