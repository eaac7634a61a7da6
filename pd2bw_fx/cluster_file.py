"""The tables of a cluster file: devices with full matrices, or nodes of equal devices and their links."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pd2bw_fx.errors import ClusterError
from pd2bw_fx.units import parse_bytes

_DEVICE_KEYS = {"name", "kind", "memory", "speed", "flops_per_s", "memory_bytes_per_s", "host"}
# The rates of a device that states none: a core of a CPU, and a GPU.
USUAL_RATES = {
    "cpu": {"flops_per_s": 50e9, "memory_bytes_per_s": 10e9},
    "cuda": {"flops_per_s": 20e12, "memory_bytes_per_s": 1e12},
}
KINDS = tuple(USUAL_RATES)
_NODE_KEYS = (_DEVICE_KEYS - {"host"}) | {"count", "inside"}
_LINK_KEYS = {"bytes_per_s", "latency_s"}
_RATES = ("flops_per_s", "memory_bytes_per_s")
_MEANT = {
    "bytes_per_s": " of bytes a second: 1.25e9 for 10 Gbit/s",
    "latency_s": " of seconds: 10e-6 for 10 us",
}
_FEW_BYTES = 1024  # a smaller memory is meant in another unit
_FEW_BYTES_PER_S, _FEW_FLOPS_PER_S, _MANY_S = 1e4, 1e6, 1.0  # so is a slower link or device
_EXAMPLES = {"bytes_per_s": "[[0, 25e9], [25e9, 0]]", "latency_s": "[[0, 10e-6], [10e-6, 0]]"}

MOST_DEVICES = 4096  # the matrices have a link for every two of them

Matrix = tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True)
class Parts:
    """The parts of a `Cluster`; `devices` have the arguments of each `Device`."""

    devices: tuple[dict[str, Any], ...]
    bytes_per_s: Matrix
    latency_s: Matrix
    asymmetric: bool


def require_few(num_devices: int) -> None:
    """Raises ClusterError for more devices than a cluster may have."""
    if num_devices > MOST_DEVICES:
        raise ClusterError(
            f"a cluster of {num_devices} devices was asked for; it may have {MOST_DEVICES}, for every two of "
            "them have a link of their own; plan for a part of them"
        )


def parts_of(data: Mapping[str, Any]) -> Parts:
    """Returns what the tables of a TOML file describe. Raises ClusterError naming an impossible entry."""
    _check_keys("the file", data, {"device", "node", "between", "asymmetric", *_LINK_KEYS})
    if ("device" in data) == ("node" in data):
        raise ClusterError("give either [[device]] tables with full matrices, or [[node]] groups")
    of_others = {"between"} if "device" in data else _LINK_KEYS
    for name in sorted(of_others & data.keys()):
        own, other = ("[[device]]", "[[node]]") if name == "between" else ("[[node]]", "[[device]]")
        raise ClusterError(f"{name} goes with {other} tables, and the file has {own}; leave it out")
    asymmetric = data.get("asymmetric", False)
    if not isinstance(asymmetric, bool):
        raise ClusterError(f"asymmetric is {asymmetric!r}; true or false was expected")
    devices, bytes_per_s, latency_s = _of_nodes(data) if "node" in data else _of_devices(data)
    return Parts(_with_rates(devices), bytes_per_s, latency_s, asymmetric)


def _with_rates(devices: tuple[dict[str, Any], ...]) -> tuple[dict[str, Any], ...]:
    """Gives a device that states no rate that of the first device: its speed tells them apart."""
    if not devices:
        return ()
    stated = USUAL_RATES[devices[0]["kind"]] | {key: devices[0][key] for key in _RATES if key in devices[0]}
    return tuple(stated | device for device in devices)


def _of_devices(data: Mapping[str, Any]) -> tuple[tuple[dict[str, Any], ...], Matrix, Matrix]:
    devices = tuple(
        _device(f"device {index}", _table(f"device {index}", table), index)
        for index, table in enumerate(_tables("device", data["device"]))
    )
    missing = sorted(_LINK_KEYS - data.keys())
    if missing and len(devices) > 1:
        raise ClusterError(
            f"{len(devices)} devices but no {' and no '.join(missing)} matrix; add one row a sending "
            f"device, e.g. {missing[0]} = {_EXAMPLES[missing[0]]}"
        )
    return (
        devices,
        _matrix("bytes_per_s", data.get("bytes_per_s", [[0]])),
        _matrix("latency_s", data.get("latency_s", [[0]])),
    )


def _of_nodes(data: Mapping[str, Any]) -> tuple[tuple[dict[str, Any], ...], Matrix, Matrix]:
    devices: list[dict[str, Any]] = []
    inside: list[Mapping[str, float]] = []
    for number, raw in enumerate(_tables("node", data["node"])):
        where = f"node {raw.get('name', number)!r}" if isinstance(raw, dict) else f"node {number}"
        table = _table(where, raw)
        _check_keys(where, table, _NODE_KEYS)
        count = table.get("count", 1)
        if isinstance(count, bool) or not isinstance(count, int) or count < 1:
            raise ClusterError(f"{where}: count is {count!r}; a node has at least one device")
        link = _link(f"{where}, inside", table.get("inside"), needed=count > 1)
        name = str(table.get("name", f"node{number}"))
        shared = {key: value for key, value in table.items() if key in _DEVICE_KEYS} | {"host": name}
        require_few(len(devices) + count)
        for local in range(count):
            devices.append(_device(where, shared | {"name": f"{name}:{local}"}, len(devices)))
            inside.append(link)
    between = _link("[between]", data.get("between"), needed=len(data["node"]) > 1)

    def links(key: str) -> Matrix:
        return tuple(
            tuple(
                0.0 if a is b else (inside[row] if a["host"] == b["host"] else between)[key] for b in devices
            )
            for row, a in enumerate(devices)
        )

    return tuple(devices), links("bytes_per_s"), links("latency_s")


def _table(where: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ClusterError(f"{where} is {value!r}; a table was expected")
    return value


def _tables(key: str, value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ClusterError(f"{key} is {value!r}; tables [[{key}]] were expected")
    return value


def _check_keys(where: str, table: Mapping[str, Any], known: set[str]) -> None:
    unknown = sorted(table.keys() - known)
    if unknown:
        raise ClusterError(
            f"{where} has an unknown entry {unknown[0]!r}; known are {', '.join(sorted(known))}"
        )


def _device(where: str, table: Mapping[str, Any], index: int) -> dict[str, Any]:
    _check_keys(where, table, _DEVICE_KEYS)
    if "memory" not in table:
        raise ClusterError(f'{where} has no memory; add e.g. memory = "16 GiB"')
    kind = str(table.get("kind", "cuda"))
    if kind not in KINDS:
        raise ClusterError(f"{where}, kind is {kind!r}; {' or '.join(map(repr, KINDS))} was expected")
    rates = {key: _number(f"{where}, {key}", table[key]) for key in ("speed", *_RATES) if key in table}
    memory = table["memory"]
    try:
        memory_bytes = parse_bytes(memory)
    except ValueError as error:
        raise ClusterError(f"{where}: {error}") from None
    if not isinstance(memory, str) and 0 < memory_bytes < _FEW_BYTES:
        raise ClusterError(
            f'{where}: memory = {memory} is a number of bytes; write "{memory} GiB" with a unit'
        )
    return dict(
        name=str(table.get("name", f"{kind}:{index}")),
        memory_bytes=memory_bytes,
        kind=kind,
        host=str(table.get("host", "localhost")),
        **rates,
    )


def _link(where: str, table: Any, *, needed: bool) -> Mapping[str, float]:
    if table is None and not needed:
        return {"bytes_per_s": 1.0, "latency_s": 0.0}
    if table is None:
        raise ClusterError(f"{where} is missing; add {{ bytes_per_s = 25e9, latency_s = 10e-6 }}")
    table = _table(where, table)
    _check_keys(where, table, _LINK_KEYS)
    missing = sorted(_LINK_KEYS - table.keys())
    if missing:
        raise ClusterError(f"{where} has no {missing[0]}")
    return {key: _number(f"{where}, {key}", table[key]) for key in _LINK_KEYS}


def _matrix(key: str, rows: Any) -> Matrix:
    if not isinstance(rows, list) or not all(isinstance(row, list) for row in rows):
        raise ClusterError(f"{key} must be a list of rows, one a sending device")
    return tuple(
        tuple(_number(f"{key}[{a}][{b}]", entry) for b, entry in enumerate(row)) for a, row in enumerate(rows)
    )


def _number(where: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        meant = next((said for key, said in _MEANT.items() if key in where), "")
        raise ClusterError(f"{where} is {value!r}; a number was expected{meant}")
    for key, is_other_unit, unit, instead in (
        ("bytes_per_s", 0 < value < _FEW_BYTES_PER_S, "bytes a second", "{}e9 for {} GB/s"),
        ("flops_per_s", 0 < value < _FEW_FLOPS_PER_S, "operations a second", "{}e12 for {} TFLOP/s"),
        ("latency_s", _MANY_S <= value < math.inf, "seconds", "{}e-6 for {} us"),
    ):
        if key in where and is_other_unit:
            raise ClusterError(f"{where} is {value:g} {unit}; write {instead.replace('{}', f'{value:g}')}")
    return float(value)
