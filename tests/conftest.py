"""Measured times are kept for one run of the suite, and not among the user's own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True, scope="session")
def _own_cache_directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files that start processes of their own take longest: with them first, both workers end together."""
    items.sort(key=lambda item: not hasattr(getattr(item, "module", None), "torchrun"))
