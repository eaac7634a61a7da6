"""The main front end: torch.export, non-strict, with a named batch dimension and lengths, or at one size."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import fx
from torch.export import Dim, ExportedProgram
from torch.export.dynamic_shapes import refine_dynamic_shapes_from_suggested_fixes
from torch.utils._sympy.numbers import IntInfinity

from pd2bw_fx.contraction import keep_contractions_symbolic
from pd2bw_fx.ctc import keep_ctc_loss
from pd2bw_fx.errors import Pd2bwError, TraceError
from pd2bw_fx.process_settings import leave_other_flags_alone
from pd2bw_fx.size_range import SizeRange
from pd2bw_fx.source_check import NAMESPACES_OF_TORCH
from pd2bw_fx.value_checks import skip_value_checks

from .checks.parameter_memory import parameter_in_memory_of, require_untrained
from .checks.second_call import require_the_same_again
from .checks.tensor_attributes import require_none_read
from .inputs import FlatArguments
from .patches.batch_rules import use_batch_rules_for_any_size
from .patches.below_autograd import trace_maps_below_autograd
from .patches.compiling import answer_is_compiling, is_raised_by_the_model
from .patches.conditions import UnseenChoiceError, intercept_boolean_items
from .patches.constants import fold_constants
from .patches.custom_functions import keep_custom_functions
from .patches.derivatives import DerivativeError, trace_derivatives
from .patches.detached_data import DataIsDetached
from .patches.helper_frames import record_helper_frames
from .patches.module_moves import skip_no_op_moves
from .patches.named_values import record_value_names
from .patches.numbers_of_sizes import keep_sizes_symbolic
from .patches.parameters_elsewhere import ParametersReadInstead, in_their_modules
from .patches.saved_values import find_saved_values
from .patches.size_answers import SizeAnswers, largest_batch_answered_alike, record_size_answers
from .patches.symbolic_shapes import (
    SymbolicSplits,
    ignore_example_sizes,
    infer_symbolic_sizes,
    select_by_index,
)
from .program import Program
from .size_guards import drop_guards_that_hold, record_guards, sizes_where_all_hold
from .source_lines import line_of
from .vmap_regions import write_out_vmap

OF_GAMMAS = (
    "it made of Gammas, since torch traces no gradient of Beta and Dirichlet: of "
    "g = Gamma(concentration, torch.ones(())).rsample() it is g / g.sum(-1, keepdim=True)"
)

_SMALLEST = 2  # torch takes sizes of 0 and 1 for constants
_RUNNING_PARTS = {
    "cond": "torch.cond",
    "while_loop": "torch.while_loop",
    "map_impl": "torch's map",
    "scan": "torch's scan",
    "associative_scan": "torch's associative_scan",
    "flex_attention": "flex_attention",
}


def export(program: Program, batch_size: int | None, *, with_lengths: bool = False) -> ExportedProgram:
    """The exported program; sizes follow the batch where `batch_size` says which size is the batch's, and
    `with_lengths` the lengths of token sequences too.

    Raises TraceError for what would be traced and be wrong, and whatever torch raises for what cannot be.
    """
    lengths = program.flat.lengths(batch_size) if with_lengths and batch_size is not None else {}
    if with_lengths and not lengths:
        raise ValueError("no input is a batch of sequences: whole numbers of shape (batch, length)")
    try:
        return _exported_and_checked(program, batch_size, lengths)
    except Pd2bwError:
        raise
    except (ValueError, torch._dynamo.exc.UserError) as error:  # a length that is fixed
        if not lengths:
            raise
        with ignore_example_sizes():
            try:
                return _exported_and_checked(program, batch_size, lengths)
            except Exception:
                raise error from None


def _exported_and_checked(
    program: Program, batch_size: int | None, lengths: Mapping[str, str]
) -> ExportedProgram:
    exported = _exported_one_way(program, batch_size, lengths)
    _require_open(exported, program, lengths)
    _require_single_operators(exported)
    _require_no_generator(exported)
    require_none_read(exported.constants.values(), program.model)
    if program.watch.custom_functions:
        raise TraceError(_custom_function_message(program.watch.custom_functions[0]))
    require_the_same_again(program, _text(exported), lambda: _text(_exported(program, batch_size, lengths)))
    return exported


def _exported_one_way(
    program: Program, batch_size: int | None, lengths: Mapping[str, str]
) -> ExportedProgram:
    """Raises UnseenChoiceError where `x.any().item() is True` chooses between two ways: what a trace gives
    there is neither True nor False, and nobody sees that it is asked."""
    if program.conditions.are_any:  # asked of the example
        return _exported(program, batch_size, lengths)
    with intercept_boolean_items() as asked:
        exported = _exported(program, batch_size, lengths)
    if not asked:
        return exported
    ways = []
    for truth in (True, False):
        with intercept_boolean_items(truth), suppress(Exception):  # on that way the model may well raise
            ways.append([str(node.target) for node in _exported(program, batch_size, lengths).graph.nodes])
    if len(ways) < 2 or ways[0] != ways[1]:
        raise UnseenChoiceError(f"chooses a way by values, which has no answer in a trace, at {asked[0]}")
    return exported


def _require_single_operators(exported: ExportedProgram) -> None:
    """Raises TraceError for an operator that runs parts of the model, which no stage can be cut through."""
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
    """Raises TraceError for draws from a generator that the model keeps: stages would each need a part."""
    if any(isinstance(constant, torch.Generator) for constant in exported.constants.values()):
        drawing = next(node for node in exported.graph.nodes if node.kwargs.get("generator") is not None)
        raise TraceError(
            f"the model draws from a torch.Generator of its own ({line_of(drawing)}); leave generator= out: "
            "while it trains, the seed, the microbatch and the place of an operator decide what it draws"
        )


def foreign_operators(exported: ExportedProgram) -> list[str]:
    """Operators that a library other than torch registered: whoever runs the program needs that library."""
    modules = [module for module in exported.graph_module.modules() if isinstance(module, fx.GraphModule)]
    targets = [node.target for module in modules for node in module.graph.nodes]
    names = [str(target._schema.name) for target in targets if isinstance(target, torch._ops.OpOverload)]
    return sorted({name for name in names if name.partition("::")[0] not in NAMESPACES_OF_TORCH})


def _exported(program: Program, batch_size: int | None, lengths: Mapping[str, str]) -> ExportedProgram:
    tensors, shapes = program.flat.tensors, None
    program.multiple_of = 1
    if batch_size is not None:
        shapes = {"tensors": open_sizes(program.flat, batch_size, lengths)}
        if batch_size == 1:  # torch takes a size of 1 for a constant
            tensors = _doubled(program.flat)
    try:
        return _exported_with(program, tensors, shapes)
    except torch._dynamo.exc.UserError as error:  # not imported above: dynamo takes a second
        if (bounded := _bounded(str(error), shapes)) is not None:
            return _exported_with(program, tensors, bounded)
        if batch_size is not None and not lengths:
            exported = _exported_where_guards_hold(program, tensors, batch_size)
            if exported is not None:
                return exported
        # Where a number is made of the batch, by more than a product, torch cannot solve for the batch.
        is_bounded = batch_size is not None and str(error).startswith("Constraints violated (batch)")
        largest = (
            largest_batch_answered_alike(program.answers, batch_size) if batch_size and is_bounded else None
        )
        if largest is None or largest <= _SMALLEST:
            raise
    except AssertionError as error:
        # Where a multiple of the batch is bounded, it cannot either.
        if batch_size is None or "batch" not in str(error):
            raise
        largest = max(largest_batch_answered_alike(program.answers, batch_size) or batch_size, _SMALLEST + 1)
    assert batch_size is not None
    bounded = {"tensors": open_sizes(program.flat, batch_size, lengths, largest)}
    return _exported_with(program, tensors, bounded)


def _exported_where_guards_hold(
    program: Program, tensors: tuple[torch.Tensor, ...], batch_size: int
) -> ExportedProgram | None:
    """Once more, for all sizes that the last trace's guards hold for; None where these have an end."""
    answers = program.answers
    sizes = sizes_where_all_hold(answers.guards, batch_size)
    if sizes is None:
        return None
    shapes = {"tensors": open_sizes(program.flat, batch_size, {}, least=sizes.least)}
    program.multiple_of = sizes.multiple_of
    try:
        with drop_guards_that_hold(sizes):
            return _exported_with(program, tensors, shapes)
    except (torch._dynamo.exc.UserError, AssertionError):  # with some that do not hold after all
        program.answers, program.multiple_of = answers, 1
        return None


def _exported_with(program: Program, tensors: tuple[torch.Tensor, ...], shapes: Any) -> ExportedProgram:
    """A model that fails by its own fault where it knows that it is compiled is traced as it runs without."""
    with answer_is_compiling(not program.as_uncompiled) as asked:
        try:
            return _exported_by_torch(program, tensors, shapes)
        except Pd2bwError:
            raise
        except Exception as error:
            if program.as_uncompiled or not asked or not is_raised_by_the_model(error):
                raise
    program.as_uncompiled = True
    return _exported_with(program, tensors, shapes)


def _exported_by_torch(program: Program, tensors: tuple[torch.Tensor, ...], shapes: Any) -> ExportedProgram:
    """Once more for a forward that has parameters from elsewhere than their modules."""
    with DataIsDetached():
        exported = _exported_with_derivatives(program, tensors, shapes)
        if parameter_in_memory_of(exported.constants.values(), program.model):
            with ParametersReadInstead(in_their_modules(program.model)):
                exported = _exported_with_derivatives(program, tensors, shapes)
            require_untrained(exported.constants.values(), program.model)
    return exported


def _exported_with_derivatives(
    program: Program, tensors: tuple[torch.Tensor, ...], shapes: Any
) -> ExportedProgram:
    """Again for a model that differentiates, if what operators have saved is missing in the trace: with the
    parts of those that are known to save more than operands and results, and then with the parts of all."""
    with suppress(DerivativeError):
        return _exported_once(program, tensors, shapes)
    with suppress(DerivativeError), find_saved_values(all_composite=False), trace_maps_below_autograd():
        return _exported_once(program, tensors, shapes)
    with find_saved_values(all_composite=True), trace_maps_below_autograd():
        return _exported_once(program, tensors, shapes)


def _exported_once(program: Program, tensors: tuple[torch.Tensor, ...], shapes: Any) -> ExportedProgram:
    program.answers = SizeAnswers()
    with (
        warnings.catch_warnings(),
        keep_custom_functions(),
        keep_ctc_loss(),
        trace_derivatives(),
        skip_no_op_moves(),
        keep_contractions_symbolic(),
        keep_sizes_symbolic(program.model, program.loss_fn),
        SymbolicSplits(),
        record_helper_frames(),
        skip_value_checks(),
        use_batch_rules_for_any_size(),
        fold_constants(),
        record_value_names(),
        select_by_index(),
        infer_symbolic_sizes(),
        record_size_answers(program.answers),
        record_guards(program.answers.guards),
        leave_other_flags_alone(),
    ):
        # Tensors that a forward assigns to its module are looked for by Watch, without false alarms.
        warnings.filterwarnings("ignore", message="The tensor attribute")
        exported = torch.export.export(program, tensors, strict=False, dynamic_shapes=shapes)
        write_out_vmap(exported.graph_module)
    return exported


def _bounded(message: str, shapes: Any) -> Any:
    """The shapes with the bounds that torch names: a length's by a table of positions, for example, or the
    batch's by a condition on it. None where it names none, or fixes the batch."""
    _, said, fixes = message.partition("Suggested fixes:")
    if not said or shapes is None:
        return None
    try:
        bounded: Any = refine_dynamic_shapes_from_suggested_fixes(
            said + fixes.strip().partition("\n\n")[0], shapes
        )
    except Exception:  # torch's own reading of what it suggests: it does not know every suggestion
        return None
    sizes = [found for found in bounded["tensors"] if found is not None]
    if not all(type(found[0]) is Dim for found in sizes):
        return None
    for found in sizes:
        found.update({place: _of_two_or_more(size) for place, size in found.items()})
    return bounded


def _of_two_or_more(size: Any) -> Any:
    """Torch names the bound that it has found, and leaves out the one that there was."""
    return Dim(size.__name__, min=max(size.min, _SMALLEST), max=size.max) if type(size) is Dim else size


def batch_sizes(exported: ExportedProgram, batched: Iterable[str], *, multiple_of: int = 1) -> SizeRange:
    """How large a batch may be for the program to be right; `batched` are placeholders."""
    values = {node.name: node.meta["val"] for node in exported.graph.find_nodes(op="placeholder")}
    symbols = (values[name].shape[0] for name in batched)
    known = exported.range_constraints
    ranges = [known[s.node.expr] for s in symbols if isinstance(s, torch.SymInt) and s.node.expr in known]
    least = max((int(found.lower) for found in ranges), default=1)
    most = min(
        (int(found.upper) for found in ranges if not isinstance(found.upper, IntInfinity)), default=None
    )
    if multiple_of == 1 and least <= _SMALLEST:
        least = 1
    return SizeRange(least, most, multiple_of)


def open_sizes(
    flat: FlatArguments,
    batch_size: int,
    lengths: Mapping[str, str],
    largest: int | None = None,
    *,
    least: int = _SMALLEST,
) -> tuple[dict[int, Any] | None, ...]:
    batch, batched = Dim("batch", min=max(least, _SMALLEST), max=largest), flat.batched(batch_size)
    open_lengths = {name: Dim(name, min=2) for name in lengths.values()}
    return tuple(
        ({0: batch} | ({1: open_lengths[lengths[name]]} if name in lengths else {}))
        if name in batched
        else None
        for name in flat.names
    )


def _require_open(exported: ExportedProgram, program: Program, lengths: Mapping[str, str]) -> None:
    """Raises ValueError, as any front end may, where a length came out as the example's after all."""
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
    """With the tensors that the trace has computed itself."""
    nodes = [(node.op, str(node.target), str(node.args), str(node.kwargs)) for node in exported.graph.nodes]
    return [*nodes, {name: _value(constant) for name, constant in exported.constants.items()}]


def _value(constant: Any) -> Any:
    if not isinstance(constant, torch.Tensor) or constant.is_meta:
        return type(constant)
    return constant.dtype, tuple(constant.shape), hashlib.sha256(repr(constant.tolist()).encode()).digest()
