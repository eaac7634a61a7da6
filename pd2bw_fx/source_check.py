"""Checks what the source of a stage consists of, before it is written and before it is run.

A stage defines modules that use torch and computes with tensors. Anything else (another import, a file, a
dunder attribute, a module reached through torch, a function of torch that does not compute) is refused, so
that neither a malicious model nor an altered folder can run code of its own. For torch there is a list of
what is allowed; of a tensor or a module everything is allowed except the members that lead out of it.
"""

from __future__ import annotations

import ast
import builtins
import functools
import math
import re
import types
from collections.abc import Iterator
from typing import TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from pd2bw_fx.errors import PlanMismatchError

# The operators of these namespaces exist wherever torch and this package do.
NAMESPACES_OF_TORCH = frozenset(
    {"pd2bw_fx", "aten", "prims", "prim", "higher_order", "_quantized", "quantized"}
)

_IMPORTS = {
    "from collections import OrderedDict",
    "import math",
    "import torch",
    "import torch.nn as nn",
    "import torch.nn.functional as F",
    "from torch import nn",
    "from torch.nn import functional as F",
    "from torch import Tensor",
    "from torch import Tensor, nn",
    "from torch.nn.utils.parametrizations import spectral_norm",
    "from torch.nn.utils.parametrizations import spectral_norm, weight_norm",
    "from torch.nn.utils.parametrizations import weight_norm",
}
_NODES: tuple[type[ast.AST], ...] = (
    ast.Module, ast.Import, ast.ImportFrom, ast.alias, ast.ClassDef, ast.FunctionDef, ast.arguments, ast.arg,
    ast.Expr, ast.Assign, ast.AugAssign, ast.AnnAssign, ast.Return, ast.If, ast.For, ast.With, ast.withitem,
    ast.Pass, ast.Call, ast.keyword, ast.Attribute, ast.Subscript, ast.Slice, ast.Name, ast.Constant,
    ast.Tuple, ast.List, ast.Dict, ast.Starred, ast.BinOp, ast.UnaryOp, ast.BoolOp, ast.Compare, ast.IfExp,
    ast.GeneratorExp, ast.ListComp, ast.DictComp, ast.comprehension, ast.JoinedStr, ast.FormattedValue,
    ast.expr_context, ast.operator, ast.unaryop, ast.boolop, ast.cmpop,
)  # fmt: skip
_BUILTINS = frozenset({
    "super", "range", "zip", "enumerate", "len", "next", "str", "int", "float", "bool", "complex", "tuple",
    "list", "dict", "slice", "isinstance", "print", "sum", "min", "max", "abs", "getattr", "type", "None",
    "True", "False", "round", "staticmethod",
})  # fmt: skip
_MODULES: dict[str, types.ModuleType] = {"math": math, "torch": torch, "nn": nn, "F": F}
# What a person may write for them.
_LONG_NAMES = {("torch", "nn", "functional"): "F", ("nn", "functional"): "F", ("torch", "nn"): "nn"}
# Their public functions are allowed, as those of F are.
_OF_FUNCTIONS = {"torch.fft", "torch.linalg", "torch.special", "nn.init"}
_OF_TORCH = frozenset({
    "torch._assert_async", "torch._weight_norm", "torch.autocast", "torch.device", "torch.enable_grad",
    "torch.finfo", "torch.get_autocast_dtype", "torch.get_default_device", "torch.get_default_dtype",
    "torch.iinfo", "torch.inf", "torch.is_autocast_enabled", "torch.is_grad_enabled", "torch.is_tensor",
    "torch.nan", "torch.no_grad", "torch.pi", "torch.set_grad_enabled", "torch.Size", "torch.sym_float",
    "torch.sym_int", "torch.sym_ite", "torch.sym_max", "torch.sym_min", "torch.sym_not", "torch.sym_sqrt",
    "torch.sym_sum", "torch.Tensor",
})  # fmt: skip
_COMPUTING = frozenset({*dir(torch._C._VariableFunctions), *torch.functional.__all__})  # torch.add, ..
_FILES = {"from_file", "save"}  # operators of aten, too
# From a tensor or a generator to files, memory and frames. A module's own member of such a name is written
# get_submodule("storage").
WAYS_OUT = frozenset({
    "data_ptr", "dump", "dumps", "from_file", "numpy", "storage", "tofile", "typed_storage",
    "untyped_storage", "ag_code", "ag_frame", "cr_code", "cr_frame", "cr_origin", "f_back", "f_builtins",
    "f_code", "f_generator", "f_globals", "f_locals", "gi_code", "gi_frame", "gi_yieldfrom", "tb_frame",
    "tb_next",
})  # fmt: skip


def operators_called(source: str) -> list[tuple[str, str]]:
    """Returns the namespace and name of each operator that a stage calls by torch.ops, once each."""
    return sorted(set(re.findall(r"torch\.ops\.(\w+)\.(\w+)", source)))


@functools.lru_cache(maxsize=64)  # the jobs of all ranks ask it of all stages, and each stage of itself
def uses_vary(source: str) -> bool:
    """Returns whether the parameters that a stage uses may change from call to call.

    They may if its code was edited and branches, or if it calls operators that are not torch's, which may
    branch.
    """
    if any(namespace not in NAMESPACES_OF_TORCH for namespace, _ in operators_called(source)):
        return True
    classes = (node for node in ast.parse(source).body if isinstance(node, ast.ClassDef))
    return any(isinstance(node, ast.If | ast.IfExp) for made in classes for node in ast.walk(made))


def allowed_builtins() -> dict[str, object]:
    """Returns the builtins that a stage has when it is run: its imports were checked."""
    return {name: getattr(builtins, name) for name in (*_BUILTINS, "__build_class__", "__import__")}


@functools.lru_cache(maxsize=8)  # split checks what it writes, and what it builds of that again
def check_source(source: str, where: str) -> ast.Module:
    """Returns the parsed source, if it is a stage's and nothing more; nobody may change what is returned.

    Raises PlanMismatchError naming `where`, the line and what is not allowed there.
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError) as error:
        raise PlanMismatchError(f"{where} is no valid Python: {error}") from None
    defined = _defined_names(tree)
    for node in _walk(tree):
        fault = _fault(node, defined)
        if fault is not None:
            line = getattr(node, "lineno", 1)
            raise PlanMismatchError(
                f"{where}, line {line}: {fault}, which no stage needs; a stage may only define modules out "
                "of torch and compute with tensors"
            )
    return tree


def _walk(node: ast.AST) -> Iterator[ast.AST]:
    """Yields all nodes except those inside a dotted name from torch, and the `getattr` of a call of it."""
    yield node
    if _dotted(node) is None:
        for inner in ast.iter_child_nodes(node):
            if not (_is_getattr(node) and inner is node.func):
                yield from _walk(inner)


def _dotted(node: ast.AST) -> list[str] | None:
    """Returns the parts of a dotted name from torch (["torch", "ops", "aten", "add"]), else None.

    `torch.nn.functional.gelu` is `F.gelu`.
    """
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.insert(0, node.attr)
        node = node.value
    if not isinstance(node, ast.Name) or node.id not in _MODULES:
        return None
    names.insert(0, node.id)
    for long, short in _LONG_NAMES.items():
        if tuple(names[: len(long)]) == long:
            return [short, *names[len(long) :]]
    return names


def _fault(node: ast.AST, defined: set[str]) -> str | None:
    if not isinstance(node, _NODES):
        return f"{type(node).__name__} is used"
    if isinstance(node, ast.Import | ast.ImportFrom) and ast.unparse(node) not in _IMPORTS:
        return f"'{ast.unparse(node)}'"
    dotted = _dotted(node)
    if dotted is not None:
        return None if dotted == ["torch", "autograd", "Function"] else _dotted_fault(dotted)
    if isinstance(node, ast.Name) and node.id == "getattr":
        return "getattr by itself"
    if isinstance(node, ast.Name) and node.id not in defined and node.id not in _BUILTINS:
        return f"the name '{node.id}'" if node.id != "__name__" else None
    if isinstance(node, ast.ClassDef) and node.decorator_list:
        return "a decorator"
    if isinstance(node, ast.FunctionDef):
        decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
        return None if decorators in ([], ["staticmethod"]) else "a decorator"
    if isinstance(node, ast.Attribute):
        return _attribute_fault(node.attr)
    return _getattr_fault(node) if _is_getattr(node) else None


def _is_getattr(node: ast.AST) -> TypeGuard[ast.Call]:
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "getattr"


def _dotted_fault(names: list[str]) -> str | None:
    """Returns what is wrong with a dotted name: its modules in turn, then the rest as attributes."""
    reached: object = _MODULES[names[0]]
    path = names[0]
    for position, name in enumerate(names[1:], start=1):
        if path == "torch.ops":
            return _operator_fault(names)
        if not isinstance(reached, types.ModuleType):
            return next(filter(None, map(_attribute_fault, names[position:])), None)
        path, reached = f"{path}.{name}", getattr(reached, name, None)
        if isinstance(reached, types.ModuleType):
            if path not in _OF_FUNCTIONS | {"torch.ops"}:
                return f"the module '{path}'"
        elif not _is_for_stages(path, reached):
            return f"'{path}'"
    return f"the module '{path}' by itself" if isinstance(reached, types.ModuleType) else None


def _is_for_stages(path: str, value: object) -> bool:
    module, _, name = path.rpartition(".")
    if path in _OF_TORCH:
        return True
    if name.startswith("_") or name in _FILES:
        return False
    if module == "torch":
        return isinstance(value, torch.dtype | torch.layout | torch.memory_format) or name in _COMPUTING
    if module == "nn":
        return isinstance(value, type) and issubclass(value, nn.Module | Tensor)
    return isinstance(value, types.FunctionType | types.BuiltinFunctionType)


def _operator_fault(names: list[str]) -> str | None:
    """Returns what is wrong with torch.ops.namespace.operator.overload."""
    whole = ".".join(names)
    namespace = getattr(torch.ops, names[2], None)
    if not isinstance(namespace, torch._ops._OpNamespace) or not 4 <= len(names) <= 5:
        return f"'{whole}'"
    return f"'{whole}'" if names[3] in _FILES or any(name.startswith("__") for name in names) else None


def _attribute_fault(name: str) -> str | None:
    is_dunder = name.startswith("__") and name != "__init__"
    return f"the attribute '{name}'" if is_dunder or name in WAYS_OUT else None


def _getattr_fault(node: ast.Call) -> str | None:
    name = node.args[1] if len(node.args) == 2 and not node.keywords else None
    if not isinstance(name, ast.Constant) or not isinstance(name.value, str):
        return "getattr without a constant name"
    return _attribute_fault(name.value)


def _defined_names(tree: ast.Module) -> set[str]:
    defined = {"Tensor", "OrderedDict", "self", "spectral_norm", "weight_norm"}
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            defined.add(node.name)
        elif isinstance(node, ast.arg):
            defined.add(node.arg)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            defined.add(node.id)
    # A stage that redefined one of these names would pass the check as something else.
    return {name for name in defined if not name.startswith("__")}
