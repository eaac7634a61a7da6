"""Fixtures, options and order of all tests. README.md says which files test what, and how to run them."""

from __future__ import annotations

import gc
import itertools
import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch.distributed as dist

import pd2bw_fx
from pd2bw_fx.models import build
from pd2bw_fx.passes.schedule import METHODS
from pd2bw_fx.runtime import nursery
from pd2bw_fx.runtime.nursery import kept_nursery
from tests.processes import workers
from tests.programs.with_backend import choose
from tests.torchrun import torchrun_of_forks

# pytest would hear it, since it does not propagate. As long as nobody hears it, torch does not describe every
# size and tensor of an export there, with stacks of calls.
logging.getLogger("torch.__trace").propagate = True


@pytest.fixture(autouse=True, scope="session")
def _own_cache_directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Times that are measured in this run are cached in a folder of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(autouse=True, scope="session")
def _one_nursery() -> Iterator[None]:
    """All training runs of this process fork their workers from one process, which imports torch once."""
    with kept_nursery():
        yield


@pytest.fixture
def methods_kept() -> Iterator[None]:
    """Forgets, after the test, the methods that it has registered."""
    before = dict(METHODS)
    yield
    METHODS.clear()
    METHODS.update(before)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--device", help="where engines train that a test gives no device, such as cuda")


@pytest.fixture(autouse=True, scope="session")
def _on_device(request: pytest.FixtureRequest) -> None:
    device = request.config.getoption("--device")
    if device is not None:
        choose(device=device)


def pytest_collection_finish() -> None:
    """Collects garbage less often: a tenth of the time went into searching what was imported."""
    youngest, middle, oldest = gc.get_threshold()
    gc.set_threshold(100 * youngest, middle, 4 * oldest)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts files that start processes first, each followed by one that does not.

    They take longest, so that both workers then end at about the same time, and wait for a good part of it,
    in which the other worker can compute.
    """
    starting = {"torchrun", "torchrun_of_forks", "start_forks", "start_command", "at_once", "Fork"}
    files: dict[Path, list[pytest.Item]] = {}
    for item in items:
        files.setdefault(item.path, []).append(item)
    waiting, computing = list[list[pytest.Item]](), list[list[pytest.Item]]()
    for tests in files.values():
        starts = not starting.isdisjoint(vars(getattr(tests[0], "module", None) or object))
        (waiting if starts else computing).append(tests)
    pairs = itertools.zip_longest(waiting, computing, fillvalue=())
    items[:] = [item for pair in pairs for tests in pair for item in tests]


@pytest.fixture
def no_process_is_left() -> Iterator[None]:
    yield
    if nursery._kept is not None and nursery._kept._process is not None:
        assert workers() == []


@pytest.fixture
def one_rank() -> Iterator[None]:
    """Makes this process a process group of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.fixture
def ranks_are_forks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forks the ranks that `train` and `probe` start, for tests of what they do once they run."""

    def start(num_processes: int, words: Sequence[str]) -> None:
        program = Path(pd2bw_fx.__file__).with_name("__main__.py")
        ended = torchrun_of_forks(num_processes, program, *words, folder=Path.cwd())
        assert ended.returncode == 0, ended.stderr
        print(ended.stdout, end="")

    for command in ("training", "probing"):
        monkeypatch.setattr(f"pd2bw_fx.commands.work.{command}.start_processes", start)


@pytest.fixture
def time_to_explain(monkeypatch: pytest.MonkeyPatch) -> None:
    """The explanation of an infeasible problem is complete, however slowly it is found on a busy machine."""
    folder = "pd2bw_fx.passes.partition.infeasibility"
    monkeypatch.setattr(f"{folder}.infeasible._MOST_TIME_S", 900.0)
    monkeypatch.setattr(f"{folder}.infeasible._EXPLAIN_TIME_S", 60.0)
    monkeypatch.setattr(f"{folder}.nearest._TIME_S", 120.0)
    monkeypatch.setattr(f"{folder}.nearest._STAGES_TIME_S", 120.0)
    monkeypatch.setattr(f"{folder}.shortfall._PROGRAM_TIME_S", 60.0)
    monkeypatch.setattr(f"{folder}.shortfall._ORDERS_TIME_S", 120.0)


@pytest.fixture(scope="module")
def mlp_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved pipeline of the model `mlp` in two stages; tests that change it copy it first."""
    folder = tmp_path_factory.mktemp("saved") / "mlp"
    pd2bw_fx.split(build("mlp"), cluster=2, costs="analytic", check=False).save(folder)
    return folder
