"""The private names of torch that Shardwise uses, in one place: other files take them from here.

torch_private    the names, each looked up and checked at its first use
private_names    the table: where each is, what it is for, and the form in which it is used

Left in the files that use them, because a wrapper would say no more than the name does. If one is gone, that is an
AttributeError; tests/unit/test_torch_internals.py looks for each of them in the torch that is installed:

    torch._foreach_*, torch._scaled_mm, torch.ops.aten._*   operators
    torch.utils._pytree                                     trees of inputs and outputs; other libraries use them too
    _version, _base, _is_view, _cdata, _schema              of a tensor, storage or operator: read for each operation
    _sequence_nr                                            of a node of autograd: the order in which backward runs
    _concrete_type                                          of a module of torch.jit
    _parameters, _buffers, _modules, _forward_hooks …       tables and flags that every module or optimizer has
    _init_group                                             of torch's optimizers: each has its own form
    torch._dynamo                                           in training/launch/warm_start.py: imported early
"""
