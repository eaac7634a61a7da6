"""Times that are kept from one split to the next, and what of the machine they are measured with."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import pd2bw_fx
from pd2bw_fx.cluster import Cluster
from pd2bw_fx.costs import Costs
from pd2bw_fx.passes.normalise import normalise
from pd2bw_fx.passes.profile import default_cache_folder, profile
from pd2bw_fx.passes.profile.cache import ProfileCache
from pd2bw_fx.passes.profile.keys import ONLY_HERE
from pd2bw_fx.passes.trace import trace
from tests.test_profile import CPU, Uneven


def profiled(tmp_path: Path, width: int = 8) -> Costs:
    traced = trace(
        nn.Sequential(nn.Linear(width, 8), nn.GELU(), nn.Linear(8, 8)), (torch.randn(4, width),), {}
    )
    graph = normalise(traced)
    return profile(
        graph, traced.examples, device=CPU, method="measured", whole=traced.call, cache=tmp_path / "profiles"
    )


def test_what_was_measured_before_is_not_measured_again(tmp_path: Path) -> None:
    first = profiled(tmp_path)

    again = profiled(tmp_path)

    assert again.operators == first.operators
    assert profiled(tmp_path, width=16).operators.keys() == first.operators.keys()
    assert profiled(tmp_path) == first
    assert [path.suffix for path in (tmp_path / "profiles").iterdir()] == [".json"]


def test_a_cache_that_was_deleted_or_broken_is_made_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    profiled(tmp_path)
    (path,) = (tmp_path / "profiles").iterdir()

    path.write_text(path.read_text()[:-20])
    profiled(tmp_path)

    assert "what it held is measured again" in caplog.text
    assert json.loads(path.read_text())["seconds"]
    path.unlink()
    profiled(tmp_path)
    assert path.exists()


@pytest.mark.parametrize("others", [True, False], ids=["of another model", "of the same model"])
def test_times_that_the_machine_was_too_busy_for_are_measured_again(tmp_path: Path, *, others: bool) -> None:
    profiled(tmp_path)
    (path,) = (tmp_path / "profiles").iterdir()
    kept = json.loads(path.read_text())
    whole = max(kept["seconds"], key=lambda key: sum(kept["seconds"][key]))
    seconds = {key: [1e4 * s for s in pair] for key, pair in kept["seconds"].items()}
    longer = {key: pair for key, pair in seconds.items() if not others or key != whole}
    path.write_text(json.dumps(kept | {"seconds": longer}))

    again = profiled(tmp_path)

    assert again.forward_s + again.backward_s < 0.1 * sum(seconds[whole])
    assert json.loads(path.read_text())["seconds"][whole] < seconds[whole]
    assert profiled(tmp_path) == again


def test_one_time_that_cannot_be_right_is_measured_again(tmp_path: Path) -> None:
    first = profiled(tmp_path)
    (path,) = (tmp_path / "profiles").iterdir()
    kept = json.loads(path.read_text())
    seconds = kept["seconds"]
    whole, *others = sorted(seconds, key=lambda key: -sum(seconds[key]))
    path.write_text(json.dumps(kept | {"seconds": seconds | {others[0]: [0.1, 1e-6]}}))

    again = profiled(tmp_path)

    read = json.loads(path.read_text())["seconds"]
    assert read[others[0]][0] < 0.01
    assert {key: read[key] for key in (whole, *others[1:])} == {
        key: seconds[key] for key in (whole, *others[1:])
    }
    assert max(cost.forward_s for cost in again.operators.values()) < 0.9 * first.forward_s


class Acting(nn.Module):
    def __init__(self, act: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        return self.act(x)


@pytest.mark.parametrize("kind", ["custom operator", "untraced part"])
def test_what_a_name_may_stand_for_otherwise_is_measured_in_each_run(tmp_path: Path, kind: str) -> None:
    """The times of a script's own operators were taken from a run in which they were other code."""
    calls: list[str] = []

    def run(x: Tensor) -> Tensor:
        calls.append(kind)
        return x.tanh()

    with torch.library._scoped_library("tests_of_the_cache", "FRAGMENT") as library:
        library.define("act(Tensor x) -> Tensor")
        library.impl("act", run, "CompositeExplicitAutograd")
        torch.library.register_fake("tests_of_the_cache::act", torch.empty_like, lib=library)
        torch.library.register_autograd("tests_of_the_cache::act", lambda ctx, g: g, lib=library)
        is_untraced = kind == "untraced part"
        acting = Acting(run if is_untraced else torch.ops.tests_of_the_cache.act)
        if is_untraced:
            pd2bw_fx.untraced(acting, returns=torch.empty_like)
        traced = trace(nn.Sequential(nn.Linear(8, 8), acting, nn.Linear(8, 8)), (torch.randn(4, 8),), {})
        graph = normalise(traced)
        for _ in range(2):
            calls.clear()
            profile(graph, traced.examples, device=CPU, method="measured", whole=traced.call, cache=tmp_path)

    assert len(calls) > 10  # once to count bytes, and many times by the clock


def test_times_hold_for_one_torch_and_one_number_of_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = ProfileCache(tmp_path, torch.device("cpu"))
    cache.put(("add", (2, 3)), (1.0, 2.0))
    cache.put(((ONLY_HERE, "mine"), (2, 3)), (1.0, 2.0))
    cache.save()

    assert ProfileCache(tmp_path, torch.device("cpu")).get(("add", (2, 3))) == (1.0, 2.0)
    assert ProfileCache(tmp_path, torch.device("cpu")).get(((ONLY_HERE, "mine"), (2, 3))) is None
    monkeypatch.setattr(torch, "__version__", "another")
    assert ProfileCache(tmp_path, torch.device("cpu")).get(("add", (2, 3))) is None


def test_a_user_without_a_home_has_no_times_from_before(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "getuid", lambda: 4_000_000)  # of which the system has no entry

    assert default_cache_folder() is None
    pipe = pd2bw_fx.split(nn.Linear(4, 4), torch.randn(2, 4), cluster=1, check=False)
    assert pipe.costs.origin == "measured"

    monkeypatch.setenv("XDG_CACHE_HOME", "/caches")
    assert default_cache_folder() == Path("/caches/pd2bw_fx/profiles")


def test_what_a_thread_waits_for_is_no_operators_time() -> None:
    """It waits in sleep as it does for a core that others have."""
    waits_s = 0.05

    def act(x: Tensor) -> Tensor:
        time.sleep(waits_s)
        return x.tanh()

    acting = pd2bw_fx.untraced(Acting(act), returns=torch.empty_like)
    traced = trace(nn.Sequential(nn.Linear(8, 8), acting, nn.Linear(8, 8)), (torch.randn(4, 8),), {})
    graph, threads = normalise(traced), torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        costs = profile(graph, traced.examples, device=CPU, method="measured", whole=traced.call)
    finally:
        torch.set_num_threads(threads)

    assert costs.forward_s + costs.backward_s < 0.5 * waits_s


class _Seen:
    """Without attributes in a dict, whose numbers split would restore."""

    __slots__ = ("threads",)


def test_a_cpu_is_measured_with_the_threads_that_its_process_will_have(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Eight cores for four processes beside one another, and for one alone on its host."""
    seen = _Seen()

    class Counting(Uneven):
        def forward(self, x: Tensor) -> Tensor:
            seen.threads = torch.get_num_threads()
            return super().forward(x)

    beside = Cluster.uniform(4)
    hosts = [replace(device, host=device.name) for device in beside.devices]
    threads = torch.get_num_threads()
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    try:
        torch.set_num_threads(8)
        for cluster, wanted in ((beside, 2), (replace(beside, devices=tuple(hosts)), 8)):
            seen.threads = 0
            pd2bw_fx.split(
                Counting(),
                torch.randn(4, 16),
                cluster=cluster,
                num_stages=1,
                check=False,
                profile_cache=False,
            )

            assert seen.threads == wanted  # its last run was the profile's
            assert torch.get_num_threads() == 8
        torch.set_num_threads(1)
        assert beside.threads_each == 1  # as it was wished
    finally:
        torch.set_num_threads(threads)
