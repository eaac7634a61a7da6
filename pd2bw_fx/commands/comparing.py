"""The command that compares training methods."""

from __future__ import annotations

import argparse
import itertools
from pathlib import Path
from typing import Any

from pd2bw_fx.commands.common import check_model, check_writable, model_command
from pd2bw_fx.commands.options import add_wishes
from pd2bw_fx.errors import UsageError
from pd2bw_fx.optimizer_names import OPTIMIZER_NAMES, check_optimizer
from pd2bw_fx.passes.schedule import METHODS, method_of, training_methods


def add(commands: Any) -> None:
    """compare"""
    parser = model_command(
        commands,
        "compare",
        "compare training methods on one model and one cluster",
        "pd2bw-fx compare gpt --cluster cluster.toml --simulate -o compare.svg",
        takes_folder=False,
        splits=False,
    )
    methods = training_methods()
    parser.add_argument(
        "--methods",
        nargs="+",
        type=lambda words: [word for word in words.split(",") if word],
        metavar="METHOD",
        help=f"only these, with spaces or commas between them (default: all of {', '.join(methods)})",
    )
    parser.add_argument("--simulate", action="store_true", help="do not train, only simulate")
    parser.add_argument("--updates", type=int, default=20, help="updates to train (default 20)")
    parser.add_argument(
        "--rounds",
        type=int,
        default=1,
        help="train every method this many times, alternating, and report the median (default 1)",
    )
    parser.add_argument(
        "--microbatches", type=int, help="microbatches an update (default: twice the devices)"
    )
    parser.add_argument("--data", help="module:callable that gives an iterable of batches (default: text)")
    parser.add_argument(
        "--optimizer", default="adamw", help=f"{OPTIMIZER_NAMES}, or module:callable (default adamw)"
    )
    parser.add_argument("--lr", type=float, help="learning rate (default: torch's)")
    parser.add_argument("-o", "--output", type=Path, help="file for the timelines on one axis: .svg or .png")
    parser.add_argument(
        "--losses", type=Path, metavar="FILE", help="file for the loss curves of all methods: .svg or .png"
    )
    parser.add_argument("--json", action="store_true", help="print the figures as JSON")
    add_wishes(parser)
    parser.set_defaults(run=_compare, runs=False)


def _check_methods(options: argparse.Namespace) -> None:
    """Raises InputError for a method that is unknown, or does not train. A model's own file may register
    others, so that only `split` knows them."""
    known = training_methods()
    for name in options.methods or ():
        if ":" not in str(options.model):
            method_of(name)
        if name in METHODS and name not in known:
            raise UsageError(f"{name} does not train; --methods are some of {', '.join(known)}")


def _compare(options: argparse.Namespace) -> int:
    if options.updates < 1:
        raise UsageError(f"--updates is {options.updates}; at least one is needed")
    if options.lr is not None and not options.lr >= 0:
        raise UsageError(f"--lr is {options.lr}; 0 or more was expected")
    if options.rounds < 1:
        raise UsageError(f"--rounds is {options.rounds}; at least one is needed")
    if options.simulate and options.losses is not None:
        raise UsageError("--losses are of training; leave out --simulate")
    if options.methods is not None:
        options.methods = list(dict.fromkeys(itertools.chain.from_iterable(options.methods)))
    _check_methods(options)
    check_writable(options.output)
    check_writable(options.losses)
    check_model(options)
    if not options.simulate:
        check_optimizer(options.optimizer, options.lr)
    from pd2bw_fx.commands.work import comparing, seeded

    return seeded(comparing.compare_methods, options)
