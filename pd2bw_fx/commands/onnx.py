"""The commands for stages as ONNX files."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from pd2bw_fx.commands.common import check_pipeline, check_writable, command, model_command
from pd2bw_fx.errors import UsageError


def add(commands: Any) -> None:
    """export, merge, run-onnx"""
    export = model_command(
        commands,
        "export",
        "write one checked ONNX file for each stage",
        "pd2bw-fx export gpt_2 -o gpt_2_onnx",
    )
    export.add_argument("-o", "--output", type=Path, required=True, help="folder to write")
    export.add_argument("--opset", type=int, default=20, help="ONNX operator set (default 20)")
    export.add_argument(
        "--form",
        choices=["stages", "annotated", "both"],
        default="stages",
        help="one file for each stage, the whole model in one file that names each node's stage, or both",
    )
    export.add_argument(
        "--training",
        action="store_true",
        help="export what the model computes in training, such as batch norm (default: in evaluation)",
    )
    export.add_argument("--json", action="store_true", help="print the manifest as JSON")
    export.set_defaults(run=_export)

    merge = command(
        commands,
        "merge",
        "put exported stages back into one ONNX file",
        "pd2bw-fx merge gpt_2_onnx -o gpt.onnx",
    )
    merge.add_argument("folder", metavar="FOLDER", help="written by export")
    merge.add_argument("-o", "--output", type=Path, required=True, help="file to write")
    merge.set_defaults(run=_merge)

    run = command(
        commands,
        "run-onnx",
        "run exported stages, each in its own process",
        "pd2bw-fx run-onnx gpt_2_onnx --input x.npz -o y.npz",
    )
    run.add_argument("folder", metavar="FOLDER", help="written by export")
    run.add_argument("--input", type=Path, required=True, help="an .npz file with the model's inputs by name")
    run.add_argument("-o", "--output", type=Path, help="an .npz file for the outputs (default: print shapes)")
    run.add_argument(
        "--microbatches",
        type=int,
        default=1,
        help="cut the batch into this many parts, which follow one another (default 1)",
    )
    run.set_defaults(run=_run_onnx)


def _export(options: argparse.Namespace) -> int:
    check_pipeline(options)
    from pd2bw_fx.commands.work import onnx, seeded

    return seeded(onnx.export, options)


def _merge(options: argparse.Namespace) -> int:
    check_writable(options.output)
    from pd2bw_fx.commands.work import onnx, seeded

    return seeded(onnx.merge, options)


def _run_onnx(options: argparse.Namespace) -> int:
    check_writable(options.output)
    if not options.input.is_file():
        raise UsageError(f"{options.input} is no file; give an .npz with the model's inputs by name")
    from pd2bw_fx.commands.work import onnx, seeded

    return seeded(onnx.run_onnx, options)
