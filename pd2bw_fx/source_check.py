"""What the source of a stage may consist of: checked before it is written and before it is run.

A stage defines modules out of torch and computes with tensors. Anything else (another import, a file, a
dunder attribute, a module reached through torch) is refused, so that neither a hostile model nor an altered
folder can run code of its own.
"""

from __future__ import annotations

import ast
import types
from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import nn

from pd2bw_fx.errors import PlanMismatchError

_IMPORTS = {
    "from collections import OrderedDict",
    "import torch",
    "import torch.nn.functional as F",
    "from torch import nn",
    "from torch import Tensor",
    "from torch import Tensor, nn",
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
    "True", "False", "staticmethod",
})  # fmt: skip
_ALLOWED_IN_TORCH = frozenset({"torch._assert_async"})
_REFUSED_OF_TORCH = frozenset({"load", "save", "compile", "jit", "hub", "package", "library"})


def check_source(source: str, where: str) -> ast.Module:
    """The parsed source, if it is a stage's and nothing more.

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
    """All nodes, but not the module within torch.autograd.Function, of which nothing else is allowed."""
    yield node
    if not (isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.autograd.Function"):
        for inner in ast.iter_child_nodes(node):
            yield from _walk(inner)


def _fault(node: ast.AST, defined: set[str]) -> str | None:
    if not isinstance(node, _NODES):
        return f"{type(node).__name__} is used"
    if isinstance(node, ast.Import | ast.ImportFrom) and ast.unparse(node) not in _IMPORTS:
        return f"'{ast.unparse(node)}'"
    if isinstance(node, ast.Name) and node.id not in defined and node.id not in _BUILTINS:
        return f"the name '{node.id}'" if node.id != "__name__" else None
    if isinstance(node, ast.ClassDef) and node.decorator_list:
        return "a decorator"
    if isinstance(node, ast.FunctionDef):
        decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
        return None if decorators in ([], ["staticmethod"]) else "a decorator"
    if isinstance(node, ast.Attribute):
        return None if ast.unparse(node) == "torch.autograd.Function" else _attribute_fault(node)
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "getattr":
        return _getattr_fault(node)
    return None


def _attribute_fault(node: ast.Attribute) -> str | None:
    name = node.attr
    if name.startswith("__") and name != "__init__":
        return f"the attribute '{name}'"
    if not isinstance(node.value, ast.Name):
        return None
    module = {"torch": torch, "nn": nn, "F": F}.get(node.value.id)
    if module is None:
        return None
    value = getattr(module, name, None)
    whole = f"{node.value.id}.{name}"
    if whole in _ALLOWED_IN_TORCH:
        return None
    if (
        value is None
        or name.startswith("_")
        or whole in {f"torch.{refused}" for refused in _REFUSED_OF_TORCH}
    ):
        return f"'{whole}'"
    if isinstance(value, types.ModuleType) and whole not in ("torch.ops", "nn.init"):
        return f"the module '{whole}'"
    return None


def _getattr_fault(node: ast.Call) -> str | None:
    name = node.args[1] if len(node.args) == 2 and not node.keywords else None
    if not isinstance(name, ast.Constant) or not isinstance(name.value, str):
        return "getattr without a constant name"
    owner = node.args[0]
    if isinstance(owner, ast.Name) and owner.id in ("torch", "nn", "F"):
        return f"getattr of '{owner.id}'"
    return f"the attribute '{name.value}'" if name.value.startswith("__") else None


def _defined_names(tree: ast.Module) -> set[str]:
    defined = {"torch", "nn", "F", "Tensor", "OrderedDict", "self"}
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            defined.add(node.name)
        elif isinstance(node, ast.arg):
            defined.add(node.arg)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            defined.add(node.id)
    # A stage that gave one of these names a meaning of its own would pass for something else.
    return {name for name in defined if not name.startswith("__")}
