"""Exports stages as ONNX files, merges and runs them."""

from __future__ import annotations

import argparse
import json
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from pd2bw_fx.commands.work.models import named_pipeline
from pd2bw_fx.errors import InputError
from pd2bw_fx.passes.export_onnx import merge_onnx, run_onnx_processes


def export(options: argparse.Namespace) -> int:
    manifest = named_pipeline(options).export_onnx(
        options.output, form=options.form, opset=options.opset, training=options.training
    )
    if options.json:
        print(json.dumps(manifest))
        return 0
    files = sorted(path.name for path in options.output.glob("*.onnx"))
    print(f"{', '.join(files)} written to {options.output}")
    return 0


def merge(options: argparse.Namespace) -> int:
    merge_onnx(options.folder, options.output)
    print(f"{options.output} written")
    return 0


def _arrays(path: Path) -> dict[str, np.ndarray[Any, Any]]:
    """Returns arrays by name. Raises InputError for a file that is not one of arrays."""
    try:
        with np.load(path) as file:
            return dict(file)
    except (ValueError, TypeError, EOFError, zipfile.BadZipFile) as error:
        raise InputError(
            f"{path} holds no arrays by name ({error}); numpy.savez writes such files"
        ) from error


def run_onnx(options: argparse.Namespace) -> int:
    inputs = _arrays(options.input)
    outputs = run_onnx_processes(options.folder, inputs, num_microbatches=options.microbatches)
    if options.output is not None:
        with options.output.open("wb") as file:  # savez would add .npz to another file name
            np.savez(file, **outputs)  # type: ignore[arg-type]
    for name, value in outputs.items():
        shown = f" {value}" if value.ndim == 0 else ""
        print(f"{name}: {value.dtype} {value.shape}{shown}")
    return 0
