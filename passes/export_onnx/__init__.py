"""Stages as ONNX files: written, checked, and run one after another."""

from .export import export_onnx
from .run import KIND, run_onnx

__all__ = ["KIND", "export_onnx", "run_onnx"]
