"""The cluster file that measuring writes."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import Mock

import pytest

from pd2bw_fx import probe
from pd2bw_fx.cli import main
from pd2bw_fx.cluster import Cluster
from pd2bw_fx.device import Device
from pd2bw_fx.errors import ClusterError
from pd2bw_fx.probe import SIZES, fitted_link, levelled


def test_two_processes_measure_each_other_and_rank_0_writes_what_split_reads(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "cluster.toml"

    assert main(["probe", "--processes", "2", "--device", "cpu", "-o", str(path)]) == 0

    cluster = Cluster.of(path)
    assert [device.name for device in cluster.devices] == ["cpu:0", "cpu:1"]
    assert cluster.devices[0].speed == 1.0
    for device in cluster.devices:
        assert device.flops_per_s > 1e8
        assert device.memory_bytes > 2**28
    for a, b in ((0, 1), (1, 0)):
        assert 1e6 < cluster.bytes_per_s[a][b] < 1e13
        assert 0 <= cluster.latency_s[a][b] < 0.1
    out = capfd.readouterr().out
    assert out.count("written") == 1
    assert "from \\ to" in out


def test_a_line_through_the_times_gives_latency_and_bandwidth_back() -> None:
    seconds = [2 * 5e-5 + size / 2e9 for size in SIZES]

    assert fitted_link(SIZES, seconds) == pytest.approx((5e-5, 2e9))


def test_times_below_the_line_through_zero_mean_no_latency() -> None:
    latency_s, bytes_per_s = fitted_link((1000, 2000), (1e-6, 3e-6))

    assert latency_s == 0
    assert 5e8 < bytes_per_s < 1e9


@pytest.mark.parametrize("seconds", [(3e-6, 1e-6), (3e-6, 3e-6), (3e-6, 3.1e-6)])
def test_a_link_that_is_no_slower_with_more_bytes_is_refused(seconds: tuple[float, ...]) -> None:
    with pytest.raises(ClusterError, match="no bandwidth in it; probe again"):
        fitted_link((1000, 10**6), seconds)


def test_links_are_timed_again_where_one_gave_no_line(monkeypatch: pytest.MonkeyPatch) -> None:
    # What else ran made the small messages of the first try, and the large ones of the second, take long.
    tries = [
        {(0, 1): [5e-3, 4e-3], (1, 0): [1e-4, 2e-3]},
        {(0, 1): [1e-4, 9e-3], (1, 0): [5e-3, 3e-3]},
    ]
    monkeypatch.setattr(probe, "_links", lambda device, sizes, summary: tries.pop(0))

    found = probe._fitted_links(Mock(), (1000, 10**6))

    assert tries == []
    assert found[0, 1] == pytest.approx(fitted_link((1000, 10**6), (1e-4, 4e-3)))
    assert found[1, 0] == pytest.approx(fitted_link((1000, 10**6), (1e-4, 2e-3)))


def test_where_most_messages_wait_for_a_core_the_fastest_count(monkeypatch: pytest.MonkeyPatch) -> None:
    # Nine of ten wait 4 ms for a core, a few bytes as long as a million.
    small, large = [4e-3] * 18 + [1e-4] * 2, [4e-3] * 18 + [6e-4] * 2
    monkeypatch.setattr(
        probe, "_links", lambda device, sizes, summary: {(0, 1): [summary(small), summary(large)]}
    )

    found = probe._fitted_links(Mock(), (1000, 10**6))

    assert found[0, 1] == pytest.approx(fitted_link((1000, 10**6), (1e-4, 6e-4)))


def test_a_link_that_never_gives_a_line_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probe, "_links", lambda device, sizes, summary: {(0, 1): [3e-3, 1e-3]})

    with pytest.raises(ClusterError, match=r"link from rank 0 to rank 1: .*probe again"):
        probe._fitted_links(Mock(), (1000, 2000))


def test_figures_near_one_another_are_written_as_their_median() -> None:
    assert levelled([1.0, 2.04, 1.02, 2.0, 1.04], 0.1) == [1.02, 2.02, 1.02, 2.02, 1.02]
    assert levelled([1.0, 1.02], 0.0) == [1.0, 1.02]


@pytest.mark.parametrize("back", [1e9, 2.5e8])
def test_a_written_cluster_is_read_as_it_was(tmp_path: Path, back: float) -> None:
    devices = (
        Device('big "one" \U0001f600\x7f\t', memory_bytes=2**34, kind="cuda", host="a"),
        Device("b", memory_bytes=2**30),
    )
    cluster = Cluster(devices, ((0.0, 1e9), (back, 0.0)), ((0.0, 1.5e-05), (1.5e-05, 0.0)))

    (tmp_path / "cluster.toml").write_text(cluster.to_toml())

    assert Cluster.from_toml(tmp_path / "cluster.toml") == cluster


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-o", "nowhere/cluster.toml"], "nowhere/cluster.toml cannot be written"),
        (["-o", "c.toml", "--processes", "0"], "--processes is 0"),
        (["-o", "c.toml", "--tolerance", "1"], "--tolerance is 1.0"),
        (["-o", "c.toml", "--device", "cuda", "--processes", "999"], "999 processes on --device cuda"),
    ],
)
def test_what_cannot_be_probed_is_refused_at_once(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["probe", *arguments]) == 2

    assert message in capsys.readouterr().err


def test_processes_of_torchrun_are_not_started_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "1")

    assert main(["probe", "-o", "c.toml", "--processes", "2"]) == 2

    assert "leave out --processes" in capsys.readouterr().err
