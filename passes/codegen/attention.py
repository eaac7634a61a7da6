"""Calls of nn.MultiheadAttention, whose arguments are read off the operators of its forward.

    linear(x, in_proj_weight)                          attn(x, x, x)
    linear(x, in_proj_weight[:E]), linear(y, [E:])     attn(x, y, y)
    three products, or weights for each                attn(x, y, z)

    scaled_dot_product_attention                       need_weights=False
    softmax; mean over the heads                       need_weights=True, which is the default
    softmax; no mean                                   average_attn_weights=False

Masks have the names under which the author passes them. The mask beside `is_causal=True` is not in the
program, as torch only asks whether there is one: any is right, and the call makes the one that is meant.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import fx, nn

from .scopes import Scope

if TYPE_CHECKING:
    from .stage_tree import StageTree

_ATEN = torch.ops.aten
_ATTENTION = _ATEN.scaled_dot_product_attention.default
_MASKS = ("key_padding_mask", "attn_mask")
_ENTERING = {_ATEN.transpose.int, _ATEN.unsqueeze.default}  # what the forward does before it projects


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """What a call is given: `masks` by parameter, and the options that have not their default.

    `causal` is the number of rows of the mask beside `is_causal=True`, 0 without that.
    """

    query: fx.Node
    key: fx.Node
    value: fx.Node
    masks: tuple[tuple[str, fx.Node], ...]
    options: tuple[str, ...]
    causal: int

    @property
    def arguments(self) -> list[fx.Node]:
        return [self.query, self.key, self.value, *(node for _, node in self.masks)]

    def spelled(self, texts: Sequence[str], device: str) -> list[str]:
        """Returns the source of the arguments, given that of each tensor."""
        masks = [f"{name}={text}" for (name, _), text in zip(self.masks, texts[3:], strict=True)]
        if self.causal:
            made = f"nn.Transformer.generate_square_subsequent_mask({self.causal}, device={device})"
            masks = [f"attn_mask={made}", "is_causal=True"]
        return [*texts[:3], *masks, *self.options]


def attention_call(tree: StageTree, call: Scope, layer: nn.MultiheadAttention) -> AttentionCall | None:
    """Returns what a call is given, or None if it cannot be printed as a call of the layer.

    The layer returns its output and its weights, and the output has to be read.
    """
    projected = _given_to_projections(tree, call)
    options = None if projected is None else _options(tree, call, layer)
    if projected is None or options is None:
        return None
    attended = [node for node in call.nodes if node.target is _ATTENTION]
    rows = tree.shape(projected[0])[-2 if layer.batch_first else 0] if any(map(_is_causal, attended)) else 0
    masks = _masks(call, [node for node in tree.reads(call) if node not in projected])
    if masks is None or not isinstance(rows, int) or (rows and masks):
        return None
    return AttentionCall(*projected, masks=masks, options=options, causal=rows)


def _masks(call: Scope, given: Sequence[fx.Node]) -> tuple[tuple[str, fx.Node], ...] | None:
    """Returns the masks by parameter, or None if that cannot be told.

    Of a buffer it is not recorded how it is passed. Torch only expands what is the padding of the keys.
    """
    has_padding = any(node.target is _ATEN.expand.default for node in call.nodes)
    likely = [name for name in _MASKS if has_padding or name != "key_padding_mask"]
    own = [call.argument(node).name for node in given]
    left = [name for name in likely if name not in own]
    names = [name or left[0] for name in own] if len(left) == own.count("") == 1 else own
    if set(names) - set(likely) or len(set(names)) < len(names) or has_padding != (_MASKS[0] in names):
        return None
    found = dict(zip(names, given, strict=True))
    return tuple((name, found[name]) for name in _MASKS if name in found)


def _given_to_projections(tree: StageTree, call: Scope) -> tuple[fx.Node, fx.Node, fx.Node] | None:
    """Returns query, key and value.

    Torch projects together what is one tensor, and sums differ in their rounding: where the operators do so,
    the values must be the same, and where they do not, other ones.
    """
    inside, reads = set(call.nodes), tree.reads(call)
    products = [node for node in call.nodes if node.target is _ATEN.linear.default]
    given = [_from_outside(product, inside) for product in products[:-1]]  # the last one projects the output
    if not set(given) <= set(reads):
        return None
    match given:
        case [fx.Node() as query]:
            return query, query, query
        case [fx.Node() as query, fx.Node() as key] if query is not key:
            return query, key, key
        case [fx.Node() as query, fx.Node() as key, fx.Node() as value]:
            has_weights_of_its_own = isinstance(products[0].args[1], fx.Node) and (
                products[0].args[1].op == "get_attr"
            )
            return (query, key, value) if has_weights_of_its_own or key is not value else None
    return None


def _from_outside(product: fx.Node, inside: set[fx.Node]) -> fx.Node | None:
    made: Any = product.args[0]
    while made in inside and made.target in _ENTERING:
        made = made.args[0]
    return made if isinstance(made, fx.Node) else None


def _options(tree: StageTree, call: Scope, layer: nn.MultiheadAttention) -> tuple[str, ...] | None:
    """Returns the options that have not their default, or None if the layer would do something else."""
    dropped = [node for node in call.nodes if node.target is _ATEN.dropout.default]
    attended = [node for node in call.nodes if node.target is _ATTENTION]
    shares = [node for node in call.nodes if node.target is _ATEN.softmax.int]
    output, *weights = tree.gives(call)
    if call.result(output).place != 0 or [call.result(node).place for node in weights] not in ([], [1]):
        return None
    if len(attended) == 1 and not shares and not dropped and not weights:
        return ("need_weights=False",) if _given(attended[0], "dropout_p") == layer.dropout else None
    rates = [node.args[1:] for node in dropped]
    if len(shares) != 1 or attended or rates != ([(layer.dropout, True)] if layer.dropout else []):
        return None
    return ("average_attn_weights=False",) if any(map(_is_of_heads, weights)) else ()


def _is_causal(attended: fx.Node) -> bool:
    return _given(attended, "is_causal") is True


def _given(attended: fx.Node, name: str) -> Any:
    """Returns what an operator is given as an argument of this name."""
    for place, argument in enumerate(_ATTENTION._schema.arguments):
        if argument.name == name:
            default = attended.kwargs.get(name, argument.default_value)
            return attended.args[place] if place < len(attended.args) else default
    return None


def _is_of_heads(weights: fx.Node) -> bool:
    """Whether the weights are those of each head, and not their mean."""
    made: Any = weights
    while made.target in (_ATEN.squeeze.dim, _ATEN.squeeze.default):
        made = made.args[0]
    return made.target not in (_ATEN.mean.dim, _ATEN.mean.default)
