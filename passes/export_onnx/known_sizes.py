"""Sizes that are numbers of their own in torch's first trace of a stage, and sums of others in its second.

    x[: a + b].split([a, b])        a and b are values

When the slice is traced first, its length is a number of its own, and the split finds it to be a + b. When
the exporter traces the graph again, it is a + b at once. torch would raise an AssertionError there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import fx
from torch.fx.experimental import symbolic_shapes
from torch.utils import _pytree as pytree


@contextmanager
def sizes_may_be_known() -> Iterator[None]:
    bind_again = symbolic_shapes.rebind_unbacked

    def bind_unknown(shapes: Any, node: fx.Node, result: Any) -> None:
        bound = node.meta.get("unbacked_bindings")
        if node.op != "placeholder" and bound:
            node.meta["unbacked_bindings"] = {
                symbol: path for symbol, path in bound.items() if not _is_known(pytree.key_get(result, path))
            }
        bind_again(shapes, node, result)

    with patch.object(symbolic_shapes, "rebind_unbacked", bind_unknown):
        yield


def _is_known(size: object) -> bool:
    return isinstance(size, torch.SymInt) and size.node._expr.is_Add
