"""Context managers that change torch, Python or the model's files while a model is traced.

`while_tracing` enters those that every trace by torch.export needs; the others are entered where a model
needs them.

    module                what its patches do
    while_tracing         all patches of a trace by torch.export, in their order
    alike_calls           which calls of custom autograd functions are traced once for all of them
    asked_places          the model's line that asks for a value
    batch_rules           rules for vmap that keep the batch size open, in place of torch's own
    below_autograd        trace what a map differentiates below autograd
    checked_values        assert what `torch._check_tensor_all` checks
    checkpointing         leave the model's own activation checkpointing out
    compared_numbers      numbers from `item` that report how comparisons of them come out
    compiled_parts        call parts that torch.compile has wrapped as they are written
    compiling             choose what torch.compiler.is_compiling() answers to the model
    conditions            record conditions on values in a run, and assume them in a trace
    constants             compute what follows from constants alone
    custom_functions      keep custom autograd functions whole (with `joint_graph`, `function_constants`,
                          `given_tensors`)
    derivatives           trace what a forward differentiates, and name the line if that fails
    detached_data         read `tensor.data` as `tensor.detach()`
    experts               multiply groups of rows with Hugging Face's experts as in a run
    fixed_buffers         take whole numbers that a layer keeps in buffers for the constants that they are
    function_transforms   trace transforms of torch.func by autograd
    helper_frames         keep the lines of functions that a forward calls
    loss_numbers          note where a loss_fn makes numbers of tensors, to log them
    module_moves          skip `module.to(..)` where it changes nothing
    named_values          record the names of a forward's arguments and the order of its results
    numbers_of_sizes      keep `len(x)`, `int(x.shape[0])` and `math.sqrt(x.shape[0])` symbolic
    parameters_elsewhere  find parameters that a forward has from elsewhere than their module
    saved_values          find values that operators have saved for their backward
    selected_sizes        know sizes that depend on values, as they were in a run
    size_answers          record conditions on sizes and how they came out
    symbolic_shapes       keep sizes symbolic in functions of torch that ask for plain ones
"""
