"""Python's augmented assignments, which torch has as operators of their own, renamed to the plain operators.

mask |= other        __ior__(mask, other)  ->  bitwise_or_(mask, other)
"""

from __future__ import annotations

import torch

from .lift import Draft

_ATEN = torch.ops.aten
_SAME = {
    _ATEN.__iand__.Tensor: _ATEN.bitwise_and_.Tensor,
    _ATEN.__iand__.Scalar: _ATEN.bitwise_and_.Scalar,
    _ATEN.__ior__.Tensor: _ATEN.bitwise_or_.Tensor,
    _ATEN.__ior__.Scalar: _ATEN.bitwise_or_.Scalar,
    _ATEN.__ixor__.Tensor: _ATEN.bitwise_xor_.Tensor,
    _ATEN.__ixor__.Scalar: _ATEN.bitwise_xor_.Scalar,
    _ATEN.__ilshift__.Tensor: _ATEN.bitwise_left_shift_.Tensor,
    _ATEN.__ilshift__.Scalar: _ATEN.bitwise_left_shift_.Tensor_Scalar,
    _ATEN.__irshift__.Tensor: _ATEN.bitwise_right_shift_.Tensor,
    _ATEN.__irshift__.Scalar: _ATEN.bitwise_right_shift_.Tensor_Scalar,
}


def name_augmented_assignments(draft: Draft) -> None:
    for node in draft.graph.nodes:
        if node.op == "call_function":
            node.target = _SAME.get(node.target, node.target)
