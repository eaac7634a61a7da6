"""The JSON schema of a dataclass, and a check of data against it, for files that may be edited by hand."""

from __future__ import annotations

import types
import typing
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any

from pd2bw_fx.errors import PlanMismatchError, shown
from pd2bw_fx.names import did_you_mean

_NAMES: Mapping[Any, str] = {str: "string", int: "integer", float: "number", bool: "boolean"}


def schema_of(kind: Any) -> dict[str, Any]:
    """Returns the schema (draft 2020-12) of dataclasses of strings, numbers, flags, tuples and
    dataclasses.
    """
    if is_dataclass(kind) and isinstance(kind, type):
        hints = typing.get_type_hints(kind)
        return {
            "type": "object",
            "title": kind.__name__,
            "properties": {field.name: schema_of(hints[field.name]) for field in fields(kind)},
            "required": [field.name for field in fields(kind) if field.default is MISSING],
            "additionalProperties": False,
        }
    if typing.get_origin(kind) is tuple:
        return {"type": "array", "items": schema_of(typing.get_args(kind)[0])}
    if isinstance(kind, types.UnionType):
        return {"anyOf": [schema_of(part) for part in typing.get_args(kind)]}
    return {"type": "null"} if kind is types.NoneType else {"type": _NAMES[kind]}


def check_against(schema: Mapping[str, Any], data: Any, where: str) -> None:
    """Raises PlanMismatchError at the first entry that is missing, unknown, infinite or of another type."""
    if "anyOf" in schema:
        return _check_any(schema["anyOf"], data, where)
    expected = schema["type"]
    if not _is(expected, data):
        raise PlanMismatchError(f"{where} is {shown(data)}; expected: {expected}")
    if expected == "object":
        missing = [name for name in schema["required"] if name not in data]
        if missing:
            raise PlanMismatchError(f"{where} has no {missing[0]!r}")
        for name in data:
            if name not in schema["properties"]:
                hint = did_you_mean(str(name), schema["properties"])
                raise PlanMismatchError(f"{where} has {name!r}, which says nothing there{hint}")
        for name, of in schema["properties"].items():
            if name in data:
                check_against(of, data[name], f"{where}.{name}")
    elif expected == "array":
        for at, entry in enumerate(data):
            check_against(schema["items"], entry, f"{where}[{at}]")
    return None


def _check_any(kinds: Any, data: Any, where: str) -> None:
    if not any(_is(kind["type"], data) for kind in kinds):
        raise PlanMismatchError(
            f"{where} is {shown(data)}; expected: {' or '.join(k['type'] for k in kinds)}"
        )


def _is(expected: str, data: Any) -> bool:
    if expected == "integer":
        return isinstance(data, int) and not isinstance(data, bool)
    if expected == "number":
        is_number = isinstance(data, int | float) and not isinstance(data, bool)
        return is_number and abs(data) < float("inf")
    kind: Any = {
        "string": str,
        "boolean": bool,
        "object": dict,
        "array": (list, tuple),
        "null": types.NoneType,
    }[expected]
    return isinstance(data, kind)
