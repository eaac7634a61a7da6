"""An ONNX file as a front end: its nodes as operators, and what they cost."""

from .cost import onnx_costs
from .read import read_onnx

__all__ = ["onnx_costs", "read_onnx"]
