"""What the author's statements assign, read from the text that a traced operator keeps."""

from __future__ import annotations

import ast
import functools

from .literals import identifier

_SEVERAL = (ast.List, ast.Dict, ast.Set, ast.Tuple, ast.ListComp, ast.DictComp, ast.SetComp, ast.GeneratorExp)


def assigned_names(code: str) -> tuple[str, ...]:
    """Returns the names that a statement assigns: "q, k = f(x)" -> ("q", "k"), "self.h = f(x)" -> ("h",).

    There are none in other statements, for the name of a list, a dict or an object of a class, and on a line
    of several statements: a traced node does not say which of them it is from.
    """
    statement = parsed_statement(code)
    if isinstance(statement, ast.Assign):
        target = statement.targets[0]
        if isinstance(target, ast.Name) and _holds_several(statement.value):
            return ()
    elif isinstance(statement, ast.AnnAssign | ast.AugAssign):
        target = statement.target
    else:
        return ()
    targets = target.elts if isinstance(target, ast.Tuple) else [target]
    found = tuple(map(_name_of_target, targets))
    if not any(found):
        return ()
    return tuple(identifier(name) if name not in ("", "_") else "_" for name in found)


def _holds_several(value: ast.expr) -> bool:
    """Whether a value is a list or the like, or an object of a class: `Output(logits, loss)`."""
    called = value.func if isinstance(value, ast.Call) else None
    name = called.id if isinstance(called, ast.Name) else ""
    return isinstance(value, _SEVERAL) or (name[:1].isupper() and not name.isupper())


def further_targets(code: str) -> tuple[str, ...]:
    """Returns the other names that a statement gives its value: "x = x0 = f(y)" -> ("x0",)."""
    statement = parsed_statement(code)
    targets = statement.targets[1:] if isinstance(statement, ast.Assign) else []
    return tuple(identifier(target.id) for target in targets if isinstance(target, ast.Name))


def assigns_attributes(code: str) -> bool:
    """Whether a statement assigns attributes of the module alone: "self.h = f(x)"."""
    statement = parsed_statement(code)
    target = statement.targets[0] if isinstance(statement, ast.Assign) else None
    targets = target.elts if isinstance(target, ast.Tuple) else [target]
    return all(isinstance(each, ast.Attribute) and _name_of_target(each) != "" for each in targets)


def _name_of_target(target: ast.expr) -> str:
    """Returns a name, or that of an attribute of the module; "" for an element and the like."""
    if isinstance(target, ast.Attribute) and isinstance(target.value, ast.Name) and target.value.id == "self":
        return target.attr.strip("_")
    return target.id if isinstance(target, ast.Name) else ""


def state_names(code: str) -> tuple[str, ...]:
    """Returns the names of what a recurrent layer returns: `out, (h, c) = f(x)` -> ("out", "h", "c").

    "_" stands for a result without a name. For `out, state = f(x)` there are two names.
    """
    statement = parsed_statement(code)
    target = statement.targets[0] if isinstance(statement, ast.Assign) else None
    if not isinstance(target, ast.Tuple):
        return ()
    flat = [inner for part in target.elts for inner in (part.elts if isinstance(part, ast.Tuple) else [part])]
    names = [_name_of_target(name) or "_" for name in flat]
    return tuple(name if name == "_" else identifier(name) for name in names)


def filled_name(code: str) -> str | None:
    """Returns the name whose elements a statement assigns: "out[:, t] = v" -> "out"."""
    statement = parsed_statement(code)
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
        target = statement.targets[0]
    elif isinstance(statement, ast.AugAssign):
        target = statement.target
    else:
        return None
    if not isinstance(target, ast.Subscript) or not isinstance(target.value, ast.Name):
        return None
    return identifier(target.value.id)


def appended_list(code: str) -> str | None:
    """Returns the list that a statement puts a value into, or makes, or None.

    It is "outs" for "outs.append(x)", "outs += [x]" and "outs = [f(x) for x in y]".
    """
    statement = parsed_statement(code)
    if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.List | ast.ListComp):
        held: ast.expr = statement.targets[0]
    elif isinstance(statement, ast.AugAssign) and isinstance(statement.value, ast.List):
        held = statement.target
    elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
        called = statement.value.func
        if not isinstance(called, ast.Attribute) or called.attr != "append":
            return None
        held = called.value
    else:
        return None
    return identifier(held.id) if isinstance(held, ast.Name) else None


def returns_a_list(code: str) -> bool:
    """Whether a statement is like "return [f(x) for x in y]"."""
    statement = parsed_statement(code)
    return isinstance(statement, ast.Return) and isinstance(statement.value, ast.List | ast.ListComp)


def sums_over(code: str) -> bool:
    """Whether a statement has a sum like "sum(f(x) for x in y)"."""
    statement = parsed_statement(code)
    return any(
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "sum"
        and any(isinstance(over, ast.GeneratorExp | ast.ListComp) for over in node.args[:1])
        for node in ast.walk(statement or ast.Pass())
    )


_JOINING = {"stack", "cat", "concat", "concatenate", "hstack", "vstack", "dstack"}


def joined_list(code: str) -> str | None:
    """Returns the list that a statement makes one tensor of: "x = torch.stack(outs, dim=1)" -> "outs"."""
    statement = parsed_statement(code)
    for node in [] if statement is None else ast.walk(statement):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in _JOINING:
            held = node.args[0] if node.args else None
            held = held.value if isinstance(held, ast.Subscript) else held  # outs[::-1]
            if isinstance(held, ast.Name):
                return identifier(held.id)
    return None


def makes_one_by_one(code: str) -> bool:
    """Whether a statement assigns or returns several values, each made by an expression or a round."""
    statement = parsed_statement(code)
    if isinstance(statement, ast.Return):
        return isinstance(statement.value, ast.Tuple)
    if not isinstance(statement, ast.Assign) or not isinstance(statement.targets[0], ast.Tuple):
        return False
    value = statement.value
    is_map = isinstance(value, ast.Call) and isinstance(value.func, ast.Name) and value.func.id == "map"
    return is_map or isinstance(value, ast.Tuple | ast.GeneratorExp | ast.ListComp)


def names_of_what_it_makes(code: str, names: tuple[str, ...]) -> tuple[str, ...]:
    """Returns those names of a statement's values that are new: the last two of `return q, kv[0], kv[1]`."""
    value = getattr(parsed_statement(code), "value", None)
    if not isinstance(value, ast.Tuple) or len(value.elts) != len(names):
        return names
    return tuple(n for n, entry in zip(names, value.elts, strict=True) if not isinstance(entry, ast.Name))


PARTS = {
    "chunk", "split", "split_with_sizes", "tensor_split", "tolist", "unbind", "unsafe_chunk", "unsafe_split",
}  # fmt: skip


def takes_apart(code: str, operator: str) -> bool:
    """Whether a statement assigns names to the parts that this operator returns (`q, k = x.chunk(2)`)."""
    statement = parsed_statement(code)
    value = getattr(statement, "value", None)
    if isinstance(value, ast.Subscript):  # `.topk(2)[1]`
        value = value.value
    if not isinstance(value, ast.Call):
        return False
    called = value.func.attr if isinstance(value.func, ast.Attribute) else ast.unparse(value.func)
    is_its = called.lower() in operator.lower() or called == "apply"  # the call of an autograd function
    return is_its or {called, operator} <= PARTS


def drops_always(code: str) -> bool:
    """Whether a statement's dropout is a function of torch that drops in evaluation too.

    It does so by default: `F.dropout(x, 0.5)`, `F.dropout(x, 0.5, training=True)`.
    """
    statement = parsed_statement(code)
    calls = [] if statement is None else [node for node in ast.walk(statement) if isinstance(node, ast.Call)]
    dropouts = [call for call in calls if ast.unparse(call.func) in _DROPOUTS]
    modes = [
        mode
        for call in dropouts
        for mode in (*call.args[2:3], *(word.value for word in call.keywords if word.arg == "training"))
    ]
    return bool(dropouts) and all(isinstance(mode, ast.Constant) and mode.value is True for mode in modes)


_DROPOUTS = {f"{module}.dropout" for module in ("F", "functional", "nn.functional", "torch.nn.functional")}


def calls_one(code: str, path: str) -> bool:
    """Whether a statement is a call of the module at this path: `h, c = self.rnn(x)`, `h, c = layer(x)`."""
    value = getattr(parsed_statement(code), "value", None)
    if not isinstance(value, ast.Call):
        return False
    called = value.func
    return not isinstance(called, ast.Attribute) or called.attr == path.rpartition(".")[2]


@functools.cache
def parsed_statement(code: str) -> ast.stmt | None:
    """Returns the one statement of a line that computes something, also in a loop or a condition.

    For `for layer in layers: x = layer(x)` it is the inner one, and for `h = f(x); outs.append(h)` the first.
    """
    try:
        body = ast.parse(code).body
        while len(body) == 1 and isinstance(body[0], ast.For | ast.If | ast.With | ast.While):
            body = body[0].body
    except (SyntaxError, ValueError):
        return None
    found = body if len(body) == 1 else [each for each in body if not _only_hands_on(each)]
    return found[0] if len(found) == 1 else None


def _only_hands_on(statement: ast.stmt) -> bool:
    """Whether a statement gives a value another name or puts it into a list: `y = x`, `outs.append(x)`."""
    if isinstance(statement, ast.Assign):
        return isinstance(statement.value, ast.Name | ast.Constant)
    called = statement.value if isinstance(statement, ast.Expr) else None
    if not isinstance(called, ast.Call) or not isinstance(called.func, ast.Attribute):
        return False
    return called.func.attr == "append" and all(isinstance(value, ast.Name) for value in called.args)
