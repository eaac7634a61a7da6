"""Torch's operators that ONNX lacks, or that its exporter gets wrong, computed by operators that it has.

    translatable    the table of all of them, and those without a module of their own
    ordering        bounds, extremes of a whole tensor, stable sorts, copysign
    division        floor division and remainder of floats
    complex_numbers sums, products and constants of complex tensors, part by part
    complex_parts   what takes complex tensors apart or joins them
    complex_functions powers, roots, logarithms and norms of complex tensors
    fourier         transforms of other sizes than the input's, the order of waves
    pools           windows of several sizes, divisors of one's own
    matrices        small matrices: solutions, inverses, decompositions
    integers        division and shifts of integers
    concat          stacking tensors of several types
    values          powers by numbers that are computed themselves
    memory          parts of memory as it lies (as_strided)
    scans           cumulative products, maxima and minima
    special         special functions: digamma, erfinv, hypot, lgamma, logit
    stable          logarithms and exponentials without overflow, and the losses made of them

Each function takes the arguments of the torch function that it stands for. It returns NotImplemented where
the exporter is right by itself.
"""
