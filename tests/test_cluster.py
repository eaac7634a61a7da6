"""Clusters: what a file says, and what a wrong one is told."""

import math
from pathlib import Path

import pytest

from pd2bw_fx.cluster import Cluster
from pd2bw_fx.device import Device
from pd2bw_fx.errors import ClusterError
from pd2bw_fx.units import parse_bytes

TWO_NODES = """
[[node]]
name = "a"
count = 2
memory = "16 GiB"
speed = 1.0
inside = { bytes_per_s = 100e9, latency_s = 5e-6 }

[[node]]
name = "b"
memory = "24 GB"
speed = 0.5

[between]
bytes_per_s = 1e9
latency_s = 50e-6
"""

TWO_DEVICES = """
asymmetric = {asymmetric}
bytes_per_s = [[0, {there}], [{back}, 0]]
latency_s = [[0, {latency}], [1e-5, 0]]

[[device]]
name = "fast"
memory = "{memory}"

[[device]]
name = "slow"
memory = "1 GiB"
"""


def write(folder: Path, text: str) -> Path:
    path = folder / "cluster.toml"
    path.write_text(text)
    return path


def two_devices(**changes: str) -> str:
    entries = {"asymmetric": "false", "there": "1e9", "back": "1e9", "latency": "1e-5", "memory": "1 GiB"}
    return TWO_DEVICES.format(**(entries | changes))


def test_groups_of_nodes_become_a_full_matrix(tmp_path: Path) -> None:
    cluster = Cluster.from_toml(write(tmp_path, TWO_NODES))

    assert [device.name for device in cluster.devices] == ["a:0", "a:1", "b:0"]
    assert [device.memory_bytes for device in cluster.devices] == [2**34, 2**34, 24 * 10**9]
    assert cluster.bytes_per_s == ((0, 100e9, 1e9), (100e9, 0, 1e9), (1e9, 1e9, 0))
    assert cluster.latency_s[0] == (0, 5e-6, 50e-6)


def test_a_device_that_states_no_rates_has_those_of_its_kind_or_of_the_first(tmp_path: Path) -> None:
    gpu, cpu = Device("a", 2**30, kind="cuda"), Device("b", 2**30)
    assert (gpu.flops_per_s, gpu.memory_bytes_per_s) == (20e12, 1e12)
    assert (cpu.flops_per_s, cpu.memory_bytes_per_s) == (50e9, 10e9)
    assert Device("c", 2**30, kind="cuda", flops_per_s=3e12).flops_per_s == 3e12

    read = Cluster.from_toml(write(tmp_path, two_devices() + 'kind = "cpu"\nspeed = 0.1\n'))

    assert [device.kind for device in read.devices] == ["cuda", "cpu"]
    assert {(device.flops_per_s, device.memory_bytes_per_s) for device in read.devices} == {(20e12, 1e12)}


def test_a_transfer_takes_latency_plus_bytes_over_bandwidth(tmp_path: Path) -> None:
    cluster = Cluster.from_toml(write(tmp_path, TWO_NODES))

    assert cluster.transfer_s(0, 2, 10**9) == pytest.approx(1.0 + 50e-6)
    assert cluster.transfer_s(1, 1, 10**9) == 0


def test_a_full_matrix_is_read_row_by_row_as_sender_to_receiver(tmp_path: Path) -> None:
    text = two_devices(there="2e9", asymmetric="true")

    cluster = Cluster.from_toml(write(tmp_path, text))

    assert cluster.bytes_per_s[0][1] == 2e9
    assert cluster.bytes_per_s[1][0] == 1e9


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (two_devices(there="2e9"), r"bytes_per_s\[1\]\[0\] is 1e\+09 but bytes_per_s\[0\]\[1\] is 2e\+09"),
        (two_devices(there="-1e9"), r"bytes_per_s\[0\]\[1\] \(fast -> slow\) is -1e\+09"),
        (two_devices(there="0"), r"must be more than zero"),
        (two_devices(latency="nan"), r"latency_s\[0\]\[1\] .* is nan"),
        (
            two_devices(latency="'fast'"),
            r"latency_s\[0\]\[1\] is 'fast'; a number was expected of seconds: 10e-6 for 10 us",
        ),
        (two_devices(memory="much"), r"device 0: 'much' is no number of bytes"),
        (two_devices().replace('"1 GiB"', "24", 1), r"memory = 24 is a number of bytes; write \"24 GiB\""),
        (
            TWO_NODES.replace("bytes_per_s = 1e9", 'bytes_per_s = "8 Gbit/s"'),
            r"bytes a second: 1\.25e9 for 10",
        ),
        (
            TWO_NODES.replace("bytes_per_s = 1e9", "bytes_per_s = 25"),
            r"\[between\], bytes_per_s is 25 bytes a second; write 25e9 for 25 GB/s",
        ),
        (
            two_devices(latency="5"),
            r"latency_s\[0\]\[1\] is 5 seconds; write 5e-6 for 5 us",
        ),
        (
            two_devices() + "flops_per_s = 60",
            r"device 1, flops_per_s is 60 operations a second; write 60e12 for 60 TFLOP/s",
        ),
        (two_devices(memory="0 B"), r"device 'fast': memory_bytes is 0"),
        (two_devices(memory="1e400 GiB"), r"'1e400 GiB' is no finite number of bytes"),
        ("device = 3", r"device is 3; tables \[\[device\]\] were expected"),
        ("node = 3", r"node is 3; tables \[\[node\]\] were expected"),
        ('[[node]]\ncount = true\nmemory = "1 GiB"', r"count is True"),
        (
            two_devices().replace("asymmetric = false", 'asymmetric = "no"'),
            r"asymmetric is 'no'; true or false was expected",
        ),
        (
            two_devices().replace("latency_s", "# "),
            r"no latency_s matrix; .* latency_s = \[\[0, 10e-6\], \[10e-6, 0\]\]",
        ),
        (two_devices().replace("[1e9, 0]", "[1e9]"), r"bytes_per_s\[1\] has 1 entry for 2 devices"),
        (two_devices().replace(", [1e-5, 0]", ""), r"latency_s has 1 row for 2 devices"),
        (two_devices().replace('"slow"', '"fast"'), r"two devices are named 'fast'"),
        (two_devices().replace("memory", "memroy", 1), r"unknown entry 'memroy'"),
        (two_devices().replace("memory", 'kind = "gpu"\nmemory', 1), r"kind is 'gpu'; 'cpu' or 'cuda' was"),
        (TWO_NODES.replace("[between]", "[betwixt]"), r"unknown entry 'betwixt'"),
        (TWO_NODES.split("[between]")[0], r"\[between\] is missing"),
        (TWO_NODES.replace("inside", "#"), r"node 'a', inside is missing"),
        (TWO_NODES.replace("count = 2", "count = 0"), r"count is 0"),
        (TWO_NODES + two_devices(), r"no valid TOML"),
        ("", r"either \[\[device\]\] tables"),
        ("bytes_per_s = [[0]]\n" + TWO_NODES, r"bytes_per_s goes with \[\[device\]\] tables"),
        (
            two_devices() + "\n[between]\nbytes_per_s = 1e9\nlatency_s = 0",
            r"between goes with \[\[node\]\] tables",
        ),
    ],
)
def test_a_wrong_cluster_file_is_refused_with_the_entry(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(ClusterError, match=said) as caught:
        Cluster.from_toml(write(tmp_path, text))

    assert "cluster.toml" in str(caught.value)


def test_a_missing_cluster_file_says_so(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match=r"nowhere\.toml cannot be read: No such file"):
        Cluster.of(tmp_path / "nowhere.toml")


@pytest.mark.parametrize("wrong", [0, -1, True, 2.5, {"devices": 2}])
def test_what_is_no_cluster_is_refused(wrong: object) -> None:
    with pytest.raises(ClusterError):
        Cluster.of(wrong)  # type: ignore[arg-type]


def test_lists_become_tuples() -> None:
    devices = [Device("a", 2**30), Device("b", 2**30)]
    rates, waits = [[0, 1e9], [1e9, 0]], [[0, 1e-5], [1e-5, 0]]

    cluster = Cluster(devices, rates, waits)

    assert cluster == Cluster(tuple(devices), tuple(map(tuple, rates)), tuple(map(tuple, waits)))
    assert isinstance(cluster.devices, tuple)
    assert isinstance(cluster.bytes_per_s[0], tuple)


def test_a_cluster_survives_json() -> None:
    cluster = Cluster.uniform(3, memory_bytes="2 GiB")

    assert Cluster.from_json(cluster.to_json()) == cluster
    assert cluster.is_uniform
    assert len(cluster.only([2, 0])) == 2


@pytest.mark.parametrize(
    ("text", "number"), [("16 GiB", 2**34), ("16GB", 16 * 10**9), ("1.5 kib", 1536), (7, 7), ("8 B", 8)]
)
def test_sizes_are_read_as_people_write_them(text: int | str, number: int) -> None:
    assert parse_bytes(text) == number


@pytest.mark.parametrize("wrong", ["lots", "8", True, [1], {"a": 1}, math.inf, math.nan, "1e400 GiB"])
def test_what_is_no_size_is_refused(wrong: object) -> None:
    with pytest.raises(ValueError, match="number of bytes"):
        parse_bytes(wrong)  # type: ignore[arg-type]
