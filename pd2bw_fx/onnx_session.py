"""Uses onnxruntime: quiet sessions, and clear errors.

It is an optional extra, imported when it is first needed. torch is not imported here: a process that runs one
stage does without it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy.typing as npt

from pd2bw_fx.assumptions import is_assumption
from pd2bw_fx.errors import ExportError

if TYPE_CHECKING:
    from onnxruntime import InferenceSession

Array = npt.NDArray[Any]


def open_session(
    path: Path,
    what: str,
    *,
    num_threads: int,
    optimise: bool = True,
    profile: Path | None = None,
    run_as: Path | None = None,
) -> InferenceSession:
    """Opens a session on the CPU.

    - `optimise`: False runs the graph node by node as it is.
    - `profile`: the prefix of the file that `end_profiling` writes.
    - `run_as`: the file to write the executed graph to, in which some operators are decomposed.

    Raises ExportError with onnxruntime's own message if it cannot load the file.
    """
    runtime = require("onnxruntime")
    options = runtime.SessionOptions()
    options.log_severity_level = 4
    options.intra_op_num_threads = num_threads
    if not optimise:
        options.graph_optimization_level = runtime.GraphOptimizationLevel.ORT_DISABLE_ALL
    if profile is not None:
        options.enable_profiling, options.profile_file_prefix = True, str(profile)
    if run_as is not None:
        options.optimized_model_filepath = str(run_as)
        options.add_session_config_entry(
            "session.optimized_model_external_initializers_file_name", f"{run_as.name}.data"
        )
    try:
        return runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # onnxruntime's own classes derive from Exception directly
        raise ExportError(
            f"onnxruntime cannot run {what}: {first_line(error)}; if it lacks an operator for this "
            "type, convert the model first (model.float(), or without autocast)"
        ) from error


def require(name: str) -> Any:
    """Imports a module of the optional extra. Raises ExportError that says what to install."""
    try:
        return __import__(name)
    except ImportError as error:
        raise ExportError(
            f'{name} is not installed; in a clone of pd2bw_fx try: pip install ".[onnx]"'
        ) from error


def run_failure(error: BaseException) -> str:
    """Returns why a run failed: the violated assertion of the file, or onnxruntime's message."""
    asserted = re.search(r"Name:'(?:stage_\d+/)?(.*)' Status Message", str(error))
    if asserted is None or not is_assumption(asserted[1]):
        return first_line(error)
    return f"{asserted[1]}; give inputs that go the way of the example, or export the model from others"


def first_line(error: BaseException) -> str:
    """Returns the root cause in one line; exporters wrap an error in pages of advice."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = lines[0] if lines else "no message"
    if said.endswith("following indices"):  # onnxruntime names them in the lines below
        said = " ".join(lines[:4])
    return f"{type(error).__name__}: {said}"
