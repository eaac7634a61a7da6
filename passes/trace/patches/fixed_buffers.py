"""Whole numbers that a layer keeps as buffers outside of its saved state, as the convolutions of EnCodec do.

self.register_buffer("stride", torch.tensor(2), persistent=False)
frames = x.shape[-1] // int(self.stride)      a size, for which Python needs the number

No state dict has such a number. If the forward does not change it either, it is like a plain attribute:
stages keep what it is when the model is split.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

from torch import Tensor, nn

from pd2bw_fx.passes.trace.eager_run import holds_data, keep_program, keep_state
from pd2bw_fx.passes.trace.program import Program


@contextmanager
def take_fixed_buffers_for_constants(program: Program) -> Iterator[None]:
    """Makes such buffers plain attributes, whose values a trace knows, where no call writes them."""
    held = [(module, dict(module._buffers)) for module in program.modules()]
    fixed = _fixed(program)
    try:
        for module, name in fixed:
            vars(module)[name] = module._buffers.pop(name)
        yield
    finally:
        for module, name in fixed:
            del vars(module)[name]
        for module, buffers in held if fixed else ():
            module._buffers = buffers  # in their order


def _fixed(program: Program) -> list[tuple[nn.Module, str]]:
    """Returns the modules and names of the buffers that the model's call on the example does not write."""
    found = [
        (module, name, buffer)
        for module in program.modules()
        for name, buffer in module._buffers.items()
        if name in module._non_persistent_buffers_set and _is_whole_number(buffer)
    ]
    if not found or not holds_data(program):
        return []
    before = dict(program.named_buffers(remove_duplicate=False))
    with keep_state(program) as written, keep_program(program), suppress(Exception):
        program.call(dict(zip(program.flat.names, program.flat.tensors, strict=True)))
    changed = [before[name] for name in written if name in before]
    return [(module, name) for module, name, buffer in found if all(buffer is not other for other in changed)]


def _is_whole_number(buffer: Tensor | None) -> bool:
    return (
        buffer is not None and buffer.dim() == 0 and not buffer.dtype.is_floating_point | buffer.is_complex()
    )
