"""Turns tensors that the tracer made of numbers into numbers again, where an operator accepts one.

    h[:, 0] = 1.0        fill_(select(h, 1, 0), constant_0)  ->  fill_(select(h, 1, 0), 1.0)
    h[mask] = -1e9       index_put_(h, [mask], constant_1)   ->  masked_fill_(h, mask, -1e9)

The code then shows the value, needs no buffer, and the number takes the type of the tensor that it is written
to. A float32 has the fewest digits that identify it, except beside float64, where 0.1 is another number.
"""

from __future__ import annotations

import math
import struct
from typing import Any, cast

import torch
from torch import fx, nn

from .lift import Draft, attribute
from .nodes import operator_name, writes

_ATEN = torch.ops.aten
_COPIES = {"lift_fresh_copy", "detach", "detach_", "alias"}
_COMPARISONS = {"eq", "ne", "lt", "le", "gt", "ge"}
_ARITHMETIC = {"add", "sub", "mul", "div"} | _COMPARISONS


def write_numbers(draft: Draft, model: nn.Module) -> None:
    for constant in draft.graph.find_nodes(op="get_attr"):
        number = _number(draft, constant, model)
        names = _names(constant)
        readers = {user for name in names for user in name.users} - names
        if number is None or any(set(writes(reader)) & names for reader in readers):
            continue
        for reader in readers:
            _read_number(draft.graph, reader, names, number)


def _number(draft: Draft, constant: fx.Node, model: nn.Module) -> float | bool | None:
    """Returns the value of a constant that is one number, or None if it is a named tensor of the model."""
    name = str(constant.target)
    value = draft.values[name]
    if type(value) is not torch.Tensor or attribute(model, name) is value:
        return None
    if value.dim() != 0 or value.is_complex() or value.is_meta:
        return None
    number = value.item()
    is_float32 = value.dtype == torch.float32
    return _shortest(number) if is_float32 and not _is_beside_wider(constant) else number


def _is_beside_wider(constant: fx.Node) -> bool:
    readers = {user for name in _names(constant) for user in name.users}
    values = [node.meta.get("val") for reader in readers for node in (reader, *reader.all_input_nodes)]
    return any(isinstance(v, torch.Tensor) and v.dtype in (torch.float64, torch.complex128) for v in values)


def _shortest(number: float) -> float:
    """Returns the number with the fewest digits that is the same float32: 0.1, not 0.10000000149011612."""
    candidates = (float(f"{number:.{digits}g}") for digits in range(1, 10))
    return next((found for found in candidates if _as_float32(found) == number), number)


def _as_float32(number: float) -> float | None:
    """Rounds to float32; None for a number that torch refuses as too large, though it would round down."""
    is_one = abs(number) <= torch.finfo(torch.float32).max or math.isinf(number)
    return float(struct.unpack("f", struct.pack("f", number))[0]) if is_one else None


def _names(constant: fx.Node) -> set[fx.Node]:
    """Returns the constant and the copies that the tracer put between it and its readers."""
    found, waiting = {constant}, [constant]
    while waiting:
        for user in waiting.pop().users:
            if user.op == "call_function" and operator_name(user) in _COPIES and user not in found:
                found.add(user)
                waiting.append(user)
    return found


def _read_number(graph: fx.Graph, reader: fx.Node, names: set[fx.Node], number: float | bool) -> None:
    if reader.op != "call_function" or not isinstance(reader.target, torch._ops.OpOverload):
        return
    places = [place for place, operand in enumerate(reader.args) if operand in names]
    name, overload = reader.target._opname, reader.target._overloadname
    if len(places) != 1 or len(set(reader.all_input_nodes) & names) != 1:
        return
    (place,) = places
    if name in {"fill", "fill_", "copy_"} and place == 1:
        in_place = _ATEN.fill.Scalar if name == "fill" else _ATEN.fill_.Scalar
        reader.target, reader.args = in_place, (reader.args[0], number)
    elif name in {"index_put", "index_put_"} and len(reader.args) == 3 and place == 2:
        _fill_indexed(graph, reader, number)
    elif not _is_same_type(reader, names):
        return
    elif name == "where" and place in (1, 2):
        target = _ATEN.where.ScalarSelf if place == 1 else _ATEN.where.ScalarOther
        reader.target, reader.args = target, _replaced(reader.args, place, number)
    elif name in _ARITHMETIC and (overload, place) == ("Tensor", 1) and not isinstance(number, bool):
        if name in _COMPARISONS:
            reader.target = getattr(_ATEN, name).Scalar
        reader.args = _replaced(reader.args, place, number)


def _replaced(args: tuple[Any, ...], place: int, number: float) -> tuple[Any, ...]:
    return (*args[:place], number, *args[place + 1 :])


def _is_same_type(reader: fx.Node, names: set[fx.Node]) -> bool:
    """Whether another operand decides the result's type, for a number as for a tensor of no dimensions."""
    others = (node.meta.get("val") for node in reader.all_input_nodes if node not in names)
    return any(isinstance(o, torch.Tensor) and o.dim() > 0 and o.is_floating_point() for o in others)


def _fill_indexed(graph: fx.Graph, write: fx.Node, number: float | bool) -> None:
    """Rewrites `x[mask] = number`, and `x[:, index] = number` along one dimension."""
    target: Any = write.target
    in_place = target._opname.endswith("_")
    base, indices = cast("tuple[fx.Node, list[fx.Node | None]]", write.args[:2])
    chosen = [(place, index) for place, index in enumerate(indices) if index is not None]
    place, index = chosen[0]
    value, picked = base.meta.get("val"), index.meta.get("val")
    if len(chosen) != 1 or not isinstance(value, torch.Tensor) or not isinstance(picked, torch.Tensor):
        return
    if picked.dtype == torch.bool:
        write.target = _ATEN.masked_fill_.Scalar if in_place else _ATEN.masked_fill.Scalar
        with graph.inserting_before(write):
            mask = _widened(graph, index, value.dim() - place - picked.dim(), write)
        write.args = (base, mask, number)
    elif picked.dtype == torch.int64 and picked.dim() == 1:
        write.target = _ATEN.index_fill_.int_Scalar if in_place else _ATEN.index_fill.int_Scalar
        write.args = (base, place, index, number)


def _widened(graph: fx.Graph, mask: fx.Node, count: int, write: fx.Node) -> fx.Node:
    """Returns the mask with `count` more dimensions at the end, to fill all of what it picks."""
    for _ in range(count):
        wider = graph.call_function(_ATEN.unsqueeze.default, (mask, -1))
        wider.meta = {key: value for key, value in write.meta.items() if key != "val"}
        with mask.meta["val"].fake_mode:
            wider.meta["val"] = mask.meta["val"].unsqueeze(-1)
        mask = wider
    return mask
