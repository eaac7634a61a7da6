"""Checks that refuse a model, or a trace of it, that no stage could reproduce.

`watch` and `extreme_random` refuse nothing themselves: `second_call` decides by what they see.

    module              what is in it
    unsupported         modules, hooks and modes that stages cannot have, before or during a trace
    watch               what a forward changes while it runs
    second_call         models that compute something else from call to call
    extreme_random      calls at extreme random numbers of Python and numpy
    drawing_line        which line of the model draws such numbers
    sparse_tensors      sparse tensors that a trace reads
    single_sample       programs that are wrong for a batch of one sample
    remade_parameters   parameters that a forward makes anew, where stages cannot
    tensor_attributes   attributes of parameters and buffers themselves, where the forward reads them
    parameter_memory    tensors in the memory of a parameter that are not the parameter
"""
