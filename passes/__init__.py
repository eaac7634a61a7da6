"""The passes: trace, normalise, profile, coarsen, partition, schedule, codegen, and split over them."""
