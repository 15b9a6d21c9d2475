"""The private names of torch that Shardwise uses: where each is, what it is for, and the form in which it is used.

Unless its row says otherwise, a name is the same in all of TESTED_TORCH (torch 2.11 to 2.15).
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Private:
    """A private name of torch.

    path      module:name, where the name may be that of an attribute; a property stands for the function that reads it
    use       what we do with it, after "with which Shardwise …"
    former    its path in older versions
    given     how many arguments we pass by position (self included), and `named` those by name, if it is called
    has       the attributes that we use, if it is an object
    """

    path: str
    use: str
    former: str = ""
    given: int | None = None
    named: str = ""
    has: str = ""


_C10D = "torch._C._distributed_c10d"
_AGENT = "torch.distributed.elastic.agent.server.local_elastic_agent:LocalElasticAgent"
_CALLBACKS = "register_start_callback register_end_callback remove_start_callback remove_end_callback"

PRIVATE = {
    # Backward.
    "current_graph_task_id": Private("torch._C:_current_graph_task_id", "tells whether this thread runs a backward"),
    "keeps_graph": Private(
        "torch._C._autograd:_get_current_graph_task_keep_graph", "tells whether a second backward may follow"
    ),
    "top_saved_tensors_hooks": Private(
        "torch._C._autograd:_top_saved_tensors_default_hooks", "notices hooks of others on what is saved for backward"
    ),
    "will_engine_execute_node": Private(
        "torch._C:_will_engine_execute_node", "tells whether a backward adds to a parameter's gradient"
    ),
    "queue_callback": Private(
        "torch.autograd:Variable._execution_engine.queue_callback", "notices the end of a backward"
    ),
    "engine_run_backward": Private(
        "torch.autograd.graph:_engine_run_backward",
        "runs a traced backward below function modes",
        given=5,
        named="allow_unreachable accumulate_grad",
    ),
    # Dispatch, and what is computed with fake tensors.
    "DisableTorchFunctionSubclass": Private(
        "torch._C:DisableTorchFunctionSubclass", "handles its own guarded parameters", given=0
    ),
    "ExcludeDispatchKey": Private("torch._C:_SetExcludeDispatchKeyGuard", "detaches a tensor below autograd"),
    "ADInplaceOrView": Private("torch._C:DispatchKey.ADInplaceOrView", "detaches a tensor below autograd"),
    "TorchDispatchMode": Private("torch.utils._python_dispatch:TorchDispatchMode", "sees each operation", given=0),
    "disable_current_modes": Private(
        "torch.utils._python_dispatch:_disable_current_modes", "computes outside of a trace", given=0
    ),
    "is_traceable_wrapper_subclass": Private(
        "torch.utils._python_dispatch:is_traceable_wrapper_subclass", "knows tensors around other tensors", given=1
    ),
    "peek_interpreter_stack": Private(
        "torch._C._functorch:peek_interpreter_stack", "tells whether torch.func transforms a forward"
    ),
    "OpOverload": Private("torch._ops:OpOverload", "knows operators from other functions"),
    "FakeTensor": Private("torch._subclasses.fake_tensor:FakeTensor", "traces a model without memory"),
    "FakeTensorMode": Private(
        "torch._subclasses.fake_tensor:FakeTensorMode", "traces a model without memory", named="allow_non_fake_inputs"
    ),
    "DataDependentOutputException": Private(
        "torch._subclasses.fake_tensor:DataDependentOutputException", "says why a model cannot be traced"
    ),
    "DynamicOutputShapeException": Private(
        "torch._subclasses.fake_tensor:DynamicOutputShapeException", "says why a model cannot be traced"
    ),
    # Tensors, modules and optimizers.
    "tensor_data": Private("torch._C:TensorBase.data", "sets the data of a guarded parameter"),
    "storage_use_count": Private("torch._C:_storage_Use_Count", "tells whether a buffer is still in use"),
    "make_subclass": Private("torch:Tensor._make_subclass", "fills a quantised weight from the meta device"),
    "make_wrapper_subclass": Private("torch:Tensor._make_wrapper_subclass", "describes slices to torch's checkpoints"),
    "BatchNorm": Private("torch.nn.modules.batchnorm:_BatchNorm", "keeps BatchNorm in fp32"),
    "IncompatibleKeys": Private(
        "torch.nn.modules.module:_IncompatibleKeys", "answers load_state_dict as torch does", given=2
    ),
    "save_to_state_dict": Private("torch.nn:Module._save_to_state_dict", "knows a read of names from one of values"),
    "register_load_state_dict_pre_hook": Private(
        "torch.nn:Module._register_load_state_dict_pre_hook", "registers hooks on modules of torch.jit"
    ),
    "reparametrize_module": Private(
        "torch.nn.utils.stateless:_reparametrize_module", "calls a unit with other parameters", given=2
    ),
    "clip_grads_with_norm": Private(
        "torch.nn.utils.clip_grad:_clip_grads_with_norm_", "refuses torch's clipping of slices", given=3
    ),
    "unscale_grads": Private(
        "torch.amp:GradScaler._unscale_grads_", "combines overflows over ranks, and refuses torch's scaler", given=5
    ),
    # torch.compile.
    "disable_dynamo": Private("torch._compile:_disable_dynamo", "keeps its hooks out of compiled code", given=1),
    "callback_handler": Private(
        "torch._dynamo.callback:callback_handler",
        "times compilations",
        has=f"{_CALLBACKS} start_callbacks end_callbacks",
    ),
    "optimize": Private("torch._dynamo:optimize", "traces units", given=1, named="guard_filter_fn"),
    "dynamo_settings": Private("torch._dynamo.config:patch", "traces units"),
    "dynamo_counters": Private("torch._dynamo.utils:counters", "says why a unit cannot be traced"),
    "guards_scope": Private(
        "torch._dynamo.guards:_get_closure_vars", "lets go of models whose units were traced", given=0
    ),
    "InstructionTranslator": Private(
        "torch._dynamo.symbolic_convert:InstructionTranslator", "finds out what a trace writes", has="current_tx"
    ),
    "AttributeMutationNew": Private(
        "torch._dynamo.variables.base:AttributeMutationNew", "finds out what a trace writes"
    ),
    "handle_exception": Private(
        "torch._dynamo.symbolic_convert:InstructionTranslatorBase.exception_handler",
        "notices lookups that fail in a trace",
        given=2,
    ),
    "store_attribute": Private(
        "torch._dynamo.side_effects:SideEffects.store_attr", "notices what a trace writes into a class", given=4
    ),
    "ClassVariable": Private(
        "torch._dynamo.variables.user_defined:UserDefinedClassVariable", "notices what a trace writes into a class"
    ),
    "lookup_backend": Private("torch._dynamo.backends.registry:lookup_backend", "compiles units", given=1),
    "ConvertFrameReturn": Private("torch._dynamo.types:ConvertFrameReturn", "runs what cannot be traced", given=0),
    "function_modes": Private(
        "torch.overrides:_get_current_function_mode_stack", "notices modes that change what a trace would do", given=0
    ),
    "DeviceContext": Private("torch.utils._device:DeviceContext", "knows torch.set_default_device from other modes"),
    "num_dispatch_modes": Private("torch._C:_len_torch_dispatch_stack", "notices modes under which nothing is traced"),
    "has_global_hooks": Private(
        "torch.nn.modules.module:_has_any_global_hook", "notices hooks that no trace would call", given=0
    ),
    "aot_function": Private(
        "torch._functorch.aot_autograd:aot_function",
        "traces a compiled unit",
        given=2,
        named="partition_fn decompositions num_params_buffers",
    ),
    "select_decomp_table": Private(
        "torch._inductor.decomposition:select_decomp_table", "traces a compiled unit", given=0
    ),
    "partition_fn": Private(
        "torch._inductor.compile_fx:partition_fn",
        "finds what a compiled unit saves for backward",
        given=2,
        named="static_lifetime_input_indices",
    ),
    "fallbacks": Private("torch._inductor.lowering:fallbacks", "knows the kernels that Inductor calls"),
    "lowerings": Private("torch._inductor.lowering:lowerings", "knows the kernels that Inductor writes"),
    # Allocators, captures and profiles. The names with _cuda_ are those of a CUDA build.
    "begin_allocate_stream_to_pool": Private(
        "torch._C:_cuda_beginAllocateCurrentStreamToPool", "allocates in the memory of graphs"
    ),
    "begin_allocate_thread_to_pool": Private(
        "torch._C:_cuda_beginAllocateCurrentThreadToPool", "gives full parameters of units fixed addresses"
    ),
    "end_allocate_to_pool": Private("torch._C:_cuda_endAllocateToPool", "leaves a pool of memory"),
    "release_pool": Private("torch._C:_cuda_releasePool", "leaves a pool of memory"),
    "set_allocator_settings": Private(
        "torch._C:_accelerator_setAllocatorSettings", "keeps expandable segments out of a pool of memory"
    ),
    "record_memory_history": Private(
        "torch.cuda.memory:_record_memory_history",
        "profiles memory",
        named="enabled context stacks max_entries",
    ),
    "memory_snapshot": Private("torch.cuda.memory:_snapshot", "profiles memory", given=0),
    "parse_kineto_results": Private(
        "torch.autograd.profiler:profile._parse_kineto_results", "profiles memory", given=2
    ),
    # Groups, stores and the launcher. The stores and two of the options are public, but not their types.
    "Store": Private("torch.distributed:Store", "exchanges small values"),
    "FileStore": Private("torch.distributed:FileStore", "joins a job"),
    "HashStore": Private("torch.distributed:HashStore", "joins a job of one rank"),
    "PrefixStore": Private("torch.distributed:PrefixStore", "exchanges small values"),
    "TCPStore": Private("torch.distributed:TCPStore", "joins a job"),
    "AllgatherOptions": Private(f"{_C10D}:AllgatherOptions", "issues collectives"),
    "AllreduceOptions": Private("torch.distributed:AllreduceOptions", "issues collectives"),
    "ReduceScatterOptions": Private("torch.distributed:ReduceScatterOptions", "issues collectives"),
    # torch 2.13 renamed the two.
    "all_gather_single": Private(
        "torch.distributed:ProcessGroup.all_gather_single",
        "gathers parameters",
        former="torch.distributed:ProcessGroup._allgather_base",
    ),
    "reduce_scatter_single": Private(
        "torch.distributed:ProcessGroup.reduce_scatter_single",
        "reduces gradients",
        former="torch.distributed:ProcessGroup._reduce_scatter_base",
    ),
    "backend_of": Private("torch.distributed:ProcessGroup._get_backend", "gives its groups the job's time-out"),
    "device_types": Private("torch.distributed:ProcessGroup._device_types", "gives its groups the job's time-out"),
    "BackendOptions": Private(f"{_C10D}:Backend.Options", "gives its groups the job's time-out"),
    "backend_timeout": Private(f"{_C10D}:Backend.Options._timeout", "gives its groups the job's time-out"),
    "sequence_number": Private(
        "torch.distributed:ProcessGroup._get_sequence_number_for_group", "counts the collectives of a step"
    ),
    "default_store": Private("torch.distributed.distributed_c10d:_get_default_store", "compares ranks", given=0),
    "world": Private("torch.distributed.distributed_c10d:_world", "counts the collectives of a unit", has="pg_map"),
    "resolve_process_group": Private(f"{_C10D}:_resolve_process_group", "observes the collectives of other engines"),
    "script_type": Private("torch:ScriptObject._type", "observes the collectives of other engines"),
    "FakeStore": Private(
        "torch.testing._internal.distributed.fake_pg:FakeStore", "simulates a rank without the others"
    ),
    "start_workers": Private(f"{_AGENT}._start_workers", "starts ranks", given=2),
    "monitor_workers": Private(f"{_AGENT}._monitor_workers", "watches ranks", given=2),
}
