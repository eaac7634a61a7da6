"""Goes the whole way with a small GPT."""

from __future__ import annotations

import argparse

from rich.console import Console

from pd2bw_fx.demo import run_demo


def demo(options: argparse.Namespace) -> int:
    run_demo(options.output, num_updates=options.updates, console=Console())
    return 0
