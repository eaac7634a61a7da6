"""The passes: trace, normalise, profile, coarsen, partition, schedule and codegen, and `split` over them."""
