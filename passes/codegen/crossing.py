"""Names the values that cross between stages.

A value has the name that the author or its reader gives it. Where another value has that name too, one that
is put into a list is called after the list; one in the middle of a module is called as the author does
there; one that is kept under a second name has that; those that unlike modules make are called after these:

x = self.block(x)                            encoder: hidden = self.layer(hidden)
skips.append(x)       x, x_2 -> skip, x      decoder: hidden = self.layer(hidden)
x = self.pool(x)                             hidden, hidden_2 -> encoder_hidden, decoder_hidden

residual = x                                 x = self.attention(x)     in it: scores = q @ k.mT
x = self.norm(x)      x, x_2 -> residual, x                            x, x_2 -> x, scores
"""

from __future__ import annotations

import itertools
import re
from collections import defaultdict
from collections.abc import Mapping, Sequence, Set

from torch import fx

from pd2bw_fx.names import free_name

from .argument_names import argument_name
from .cut import Cut
from .literals import identifier
from .naming import depth_within, name_where_made, result_name
from .put_away import name_in_list
from .scopes import Line, line_at, module_calls
from .second_names import second_name
from .stage_tree import StageTree
from .statements import further_targets

_WORD = re.compile(r"[A-Za-z_]+")  # a module that is one of several alike has a number


def names_of_what_crosses(cuts: Sequence[Cut], trees: Sequence[StageTree]) -> dict[str, str]:
    """Names each value that a stage gives, in all stages that have it.

    No stage gives, or takes, two values of one name. An input of the model keeps its own.
    """
    wanted: dict[fx.Node, str] = {}
    beside: dict[fx.Node, list[fx.Node]] = {}  # what must not have the same name
    for stage, tree in zip(cuts, trees, strict=True):
        given = tree.gives(tree.root)
        for node in given:
            if node in wanted:
                continue  # passed on
            beside[node] = [*given, *(other for at in stage.targets[node.name] for other in cuts[at].inputs)]
            returned = None if node.op == "placeholder" else stage.model_outputs.get(node.name)
            wanted[node] = identifier(returned or argument_name(tree, tree.root, node))
    fixed = {node for stage in cuts for node in stage.outputs if node.name in stage.model_outputs}
    several = {node for nodes in _of_one_name(wanted, beside, fixed).values() for node in nodes}
    for stage, tree in zip(cuts, trees, strict=True):
        wanted |= _after_lists(stage, tree, wanted, several, fixed)
        wanted |= _by_further_targets(stage, cuts, trees, wanted, fixed)
    for stage, tree in zip(cuts, trees, strict=True):
        wanted |= _where_they_are_made(stage, tree, _of_one_name(wanted, beside, fixed))
        wanted |= _by_second_names(stage, tree, _of_one_name(wanted, beside, fixed))
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
    stage: Cut,
    tree: StageTree,
    wanted: Mapping[fx.Node, str],
    several: Set[fx.Node],
    fixed: Set[fx.Node],
) -> dict[fx.Node, str]:
    """Renames values in lists whose name another value has too: beside them, or later in the stage."""
    found: dict[fx.Node, str] = {}
    for place, node in enumerate(stage.nodes):
        if node not in wanted or node in fixed:
            continue
        made = _line_of(tree, node, wanted[node])
        listed = None if made is None else name_in_list(made, wanted[node])
        if listed is None:
            continue
        later = (_line_of(tree, other, wanted[node]) for other in stage.nodes[place + 1 :])
        if node in several or any(line is not None for line in later):
            found[node] = listed
    return found


def _by_further_targets(
    stage: Cut,
    cuts: Sequence[Cut],
    trees: Sequence[StageTree],
    wanted: Mapping[fx.Node, str],
    fixed: Set[fx.Node],
) -> dict[fx.Node, str]:
    """Renames what `x = x0 = f(y)` makes, where the stage that reads it gives the first name to another."""
    found: dict[fx.Node, str] = {}
    for node in stage.nodes:
        if node in fixed or node not in wanted:
            continue
        made = _line_of(trees[stage.stage], node, wanted[node])
        further = () if made is None else further_targets(made.code)
        readers = stage.targets.get(node.name, ())
        reading = ((trees[at], other) for at in readers for other in cuts[at].nodes)
        if further and any(_line_of(tree, other, wanted[node]) is not None for tree, other in reading):
            found[node] = further[0]
    return found


def _where_they_are_made(
    stage: Cut, tree: StageTree, several: Mapping[str, Sequence[fx.Node]]
) -> dict[fx.Node, str]:
    """Renames what a call makes and does not return."""
    renamed = {node for nodes in several.values() for node in nodes}
    found: dict[fx.Node, str] = {}
    for node in stage.nodes:
        if node in renamed and (depth := depth_within(tree, node)) > 0:
            found[node] = identifier(name_where_made(tree, node, depth) or result_name(node, node))
    return found


def _by_second_names(
    stage: Cut, tree: StageTree, several: Mapping[str, Sequence[fx.Node]]
) -> dict[fx.Node, str]:
    """Renames values whose name the author gives to a later value of the stage; the last keeps its own."""
    found: dict[fx.Node, str] = {}
    for name, nodes in several.items():
        own = [node for node in stage.nodes if node in nodes]
        for node in own[:-1] or own:
            made = _line_of(tree, node, name)
            if made is None:
                continue
            later = stage.nodes[stage.nodes.index(node) + 1 :]
            within = depth_within(tree, node)
            lines = [
                line for other in later for line in _lines_of(other, name, _depth_beside(node, other, within))
            ]
            names = (second_name(line, name, made, lines[:at]) for at, line in enumerate(lines))
            if (second := next(filter(None, names), None)) is not None:
                found[node] = second.name
    return found


def _depth_beside(node: fx.Node, other: fx.Node, within: int) -> int:
    """Returns the depth from which on the bodies around `other` may have a value made at depth `within`.

    The bodies around both that are further out do not have it: only a cut takes it out of its call.
    """
    calls = zip(module_calls(node)[:within], module_calls(other), strict=False)
    return min(within, 1 + sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], calls)))


def _line_of(tree: StageTree, node: fx.Node, name: str) -> Line | None:
    """Returns the outermost line that gives this name to this value alone."""
    return next(iter(_lines_of(node, name, depth_within(tree, node))), None)


def _lines_of(node: fx.Node, name: str, depth: int = 0) -> list[Line]:
    """Returns the lines that assign this name alone and are being run where a value is made, outer first."""
    lines = (line_at(node, inner) for inner in range(depth, len(module_calls(node)) + 1))
    return [line for line in lines if line is not None and line.assigned == (name,)]


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
            inputs = (other for other in beside[node] if other.op == "placeholder" and other is not node)
            taken |= {identifier(other.name) for other in inputs}
            name = free_name(wanted[node], taken)
            if name != wanted[node]:  # a numbered name must not be that of a value the stage takes
                taken |= {names[other.name] for other in stage.inputs if other.name in names}
                name = free_name(wanted[node], taken)
            names[node.name] = name
    return names
