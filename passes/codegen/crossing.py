"""Names the values that cross between stages.

A value has the name that the author or its reader gives it. Where another value has that name too, one that
the author puts into a list is called after the list, and those that unlike modules make after the modules:

x = self.block(x)                            encoder: hidden = self.layer(hidden)
skips.append(x)       x, x_2 -> skip, x      decoder: hidden = self.layer(hidden)
x = self.pool(x)                             hidden, hidden_2 -> encoder_hidden, decoder_hidden
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence, Set

from torch import fx

from pd2bw_fx.names import free_name

from .cut import Cut
from .literals import identifier
from .naming import argument_name
from .put_away import name_in_list
from .scopes import Line, line_at, module_calls
from .stage_tree import StageTree

_WORD = re.compile(r"[A-Za-z_]+")  # a module that is one of several alike has a number


def names_of_what_crosses(cuts: Sequence[Cut], trees: Sequence[StageTree]) -> dict[str, str]:
    """Names each value that a stage gives, in all stages that have it.

    No stage gives, or takes, two values of one name.
    """
    wanted: dict[fx.Node, str] = {}
    beside: dict[fx.Node, list[fx.Node]] = {}  # what must not have the same name
    for stage, tree in zip(cuts, trees, strict=True):
        given = tree.gives(tree.root)
        for node in given:
            if node in wanted:
                continue  # passed on
            beside[node] = [*given, *(other for at in stage.targets[node.name] for other in cuts[at].inputs)]
            name = stage.model_outputs.get(node.name) or argument_name(tree, tree.root, node)
            wanted[node] = identifier(name)
    fixed = {node for stage in cuts for node in stage.outputs if node.name in stage.model_outputs}
    several = {node for nodes in _of_one_name(wanted, beside, fixed).values() for node in nodes}
    for stage in cuts:
        wanted |= _after_lists(stage, wanted, several, fixed)
    wanted |= _after_modules(_of_one_name(wanted, beside, fixed))
    return _numbered(cuts, trees, wanted, beside)


def _of_one_name(
    wanted: Mapping[fx.Node, str], beside: Mapping[fx.Node, Sequence[fx.Node]], fixed: Set[fx.Node]
) -> dict[str, list[fx.Node]]:
    """Returns the names that several values beside one another want, with the values."""
    found: dict[str, list[fx.Node]] = defaultdict(list)
    for node, name in wanted.items():
        if node not in fixed and any(wanted.get(o) == name for o in beside[node] if o is not node):
            found[name].append(node)
    return {name: nodes for name, nodes in found.items() if len(nodes) > 1}


def _after_lists(
    stage: Cut, wanted: Mapping[fx.Node, str], several: Set[fx.Node], fixed: Set[fx.Node]
) -> dict[fx.Node, str]:
    """Renames values in lists whose name another value has too: beside them, or later in the stage."""
    found: dict[fx.Node, str] = {}
    for place, node in enumerate(stage.nodes):
        if node not in wanted or node in fixed:
            continue
        listed = _name_in_list(node, wanted[node])
        if listed is None:
            continue
        later = (_line_of(other, wanted[node]) for other in stage.nodes[place + 1 :])
        if node in several or any(line is not None for line in later):
            found[node] = listed
    return found


def _name_in_list(node: fx.Node, name: str) -> str | None:
    line = _line_of(node, name)
    return None if line is None else name_in_list(line, name)


def _line_of(node: fx.Node, name: str) -> Line | None:
    """Returns the outermost line that assigns this name alone, where the value was made."""
    lines = (line_at(node, depth) for depth in range(len(module_calls(node)) + 1))
    return next((line for line in lines if line is not None and line.assigned == (name,)), None)


def _after_modules(several: Mapping[str, Sequence[fx.Node]]) -> dict[fx.Node, str]:
    found: dict[fx.Node, str] = {}
    for name, nodes in several.items():
        paths = [module_calls(node)[-1][1].split(".") if module_calls(node) else [] for node in nodes]
        parts = next((row for row in zip(*paths, strict=False) if len(set(row)) > 1), ())
        if len(set(parts)) == len(nodes) and all(_WORD.fullmatch(part) for part in parts):
            found |= {node: identifier(f"{part}_{name}") for node, part in zip(nodes, parts, strict=True)}
    return found


def _numbered(
    cuts: Sequence[Cut],
    trees: Sequence[StageTree],
    wanted: Mapping[fx.Node, str],
    beside: Mapping[fx.Node, Sequence[fx.Node]],
) -> dict[str, str]:
    names: dict[str, str] = {}
    for stage, tree in zip(cuts, trees, strict=True):
        for node in tree.gives(tree.root):
            if node.name in names:
                continue
            taken = {names[other.name] for other in beside[node] if other.name in names}
            taken |= {identifier(other.name) for other in beside[node] if other.op == "placeholder"}
            name = free_name(wanted[node], taken)
            if name != wanted[node]:  # a numbered name must not be that of a value the stage takes
                taken |= {names[other.name] for other in stage.inputs if other.name in names}
                name = free_name(wanted[node], taken)
            names[node.name] = name
    return names
