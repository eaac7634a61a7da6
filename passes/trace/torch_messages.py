"""Parts of torch's own messages that decide how a trace goes on, where torch has no class that says as much.

`tests/test_torch_messages.py` has torch say each of them. Where a later torch words one otherwise, the trace
fails with torch's message, or is told of in other words; no wrong program follows from that.
"""

# A UserError of torch.export ends with the bounds that would satisfy it. Not found: no retry with bounds.
SUGGESTED_FIXES = "Suggested fixes:"

# How a UserError about the dimension named "batch" alone begins. Not found: no retry with an upper bound.
BATCH_VIOLATED = "Constraints violated (batch)"

# What an AssertionError about the bounds of the batch's symbol contains: the name that we gave the dimension.
BATCH_NAME = "batch"

# How the warning of a tensor that a forward assigns to its module begins. Not found: users see the warning.
TENSOR_ASSIGNED = "The tensor attribute"

# The operator that draws from a Beta or Dirichlet. Not found: the error has the usual advice.
SAMPLE_DIRICHLET = "_sample_dirichlet"

# What the error about a tensor that numpy asks for contains. Not found: the error has the usual advice.
NO_NUMPY = ".numpy() is not supported"

# How the warning of a rule for vmap that replaces torch's begins. Not found: users see the warning.
RULE_REPLACED = "Warning only once for all operators"

# How the end of an error about a condition begins that names sizes by values, and how it ends where there are
# none. Not found: the error has the usual advice.
SIZES_BY_VALUES, NO_SIZES_BY_VALUES = "(Size-like symbols: ", "(Size-like symbols: none)"
