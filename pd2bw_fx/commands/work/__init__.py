"""What the commands do, once their options are found right.

A module is imported when a command of it runs: torch, which they all need, takes seconds to import.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch


def seeded(work: Callable[[argparse.Namespace], int], options: argparse.Namespace) -> int:
    """Does the work of a command, with the same fresh weights and dropout every time."""
    torch.manual_seed(getattr(options, "seed", 0))
    return work(options)
