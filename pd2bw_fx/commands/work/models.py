"""The pipelines, models and functions that options name."""

from __future__ import annotations

import argparse
import importlib
import inspect
import sys
import traceback
from pathlib import Path
from typing import Any

from torch import nn

from pd2bw_fx.commands.common import check_model_name, module_and_attribute, named_cluster, saved_folder
from pd2bw_fx.commands.options import planning
from pd2bw_fx.commands.progress import ProgressLine
from pd2bw_fx.errors import InputError, UsageError
from pd2bw_fx.models import MODELS, build
from pd2bw_fx.onnx_pipeline import OnnxPipeline
from pd2bw_fx.pipeline import Pipeline, load


def named_onnx(options: argparse.Namespace) -> OnnxPipeline:
    """Returns the ONNX file that MODEL names, split as the options say."""
    from pd2bw_fx.passes.split import split

    return split(str(options.model), cluster=named_cluster(options), **planning(options))


def named_pipeline(options: argparse.Namespace) -> Pipeline:
    """Returns the pipeline that MODEL and --cluster mean: a saved one as it is, or a model split here."""
    if saved_folder(options) is not None:
        return load(options.model, edited=options.edited)
    from pd2bw_fx.passes.split import split  # with the tracer, which takes as long to import as torch

    line = ProgressLine()
    pipe = split(
        model_named(options.model),
        cluster=named_cluster(options),
        profile_cache=not options.no_profile_cache,
        progress=line,
        **planning(options),
    )
    line.close()
    return pipe


def named_model(options: argparse.Namespace) -> nn.Module:
    """Returns the model that MODEL names, not split."""
    return model_named(str(options.model))


def loaded(name: str) -> Any:
    """Returns what `module:attribute` or `file.py:attribute` names, also from the working folder."""
    module_name, attribute = module_and_attribute(name)
    folder, file = "", Path(module_name)
    if file.suffix == ".py":
        folder, module_name = str(file.absolute().parent), file.stem
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        module = importlib.import_module(module_name)
        if folder and not file.samefile(getattr(module, "__file__", None) or "."):
            raise UsageError(
                f"{name!r} cannot be imported: another module is called {module_name}; rename the file"
            )
        return getattr(module, attribute)
    except (ImportError, AttributeError) as error:
        raise UsageError(f"{name!r} cannot be imported: {error}") from error
    except UsageError:
        raise
    except Exception as error:  # whatever the module's own code raises
        raise InputError(f"importing {module_name} raises {_said(error)}") from error


def called(name: str, factory: Any) -> Any:
    """Returns what the user's callable returns. Raises InputError that says where it failed."""
    if not callable(factory):
        raise UsageError(f"{name!r} is a {type(factory).__name__}; something to call was expected")
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError):  # some callables in C have none
        signature = inspect.Signature()
    try:
        signature.bind()
    except TypeError as error:
        raise UsageError(f"{name!r} cannot be called without arguments: {error}") from error
    try:
        return factory()
    except Exception as error:  # whatever the user's own code raises
        raise InputError(f"{name!r} raises {_said(error)}") from error


def _said(error: Exception) -> str:
    """Returns the error, and the last line of the user's code that led to it."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({frames[-1].filename}, line {frames[-1].lineno})" if frames else ""
    return f"{type(error).__name__}: {error}{place}; --debug shows the traceback"


def model_named(name: str) -> nn.Module:
    check_model_name(name)
    if name in MODELS:
        return build(name)
    factory = loaded(name)
    if isinstance(factory, nn.Module):
        return factory
    model = called(name, factory)
    if not isinstance(model, nn.Module):
        raise UsageError(
            f"{name!r} gives a {type(model).__name__}; an nn.Module was expected, whose example_inputs() "
            "returns one microbatch as its forward takes it"
        )
    return model
