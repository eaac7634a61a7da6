"""Reads an ONNX file as an operator graph, and prices its nodes.

load      the file as a graph that can be cut
read      from the file to an operator graph
trial     the file run node by node, at several sizes
shapes    which sizes the file fixes, and which depend on values
specs     types and shapes of values, with a symbol for each open size
cost      what each node costs
clock     seconds of each node, by onnxruntime's profiler
"""

from .cost import onnx_costs
from .read import read_onnx

__all__ = ["onnx_costs", "read_onnx"]
