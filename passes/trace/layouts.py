"""How tensors lie in memory, where lengths are open: torch notes it while it traces, and asks sizes for it.

mask[:, :T, :T]  of a mask of 32 lies as a whole tensor does where T is 32, and else as a part of one: the
                 answer would leave the length 32 out, or all others
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.fx.experimental._config as torchs


@contextmanager
def layouts_unasked() -> Iterator[None]:
    """Inside, what torch can do without an answer is done for all sizes: for an example of any size as for
    those that it knows nothing of. So torch's own exporter to ONNX has it."""
    with torchs.patch(backed_size_oblivious=True):  # type: ignore[attr-defined]
        yield
