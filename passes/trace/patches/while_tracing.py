"""All patches under which torch.export traces a program, in one context manager."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from pd2bw_fx.contraction import keep_contractions_symbolic
from pd2bw_fx.ctc import keep_ctc_loss
from pd2bw_fx.passes.trace.program import Program
from pd2bw_fx.passes.trace.size_guards import record_guards
from pd2bw_fx.passes.trace.torch_messages import TENSOR_ASSIGNED
from pd2bw_fx.process_settings import leave_other_flags_alone
from pd2bw_fx.value_checks import skip_value_checks

from .batch_rules import use_batch_rules_for_any_size
from .checked_values import assert_checked_values
from .compiled_parts import call_parts_as_written
from .constants import fold_constants
from .custom_functions import keep_custom_functions
from .derivatives import trace_derivatives
from .described_operators import describe_operators_on_selected_rows
from .experts import multiply_experts_as_in_a_run
from .fixed_buffers import take_fixed_buffers_for_constants
from .helper_frames import record_helper_frames
from .module_moves import skip_no_op_moves
from .named_values import record_value_names
from .numbers_of_sizes import keep_sizes_symbolic
from .size_answers import record_size_answers
from .symbolic_shapes import SymbolicSplits, keep_shapes_symbolic


@contextmanager
def while_tracing(program: Program) -> Iterator[None]:
    """Enters every patch that a trace by torch.export needs; `program.answers` records what it asks of sizes.

    Later patches are inside earlier ones.
    """
    patches = (
        warnings.catch_warnings(),
        keep_custom_functions(),
        keep_ctc_loss(),
        trace_derivatives(),
        call_parts_as_written(program.model, program.loss_fn),
        multiply_experts_as_in_a_run(),
        skip_no_op_moves(),
        keep_contractions_symbolic(),
        keep_sizes_symbolic(program.model, program.loss_fn),
        SymbolicSplits(),
        record_helper_frames(),
        skip_value_checks(),
        assert_checked_values(),
        use_batch_rules_for_any_size(),
        take_fixed_buffers_for_constants(program),
        fold_constants(),
        record_value_names(),
        keep_shapes_symbolic(),
        describe_operators_on_selected_rows(),
        record_size_answers(program.answers),
        record_guards(program.answers.guards),
        leave_other_flags_alone(),
    )
    with ExitStack() as stack:  # a with statement takes no more than 20
        for patch in patches:
            stack.enter_context(patch)
        # Watch looks for tensors that a forward assigns to its module, without false alarms.
        warnings.filterwarnings("ignore", message=TENSOR_ASSIGNED)
        yield
