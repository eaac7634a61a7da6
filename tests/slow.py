"""What only `make test-slow` runs of a test's parameters."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def slow(values: Iterable[Any]) -> list[Any]:
    """Marks each value of one parameter, to stand behind those that `make test` runs."""
    return [pytest.param(value, marks=pytest.mark.slow) for value in values]
