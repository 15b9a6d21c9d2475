"""The private names of torch, as attributes of this module; private_names.py has the table.

A name is looked up at its first use, and its form is checked: whether it is there, and, of a Python function, whether
the call that we make fits its signature. If torch has changed it, TorchChanged says so in one line: the version of
torch, the name, its use, and a tested version. After that it is an attribute of this module, so that a call costs as
much as torch's own name would. Importing this module imports nothing of torch, and changes nothing in it.

Classes and decorators are taken by `from shardwise.base.torch_internals.torch_private import …`, which looks them up
when the file is imported; functions by `torch_private.NAME`, which does so at the first call: some exist in CUDA builds
only, or import Inductor.
"""

import inspect
from collections.abc import Callable
from importlib import import_module
from typing import TYPE_CHECKING, Any

from shardwise.base.errors import TorchChanged
from shardwise.base.torch_internals.private_names import PRIVATE, Private
from shardwise.base.vocabulary.tested_versions import TESTED_TORCH, installed_torch


def need(*names: str) -> None:
    """Look names up now: torch calls what stands under them, so that their absence would go unnoticed."""
    for name in names:
        if name not in globals():
            globals()[name] = _checked(PRIVATE[name])


def place(name: str) -> tuple[Any, str]:
    """Return the object of torch that has a name, and the name in it, to put something else there."""
    need(name)
    return _owner(PRIVATE[name].path)


def replace(name: str, value: object) -> Any:
    """Put `value` in torch's place under a name; return what was there."""
    owner, attribute = place(name)
    before = getattr(owner, attribute)
    setattr(owner, attribute, value)
    return before


def _checked(private: Private) -> Any:
    """Return what a row names, or raise one line that says what does not fit."""
    try:
        try:
            owner, attribute = _owner(private.path)
            found = getattr(owner, attribute)
        except AttributeError:
            if not private.former:
                raise
            owner, attribute = _owner(private.former)
            found = getattr(owner, attribute)
    except (ImportError, AttributeError) as error:
        raise _changed(private, f"is not there ({error})") from error
    misfit = _misfit(found, private)
    if misfit:
        raise _changed(private, misfit)
    return found.fget if isinstance(found, property) else found


def _owner(path: str) -> tuple[Any, str]:
    """Return the object that has a name, and the name in it."""
    module, _, inside = path.partition(":")
    *owners, attribute = inside.split(".")
    owner: Any = import_module(module)
    for name in owners:
        owner = getattr(owner, name)
    return owner, attribute


def _misfit(found: Any, private: Private) -> str:
    """Return how the form differs from what we use; "" if it does not, or if it is not known, as of a built-in one."""
    missing = [name for name in private.has.split() if not hasattr(found, name)]
    if missing:
        return f"has no {', '.join(missing)}"
    if private.given is None and not private.named:
        return ""
    try:
        signature = inspect.signature(found)
    except (TypeError, ValueError):
        return ""
    try:
        signature.bind(*[None] * (private.given or 0), **dict.fromkeys(private.named.split()))
    except TypeError as error:
        return f"takes other arguments ({error})"
    return ""


def _changed(private: Private, what: str) -> TorchChanged:
    oldest, newest = TESTED_TORCH[0], TESTED_TORCH[-1]
    return TorchChanged(
        f"torch {installed_torch()}: {private.path.replace(':', '.')}, with which Shardwise {private.use}, {what}; "
        f"it was tested with torch {oldest} to {newest}: install torch {newest}"
    )


if TYPE_CHECKING:
    import torch
    import torch._C._distributed_c10d as c10d
    import torch.distributed as dist
    import torch.nn.modules.batchnorm as batchnorm
    import torch.utils._python_dispatch as dispatch
    from torch._dynamo import callback
    from torch._functorch import aot_autograd
    from torch._inductor import compile_fx, decomposition, lowering
    from torch._subclasses import fake_tensor
    from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
    from torch.nn.utils import stateless
    from torch.testing._internal.distributed import fake_pg

    # The same names for type checkers; a test compares both lists.
    current_graph_task_id = torch._C._current_graph_task_id
    keeps_graph = torch._C._autograd._get_current_graph_task_keep_graph
    top_saved_tensors_hooks = torch._C._autograd._top_saved_tensors_default_hooks
    will_engine_execute_node = torch._C._will_engine_execute_node
    queue_callback = torch.autograd.Variable._execution_engine.queue_callback
    engine_run_backward = torch.autograd.graph._engine_run_backward
    DisableTorchFunctionSubclass = torch._C.DisableTorchFunctionSubclass
    ExcludeDispatchKey = torch._C._SetExcludeDispatchKeyGuard
    ADInplaceOrView = torch._C.DispatchKey.ADInplaceOrView
    TorchDispatchMode = dispatch.TorchDispatchMode
    disable_current_modes = dispatch._disable_current_modes
    is_traceable_wrapper_subclass = dispatch.is_traceable_wrapper_subclass
    peek_interpreter_stack = torch._C._functorch.peek_interpreter_stack
    OpOverload = torch._ops.OpOverload
    FakeTensor = fake_tensor.FakeTensor
    FakeTensorMode = fake_tensor.FakeTensorMode
    DataDependentOutputException = fake_tensor.DataDependentOutputException
    DynamicOutputShapeException = fake_tensor.DynamicOutputShapeException
    tensor_data: Any = torch._C.TensorBase.data
    storage_use_count = torch._C._storage_Use_Count
    make_subclass = torch.Tensor._make_subclass
    make_wrapper_subclass = torch.Tensor._make_wrapper_subclass
    BatchNorm = batchnorm._BatchNorm
    IncompatibleKeys = torch.nn.modules.module._IncompatibleKeys
    save_to_state_dict = torch.nn.Module._save_to_state_dict
    register_load_state_dict_pre_hook = torch.nn.Module._register_load_state_dict_pre_hook
    reparametrize_module = stateless._reparametrize_module
    clip_grads_with_norm = torch.nn.utils.clip_grad._clip_grads_with_norm_
    unscale_grads = torch.amp.GradScaler._unscale_grads_
    disable_dynamo = torch._compile._disable_dynamo
    callback_handler = callback.callback_handler
    optimize: Callable[..., Any]
    dynamo_settings: Callable[..., Any]
    dynamo_counters: Any
    guards_scope: Callable[[], dict[str, Any]]
    InstructionTranslator: Any
    AttributeMutationNew: type[Any]
    handle_exception: Callable[..., None]
    store_attribute: Callable[..., None]
    ClassVariable: type[Any]
    lookup_backend: Callable[[str], Callable[..., Any]]
    ConvertFrameReturn: Callable[[], Any]
    function_modes: Callable[[], list[Any]]
    DeviceContext: type[Any]
    num_dispatch_modes: Callable[[], int]
    has_global_hooks: Callable[[], bool]
    aot_function = aot_autograd.aot_function
    select_decomp_table = decomposition.select_decomp_table
    partition_fn = compile_fx.partition_fn
    fallbacks = lowering.fallbacks
    lowerings = lowering.lowerings
    begin_allocate_stream_to_pool = torch._C._cuda_beginAllocateCurrentStreamToPool
    begin_allocate_thread_to_pool = torch._C._cuda_beginAllocateCurrentThreadToPool
    end_allocate_to_pool = torch._C._cuda_endAllocateToPool
    release_pool = torch._C._cuda_releasePool
    set_allocator_settings = torch._C._accelerator_setAllocatorSettings
    record_memory_history = torch.cuda.memory._record_memory_history
    memory_snapshot = torch.cuda.memory._snapshot
    parse_kineto_results = torch.autograd.profiler.profile._parse_kineto_results
    Store = c10d.Store
    FileStore = c10d.FileStore
    HashStore = c10d.HashStore
    PrefixStore = c10d.PrefixStore
    TCPStore = c10d.TCPStore
    AllgatherOptions = c10d.AllgatherOptions
    AllreduceOptions = c10d.AllreduceOptions
    ReduceScatterOptions = c10d.ReduceScatterOptions
    all_gather_single = dist.ProcessGroup._allgather_base
    reduce_scatter_single = dist.ProcessGroup._reduce_scatter_base
    backend_of = dist.ProcessGroup._get_backend
    device_types: Any = dist.ProcessGroup._device_types
    BackendOptions = c10d.Backend.Options
    backend_timeout: Any = c10d.Backend.Options._timeout
    sequence_number: Callable[[dist.ProcessGroup], int]
    default_store = dist.distributed_c10d._get_default_store
    world = dist.distributed_c10d._world
    resolve_process_group = c10d._resolve_process_group
    script_type = torch.ScriptObject._type
    FakeStore = fake_pg.FakeStore
    start_workers = LocalElasticAgent._start_workers
    monitor_workers = LocalElasticAgent._monitor_workers
else:

    def __getattr__(name: str) -> Any:
        if name not in PRIVATE:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        need(name)
        return globals()[name]
