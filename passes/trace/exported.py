"""The main front end: torch.export, non-strict, with a named batch dimension and lengths, or at one size.

Some models cannot be exported as they are and can in another way. Each function below tries one such way, and
calls the next function for every try:

    export                              open lengths: again, with sizes of the example as unknown ones
      _checked_export                   refuses a program that would be wrong
        _refusing_unseen_choices        `x.any().item() is True`: once with True, once with False
          _with_size_fallbacks          sizes that torch cannot solve for: with bounds that torch suggests,
                                        for the sizes that the guards hold for (_for_sizes_of_guards), or up
                                        to the largest batch that the model answers its conditions alike for
            _retrying_as_uncompiled     a model that fails only where it knows that it is compiled
              _retrying_with_foreign_parameters    parameters that a forward has from elsewhere
                _retrying_with_saved_values        derivatives in a forward, of what operators have saved
                  _export_once          torch.export.export, under all patches of `while_tracing`
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import fx
from torch.export import Dim, ExportedProgram
from torch.utils._sympy.numbers import IntInfinity

from pd2bw_fx.errors import Pd2bwError, TraceError
from pd2bw_fx.less_work import do_less_work
from pd2bw_fx.recurrent_operators import run_one_step
from pd2bw_fx.size_range import SizeRange
from pd2bw_fx.source_check import NAMESPACES_OF_TORCH

from .checks.parameter_memory import parameter_in_memory_of, require_untrained
from .checks.second_call import require_the_same_again
from .checks.tensor_attributes import require_none_read
from .inputs import FlatArguments
from .patches.below_autograd import trace_maps_below_autograd
from .patches.compiling import answer_is_compiling, is_raised_by_the_model
from .patches.conditions import UnseenChoiceError, intercept_boolean_items
from .patches.derivatives import DerivativeError
from .patches.detached_data import DataIsDetached
from .patches.parameters_elsewhere import ParametersReadInstead, in_their_modules
from .patches.saved_values import find_saved_values
from .patches.size_answers import SizeAnswers, largest_batch_answered_alike
from .patches.symbolic_shapes import ignore_example_sizes
from .patches.while_tracing import while_tracing
from .program import Program
from .size_guards import (
    SMALLEST,
    bounded_as_suggested,
    drop_guards_that_hold,
    sizes_up_to_an_end,
    sizes_where_all_hold,
)
from .source_lines import line_of
from .torch_messages import BATCH_NAME, BATCH_VIOLATED
from .vmap_regions import write_out_vmap

OF_GAMMAS = (
    "it made of Gammas, since torch traces no gradient of Beta and Dirichlet: of "
    "g = Gamma(concentration, torch.ones(())).rsample() it is g / g.sum(-1, keepdim=True)"
)

_NO_END = 2**62  # what torch takes for a bound of a size beyond this is where its numbers end
_RUNNING_PARTS = {
    "cond": "torch.cond",
    "while_loop": "torch.while_loop",
    "map_impl": "torch's map",
    "scan": "torch's scan",
    "associative_scan": "torch's associative_scan",
    "flex_attention": "flex_attention",
}


def export(program: Program, batch_size: int | None, *, with_lengths: bool = False) -> ExportedProgram:
    """Exports the program, with an open batch size where `batch_size` says which size is the batch's.

    `with_lengths` opens the lengths of token sequences too. Raises TraceError for a model whose trace would
    be wrong, and whatever torch raises for one that it cannot trace.
    """
    lengths = program.flat.lengths(batch_size) if with_lengths and batch_size is not None else {}
    if with_lengths and not lengths:
        raise ValueError("no input is a batch of sequences: whole numbers of shape (batch, length)")
    try:
        return _checked_export(program, batch_size, lengths)
    except Pd2bwError:
        raise
    except (ValueError, torch._dynamo.exc.UserError) as error:  # the model fixes a length
        if not lengths:
            raise
        with ignore_example_sizes():
            try:
                return _checked_export(program, batch_size, lengths)
            except Exception:
                raise error from None


def _checked_export(program: Program, batch_size: int | None, lengths: Mapping[str, str]) -> ExportedProgram:
    """Exports the program, and raises TraceError for one that stages could not reproduce."""
    exported = _refusing_unseen_choices(program, batch_size, lengths)
    _require_open(exported, program, lengths)
    _require_single_operators(exported)
    _require_no_generator(exported)
    require_none_read(exported.constants.values(), program.model)
    if program.watch.custom_functions:
        raise TraceError(_custom_function_message(program.watch.custom_functions[0]))
    require_the_same_again(
        program, _text(exported), lambda: _text(_with_size_fallbacks(program, batch_size, lengths))
    )
    return exported


def _refusing_unseen_choices(
    program: Program, batch_size: int | None, lengths: Mapping[str, str]
) -> ExportedProgram:
    """Exports the program; raises UnseenChoiceError where `x.any().item() is True` chooses between two ways.

    What a trace gives there is neither True nor False, and nothing shows that it is asked. So the program is
    traced with each of the two answers as well, and refused where these traces differ.
    """
    if program.options.conditions.are_any:  # the example has answered
        return _with_size_fallbacks(program, batch_size, lengths)
    with intercept_boolean_items() as asked:
        exported = _with_size_fallbacks(program, batch_size, lengths)
    if not asked:
        return exported
    ways = []
    for truth in (True, False):
        with intercept_boolean_items(truth), suppress(Exception):  # on that way the model may well raise
            ways.append(
                [str(node.target) for node in _with_size_fallbacks(program, batch_size, lengths).graph.nodes]
            )
    if len(ways) < 2 or ways[0] != ways[1]:
        raise UnseenChoiceError(f"chooses a way by values, which has no answer in a trace, at {asked[0]}")
    return exported


def _require_single_operators(exported: ExportedProgram) -> None:
    """Raises TraceError for an operator that runs parts of the model: no stage can be cut within it."""
    for module in exported.graph_module.modules():
        for node in module.graph.nodes if isinstance(module, fx.GraphModule) else ():
            name = getattr(node.target, "__name__", "")
            if isinstance(node.target, torch._ops.HigherOrderOperator) and name in _RUNNING_PARTS:
                raise TraceError(
                    f"the model calls {_RUNNING_PARTS[name]} ({line_of(node)}), which runs parts of the "
                    "model by itself, and no stage could be cut there; expected operators alone: choose "
                    "between values with torch.where, write loops in Python or with torch.vmap, and use "
                    "scaled_dot_product_attention"
                )


def _require_no_generator(exported: ExportedProgram) -> None:
    """Raises TraceError for draws from a generator that the model keeps: each stage would need part of it."""
    if any(isinstance(constant, torch.Generator) for constant in exported.constants.values()):
        drawing = next(node for node in exported.graph.nodes if node.kwargs.get("generator") is not None)
        raise TraceError(
            f"the model draws from a torch.Generator of its own ({line_of(drawing)}); leave generator= out: "
            "while it trains, the seed, the microbatch and the place of an operator decide what it draws"
        )


def foreign_operators(exported: ExportedProgram) -> list[str]:
    """Returns operators that a library other than torch registered, which whoever runs the program needs."""
    modules = [module for module in exported.graph_module.modules() if isinstance(module, fx.GraphModule)]
    targets = [node.target for module in modules for node in module.graph.nodes]
    names = [str(target._schema.name) for target in targets if isinstance(target, torch._ops.OpOverload)]
    return sorted({name for name in names if name.partition("::")[0] not in NAMESPACES_OF_TORCH})


def _with_size_fallbacks(
    program: Program, batch_size: int | None, lengths: Mapping[str, str]
) -> ExportedProgram:
    """Exports the program; where torch cannot solve for an open size, again for fewer sizes."""
    tensors, shapes = program.flat.tensors, None
    program.options.multiple_of = 1
    if batch_size is not None:
        shapes = {"tensors": open_sizes(program.flat, batch_size, lengths)}
        if batch_size == 1:  # torch takes a size of 1 for a constant
            tensors = _doubled(program.flat)
    try:
        return _retrying_as_uncompiled(program, tensors, shapes)
    except torch._dynamo.exc.UserError as error:  # not imported above: dynamo takes a second
        if (bounded := bounded_as_suggested(str(error), shapes)) is not None:
            answers = program.answers
            try:
                return _retrying_as_uncompiled(program, tensors, bounded)
            except torch._dynamo.exc.UserError:
                program.answers = answers
                exported = _for_sizes_up_to_an_end(program, tensors, batch_size, lengths)
                if exported is None:
                    raise
                return exported
        if batch_size is not None and not lengths:
            sizes = sizes_where_all_hold(program.answers.guards, batch_size)
            exported = _for_sizes_of_guards(program, tensors, batch_size, sizes)
            if exported is not None:
                return exported
        # Torch cannot solve for the batch where a number is made of it by more than a product.
        is_bounded = batch_size is not None and str(error).startswith(BATCH_VIOLATED)
        largest = (
            largest_batch_answered_alike(program.answers, batch_size) if batch_size and is_bounded else None
        )
        if largest is None or largest <= SMALLEST:
            raise
    except AssertionError as error:
        # Nor where a multiple of the batch is bounded.
        if batch_size is None or BATCH_NAME not in str(error):
            raise
        exported = _for_sizes_up_to_an_end(program, tensors, batch_size, lengths)
        if exported is not None:
            return exported
        largest = max(largest_batch_answered_alike(program.answers, batch_size) or batch_size, SMALLEST + 1)
    assert batch_size is not None
    bounded = {"tensors": open_sizes(program.flat, batch_size, lengths, largest)}
    return _retrying_as_uncompiled(program, tensors, bounded)


def _for_sizes_up_to_an_end(
    program: Program,
    tensors: tuple[torch.Tensor, ...],
    batch_size: int | None,
    lengths: Mapping[str, str],
) -> ExportedProgram | None:
    """Exports once more, for the batch sizes up to the first one that the last trace's guards forbid."""
    if batch_size is None or lengths:
        return None
    sizes = sizes_up_to_an_end(program.answers.guards, batch_size)
    if sizes is None or sizes.most is None or sizes.most <= SMALLEST:
        return None
    return _for_sizes_of_guards(program, tensors, batch_size, sizes)


def _for_sizes_of_guards(
    program: Program, tensors: tuple[torch.Tensor, ...], batch_size: int, sizes: SizeRange | None
) -> ExportedProgram | None:
    """Exports once more, for the batch sizes that the last trace's guards hold for.

    Returns None where there are none, or where torch refuses these too.
    """
    if sizes is None:
        return None
    answers = program.answers
    shapes = {"tensors": open_sizes(program.flat, batch_size, {}, sizes.most, least=sizes.least)}
    program.options.multiple_of = sizes.multiple_of
    try:
        with drop_guards_that_hold(sizes):
            return _retrying_as_uncompiled(program, tensors, shapes)
    except (torch._dynamo.exc.UserError, AssertionError):  # guards of this trace that do not hold
        program.answers, program.options.multiple_of = answers, 1
        return None


def _retrying_as_uncompiled(
    program: Program, tensors: tuple[torch.Tensor, ...], shapes: Any
) -> ExportedProgram:
    """Exports, with is_compiling() false where the model itself raises an error while it is true.

    `program.options.as_uncompiled` says which of the two it was, and is kept for later traces.
    """
    with answer_is_compiling(not program.options.as_uncompiled) as asked:
        try:
            return _retrying_with_foreign_parameters(program, tensors, shapes)
        except Pd2bwError:
            raise
        except Exception as error:
            if program.options.as_uncompiled or not asked or not is_raised_by_the_model(error):
                raise
    program.options.as_uncompiled = True
    return _retrying_as_uncompiled(program, tensors, shapes)


def _retrying_with_foreign_parameters(
    program: Program, tensors: tuple[torch.Tensor, ...], shapes: Any
) -> ExportedProgram:
    """Exports, once more for a forward that has parameters from elsewhere than their modules.

    Such a parameter comes out as a constant of the first trace.
    """
    with DataIsDetached():
        exported = _retrying_with_saved_values(program, tensors, shapes)
        if parameter_in_memory_of(exported.constants.values(), program.model):
            with ParametersReadInstead(in_their_modules(program.model)):
                exported = _retrying_with_saved_values(program, tensors, shapes)
            require_untrained(exported.constants.values(), program.model)
    return exported


def _retrying_with_saved_values(
    program: Program, tensors: tuple[torch.Tensor, ...], shapes: Any
) -> ExportedProgram:
    """Exports, again for a model that differentiates in its forward, if the trace lacks saved values.

    The second time, operators that are known to save more than operands and results are traced in parts; the
    third time, all composite operators are.
    """
    with suppress(DerivativeError):
        return _export_once(program, tensors, shapes)
    with suppress(DerivativeError), find_saved_values(all_composite=False), trace_maps_below_autograd():
        return _export_once(program, tensors, shapes)
    with find_saved_values(all_composite=True), trace_maps_below_autograd():
        return _export_once(program, tensors, shapes)


def _export_once(program: Program, tensors: tuple[torch.Tensor, ...], shapes: Any) -> ExportedProgram:
    program.answers = SizeAnswers()
    with do_less_work(), run_one_step(), while_tracing(program):
        exported = torch.export.export(program, tensors, strict=False, dynamic_shapes=shapes)
        write_out_vmap(exported.graph_module)
    return exported


def batch_sizes(exported: ExportedProgram, batched: Iterable[str], *, multiple_of: int = 1) -> SizeRange:
    """Returns the batch sizes that the program is right for; `batched` are names of placeholders."""
    values = {node.name: node.meta["val"] for node in exported.graph.find_nodes(op="placeholder")}
    symbols = (values[name].shape[0] for name in batched)
    known = exported.range_constraints
    ranges = [known[s.node.expr] for s in symbols if isinstance(s, torch.SymInt) and s.node.expr in known]
    least = max((int(found.lower) for found in ranges), default=1)
    ends = [int(found.upper) for found in ranges if not isinstance(found.upper, IntInfinity)]
    most = min((end for end in ends if end < _NO_END), default=None)
    if multiple_of == 1 and least <= SMALLEST:
        least = 1
    return SizeRange(least, most, multiple_of)


def open_sizes(
    flat: FlatArguments,
    batch_size: int,
    lengths: Mapping[str, str],
    largest: int | None = None,
    *,
    least: int = SMALLEST,
) -> tuple[dict[int, Any] | None, ...]:
    batch, batched = Dim(BATCH_NAME, min=max(least, SMALLEST), max=largest), flat.batched(batch_size)
    open_lengths = {name: Dim(name, min=2) for name in lengths.values()}
    return tuple(
        ({0: batch} | ({1: open_lengths[lengths[name]]} if name in lengths else {}))
        if name in batched
        else None
        for name in flat.names
    )


def _require_open(exported: ExportedProgram, program: Program, lengths: Mapping[str, str]) -> None:
    """Raises ValueError, as any front end may, where the program has the example's length after all."""
    inputs = exported.graph_signature.user_inputs
    values = {node.name: node.meta.get("val") for node in exported.graph.find_nodes(op="placeholder")}
    for name, placeholder in zip(program.flat.names, inputs, strict=True):
        value = values.get(str(placeholder))
        if name in lengths and isinstance(value, torch.Tensor) and isinstance(value.shape[1], int):
            raise ValueError(f"the model fixes the length of {name} at {value.shape[1]}")


def _doubled(flat: FlatArguments) -> tuple[torch.Tensor, ...]:
    batched = flat.batched(1)
    return tuple(
        torch.cat([tensor, tensor]) if name in batched else tensor
        for name, tensor in zip(flat.names, flat.tensors, strict=True)
    )


def _custom_function_message(name: str) -> str:
    if name.endswith("CheckpointFunction"):
        return (
            "the model uses torch.utils.checkpoint with use_reentrant=True, whose backward cannot be traced; "
            "pass use_reentrant=False, or leave recomputation to split(recompute=...)"
        )
    if name.endswith("dirichlet._Dirichlet"):
        return f"the model draws from a Beta or Dirichlet distribution; expected {OF_GAMMAS}"
    return (
        f"the model calls torch's autograd function {name}; a traced program would keep its forward and lose "
        "its backward"
    )


def _text(exported: ExportedProgram) -> list[Any]:
    """Returns the program's nodes and the values of its constants, to compare two traces by."""
    nodes = [(node.op, str(node.target), str(node.args), str(node.kwargs)) for node in exported.graph.nodes]
    return [*nodes, {name: _value(constant) for name, constant in exported.constants.items()}]


def _value(constant: Any) -> Any:
    if not isinstance(constant, torch.Tensor) or constant.is_meta:
        return type(constant)
    return constant.dtype, tuple(constant.shape), hashlib.sha256(repr(constant.tolist()).encode()).digest()
