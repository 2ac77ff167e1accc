"""Names of torch that differ between versions, or that torch does not document, in one place.

Undocumented names are looked up, with a fallback if they are missing.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from datetime import timedelta
from types import FrameType, FunctionType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.autograd.graph import Node
from torch.distributed import distributed_c10d
from torch.utils.weak import WeakTensorKeyDictionary

# 2.13 renamed `all_gather_into_tensor` and `reduce_scatter_tensor` to `*_single`; the old names warn at every call.
all_gather_single: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_coalescing_manager: Any = getattr(distributed_c10d, "_coalescing_manager", None)
# Collectives that the manager joins by itself; others need a backend that can begin and end a joint launch.
_captured = (all_gather_single, reduce_scatter_single)

# The group's own methods cost less than `isend` and `irecv`, which repeat checks (4 of 23 us).
_sends_itself = hasattr(dist.ProcessGroup, "send") and hasattr(dist.ProcessGroup, "recv")


def backend_of(group: dist.ProcessGroup | None, device: torch.device) -> str | None:
    """Return the name of a group's backend for tensors of a device, or None if there is none.

    `torch.distributed.get_backend` returns the requested backend, which may be a list ("cpu:gloo,cuda:nccl") or
    "undefined".
    """
    served = dict(entry.split(":", 1) for entry in dist.get_backend_config(group).split(","))
    return served.get(device.type)


def timeout_of(group: dist.ProcessGroup | None, device: torch.device) -> timedelta | None:
    """Return a group's timeout of one collective, or None if unknown."""
    try:
        backend: Any = (group or dist.group.WORLD)._get_backend(device)  # type: ignore[union-attr]
        found = backend.options._timeout
    except (AttributeError, RuntimeError):
        return None
    return found if isinstance(found, timedelta) else None


def launched_of(group: dist.ProcessGroup) -> int:
    """Return the number of collectives that this rank has launched in a group, or -1 if unknown."""
    try:
        return int(group._get_sequence_number_for_group())  # type: ignore[attr-defined]
    except (AttributeError, RuntimeError):
        return -1


def group_named(name: str) -> dist.ProcessGroup | None:
    """Return the process group of a name, or None if this rank has none or torch has no such lookup."""
    try:
        found = distributed_c10d._resolve_process_group(name)  # type: ignore[attr-defined, arg-type, unused-ignore]
    except (AttributeError, RuntimeError):
        return None
    return found if isinstance(found, dist.ProcessGroup) else None


@contextlib.contextmanager
def connecting_alone() -> Iterator[None]:
    """Connect new groups without the default group's ranks inside the block.

    If the default group has a device (`init_process_group(device_id=...)`), torch creates NCCL communicators by
    splitting the default group's. That needs all of its ranks, and waits for ranks that do not take part.
    """
    default: Any = dist.group.WORLD
    bound = getattr(default, "bound_device_id", None)
    if bound is None:
        yield
        return
    default.bound_device_id = None
    try:
        yield
    finally:
        default.bound_device_id = bound


def make_group(
    ranks: Sequence[int],
    name: str,
    timeout: timedelta,
    backend: str,
    options: Any,
    device: torch.device | None,
) -> dist.ProcessGroup:
    """Create a process group of global ranks under a name that no other group has; only these ranks call.

    `torch.distributed.new_group` takes no name. Its own name depends on the number of groups of the process, which may
    differ between ranks. The group connects at once for `device`; None: at its first collective.
    """
    default = distributed_c10d._get_default_group()
    store = distributed_c10d._world.pg_map[default][1]
    group, _ = distributed_c10d._new_process_group_helper(
        len(ranks),
        list(ranks).index(dist.get_rank()),
        list(ranks),
        dist.Backend(backend),
        store,
        distributed_c10d.GroupName(name),
        options,
        timeout=timeout,
        device_id=device,
    )
    assert isinstance(group, dist.ProcessGroup)
    distributed_c10d._world.pg_group_ranks[group] = {rank: number for number, rank in enumerate(ranks)}
    return group


def options_of(backend: str, timeout: timedelta, *, urgent: bool) -> Any:
    """Return options of a group, or None for other backends than NCCL.

    `urgent`: streams have high priority; otherwise, for receives that wait long, kernels take few multiprocessors.
    """
    options = getattr(getattr(dist, "ProcessGroupNCCL", None), "Options", None) if backend == "nccl" else None
    if options is None:
        return None
    # NCCL's kernels are short and other streams wait for them, while a model's kernels fill the device with blocks.
    made = options(is_high_priority_stream=urgent)
    made._timeout = timeout
    if not urgent and hasattr(getattr(made, "config", None), "max_ctas"):
        made.config.min_ctas, made.config.max_ctas = 1, _FEW_CTAS
    return made


_FEW_CTAS = 4  # blocks of a kernel, each of which occupies a multiprocessor


def allocator_settings() -> str:
    """Return the last settings of torch's device memory allocator; empty if none or unknown."""
    tell: Callable[[], str] = getattr(torch._C, "_accelerator_getAllocatorSettings", lambda: "")
    return tell()


def set_allocator_settings(settings: str) -> bool:
    """Set torch's device memory allocator; return True if possible."""
    older = getattr(torch._C, "_cuda_cudaCachingAllocator_set_allocator_settings", None)
    change: Callable[[str], None] | None = getattr(torch._C, "_accelerator_setAllocatorSettings", older)
    if change is None:
        return False
    try:
        change(settings)
    except (RuntimeError, ValueError):
        return False
    return True


def default_store() -> dist.Store | None:
    """Return the store of the default group's rendezvous, or None if unknown."""
    try:
        store = distributed_c10d._get_default_store()
    except (AttributeError, RuntimeError, ValueError):
        return None
    return store if isinstance(store, dist.Store) else None


def store_host() -> str | None:
    """Return the host of the default group's store, as known to all ranks, or None if unknown."""
    try:
        store: Any = distributed_c10d._get_default_store()
        while isinstance(store, dist.PrefixStore):
            store = store.underlying_store
        return str(store.host)
    except (AttributeError, RuntimeError, ValueError):
        return None


def send(tensor: torch.Tensor, group: dist.ProcessGroup, peer: int, tag: int) -> dist.Work | None:
    """Launch a message to group rank `peer`; this rank must be a member."""
    if _sends_itself:
        return group.send([tensor], peer, tag)
    return dist.isend(tensor, group=group, tag=tag, group_dst=peer)


def receive(tensor: torch.Tensor, group: dist.ProcessGroup, peer: int, tag: int) -> dist.Work | None:
    """Launch the receipt of a message from group rank `peer`; this rank must be a member."""
    if _sends_itself:
        return group.recv([tensor], peer, tag)
    return dist.irecv(tensor, group=group, tag=tag, group_src=peer)


def launch_together(
    op: Callable[..., Any],
    arguments: Sequence[tuple[torch.Tensor, torch.Tensor]],
    group: dist.ProcessGroup,
    *,
    async_op: bool = True,
) -> list[Any]:
    """Call `op(output, input)` for each pair, as one collective if the backend can join them; return the works.

    Gloo gets each pair separately, because it would copy all into one tensor of the first one's dtype, which rounds the
    others. `async_op=False` blocks; on NCCL it runs on the current stream, without events and another stream.
    """
    context: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    if len(arguments) > 1 and _coalescing_manager is not None:
        device = arguments[0][0].device
        joint = device if op not in _captured else None
        if device.type != "cpu" and (joint is None or _can_join(group, device)):
            context = _coalescing_manager(group, joint, async_ops=async_op)
    works = []
    with context as together:
        for output, given in arguments:
            works.append(op(output, given, group=group, async_op=async_op))
    return works if together is None else [together] if async_op else []


def memory_registry(group: dist.ProcessGroup, device: torch.device) -> Any:
    """Return the backend of a group if it registers pools of memory of its own on a device, otherwise None."""
    try:
        backend = group._get_backend(device)
        usable = backend.supports_tensor_alloc(device) and hasattr(backend, "register_mem_pool")
    except (AttributeError, RuntimeError):
        return None
    return backend if usable else None


def _can_join(group: dist.ProcessGroup, device: torch.device) -> bool:
    try:
        return bool(group._get_backend(device).supports_coalescing)
    except (AttributeError, RuntimeError):
        return False


_Function = TypeVar("_Function", bound=Callable[..., Any])


def never_compiled(function: _Function) -> _Function:
    """Keep `torch.compile` out of a function and of its callees; a graph that reaches it ends there.

    It costs nothing at a call. Unlike `torch.compiler.disable`, it does not import the compiler (1 to 2 s). Compiled
    functions that are called from inside stay compiled.
    """
    try:
        evaluation: Any = torch._C._dynamo.eval_frame
        skip = evaluation._FrameAction.SKIP
        evaluation.set_code_exec_strategy(function.__code__, evaluation._FrameExecStrategy(skip, skip))
    except AttributeError:
        return torch.compiler.disable(function)
    function._torchdynamo_disable = True  # type: ignore[attr-defined]
    function._torchdynamo_disable_msg = (  # type: ignore[attr-defined]
        "shardwise gathers, releases and reduces parameters between compiled regions; leave fullgraph=True out"
    )
    return function


def without_compiler(function: _Function) -> _Function:
    """Return a function of torch without its decorator, which imports the compiler (1 to 2 s) at the first call."""
    return getattr(function, "__wrapped__", function)


_peek_transform: Callable[[], Any] = getattr(
    getattr(torch._C, "_functorch", None), "peek_interpreter_stack", lambda: None
)


def without_function_modes() -> contextlib.AbstractContextManager[Any]:
    """Return a context in which modes of torch functions do not change functions, such as those that split them."""
    found: contextlib.AbstractContextManager[Any] = torch._C.DisableTorchFunction()
    return found


def without_modes() -> contextlib.AbstractContextManager[Any]:
    """Return a context in which operators compute values, also where a mode makes fake tensors outside."""
    from torch.utils._python_dispatch import _disable_current_modes

    found: contextlib.AbstractContextManager[Any] = _disable_current_modes()
    return found


@never_compiled
def transforming() -> bool:
    """Return True while a transform of torch.func (grad, vjp, jacrev, vmap, ...) runs; False if unknown."""
    return _peek_transform() is not None


# Returns the version counter of a tensor.
version_of: Callable[[torch.Tensor], int] = torch.Tensor._version.__get__  # type: ignore[attr-defined]

# Context without dispatch to `__torch_function__` of tensor subclasses.
without_overrides = torch._C.DisableTorchFunctionSubclass


def storage_users(tensor: torch.Tensor) -> int | None:
    """Return the number of tensors and other objects that refer to a tensor's memory; None if unknown."""
    count: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)
    return None if count is None else count(tensor.untyped_storage()._cdata)


def is_shared(tensor: torch.Tensor) -> bool:
    """Return True if other tensors or objects refer, or may refer, to a tensor's memory."""
    users = storage_users(tensor)
    return users is None or users != _users_of_one()


@functools.cache
def _users_of_one() -> int | None:
    return storage_users(torch.empty(0, device="cpu"))


# Memory can go from one storage to another (from torch 2.12 on); both keep their tensors.
can_hand_memory_on = hasattr(torch.UntypedStorage, "_swap_data_ptr_")


def hand_memory_on(giver: torch.UntypedStorage, heir: torch.UntypedStorage) -> None:
    """Move the memory of a storage to another one of the same device, which has none; the first has none afterwards."""
    heir._swap_data_ptr_(giver)  # type: ignore[attr-defined]


def copy_together(flat: torch.Tensor, pieces: Sequence[torch.Tensor]) -> None:
    """Copy tensors of one dtype, none of them empty or 0-D, consecutively into a 1-D tensor that they fill."""
    dtypes = pieces[0].dtype, flat.dtype
    if _copies_together is not None and (dtypes[0] is dtypes[1] or dtypes == (torch.bfloat16, torch.float32)):
        _copies_together(pieces, dim=0, num_chunks=1, out=flat.view(1, -1))  # without a view of each: 7 us, not 14
    else:
        # For other conversions `_chunk_cat` launches a kernel for each piece.
        places = flat.split_with_sizes([piece.numel() for piece in pieces])
        torch._foreach_copy_(places, [piece.reshape(-1) for piece in pieces])


_copies_together: Callable[..., Any] | None = getattr(torch, "_chunk_cat", None)


def share_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return True if two tensors have the same storage; storages of a dry run have no address to compare."""
    return one.untyped_storage()._cdata == other.untyped_storage()._cdata


def watch_clipping(report: Callable[[list[torch.Tensor]], None]) -> None:
    """Call `report` with the parameters of each call of `torch.nn.utils.clip_grad_norm_` in this process.

    The function calls a helper by its name in its own module, which also covers names imported before. A second call of
    `watch_clipping` does nothing.
    """
    module, name = torch.nn.utils.clip_grad, "_clip_grads_with_norm_"
    original = getattr(module, name, None)
    if original is None or hasattr(original, "__wrapped_by_shardwise__"):
        return

    @functools.wraps(original)
    def watched(parameters: Any, *args: Any, **kwargs: Any) -> Any:
        report(list(parameters) if isinstance(parameters, (list, tuple)) else [parameters])
        return original(parameters, *args, **kwargs)

    watched.__wrapped_by_shardwise__ = True  # type: ignore[attr-defined]
    setattr(module, name, watched)


@contextlib.contextmanager
def fake_group(world: int) -> Iterator[None]:
    """Make this process rank 0 of `world` ranks, of which no other exists: collectives change nothing. Another
    `init_process_group` inside the block changes nothing, too.
    """
    import torch.testing._internal.distributed.fake_pg  # noqa: F401  (registers the backend)

    start = dist.init_process_group
    start("fake", store=dist.HashStore(), rank=0, world_size=world)
    dist.init_process_group = distributed_c10d.init_process_group = lambda *_, **__: None
    try:
        yield
    finally:
        dist.init_process_group = distributed_c10d.init_process_group = start
        dist.destroy_process_group()


def is_fake_group(group: dist.ProcessGroup | None = None) -> bool:
    """Return True inside `fake_group`."""
    return dist.get_backend(group) == "fake"


def dtype_of_to(*args: Any, **kwargs: Any) -> torch.dtype | None:
    """Return the dtype to which arguments of `Module.to` convert; None: they only move."""
    found: torch.dtype | None = torch._C._nn._parse_to(*args, **kwargs)[1]
    return found


@contextlib.contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Give modules that are built inside the block parameters without values, on the meta device, which takes no memory
    and no time. Where modules are moved they stay, and change their dtype.
    """
    register, moves = torch.nn.Module.register_parameter, ("to", "cuda", "cpu")
    known = WeakTensorKeyDictionary()  # a parameter of two modules stays one
    originals = {name: getattr(torch.nn.Module, name) for name in moves}

    def register_parameter(module: torch.nn.Module, name: str, param: torch.nn.Parameter | None) -> None:
        register(module, name, param)
        if param is None or type(param) is not torch.nn.Parameter or param.is_meta:
            return
        if param not in known:
            known[param] = torch.nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
            known[param].__dict__.update(param.__dict__)
        module._parameters[name] = known[param]

    def to(module: torch.nn.Module, *args: Any, **kwargs: Any) -> torch.nn.Module:
        dtype = dtype_of_to(*args, **kwargs)
        return module if dtype is None else originals["to"](module, dtype)

    torch.nn.Module.register_parameter = register_parameter  # type: ignore[assignment,method-assign]
    torch.nn.Module.to = to  # type: ignore[assignment,method-assign]
    torch.nn.Module.cuda = torch.nn.Module.cpu = lambda module, *_: module  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        torch.nn.Module.register_parameter = register  # type: ignore[method-assign]
        for name, original in originals.items():
            setattr(torch.nn.Module, name, original)


def fake_tensor() -> type | None:
    """Return the class of torch's fake tensors; None before torch has imported it."""
    return getattr(sys.modules.get("torch._subclasses.fake_tensor"), "FakeTensor", None)


_DEVICE = torch.ops.prim.device.default


def requested_device(function: Any, args: Sequence[Any]) -> torch.device | None:
    """Return the device of a fake tensor if a function of a dispatch mode asks for it, which is more than half of all
    calls, and slow in torch's modes; otherwise None.
    """
    return getattr(args[0], "fake_device", None) if function is _DEVICE else None


def has_values(tensor: torch.Tensor) -> bool:
    """Return True if a tensor has values: False if its class dispatches operators, as torch's fake tensors do."""
    return type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__


_standing_for: ContextVar[int] = ContextVar("standing_for", default=1)


@contextlib.contextmanager
def standing_for(times: int) -> Iterator[None]:
    """Let the operators of a block, in a dry run, stand for so many times of them, which are left out."""
    token = _standing_for.set(times)
    try:
        yield
    finally:
        _standing_for.reset(token)


def times_of_operators() -> int:
    """Return how many times the operators of this place count; see `standing_for`."""
    return _standing_for.get()


def allow_gradient_dtype(parameter: torch.Tensor, dtype: torch.dtype) -> None:
    """Allow a parameter's gradient another dtype than the parameter's."""
    if dtype is not parameter.dtype and hasattr(parameter, "grad_dtype"):
        parameter.grad_dtype = dtype


def fused_step(algorithm: str, device: torch.device, dtype: torch.dtype) -> Callable[..., None] | None:
    """Return torch's kernel of a whole step ("adam" or "adamw"), or None if there is none.

    The kernel takes (parameters, gradients, exp_avgs, exp_avg_sqs, max_exp_avg_sqs, steps) and the options by keyword.
    """
    kernel: Callable[..., None] | None = getattr(torch, f"_fused_{algorithm}_", None)
    return kernel if kernel is not None and _runs_fused(algorithm, device.type, dtype) else None


@functools.cache
def _runs_fused(algorithm: str, device_type: str, dtype: torch.dtype) -> bool:
    """Try a kernel on one element, because the supported devices are not public and change between versions."""
    one = torch.ones((), dtype=torch.float32, device=device_type)
    tensors = [[torch.zeros(1, dtype=dtype, device=device_type)] for _ in range(4)]
    options: dict[str, Any] = {"lr": 0.0, "beta1": 0.0, "beta2": 0.0, "weight_decay": 0.0, "eps": 1.0}
    try:
        getattr(torch, f"_fused_{algorithm}_")(*tensors, [], [one], **options, amsgrad=False, maximize=False)
    except (NotImplementedError, RuntimeError, TypeError):
        return False
    return True


def forget_groups() -> None:
    """Remove process groups that torch has stored as default values of arguments.

    Otherwise `torch.distributed.nn.functional`, which the first optimizer imports, keeps the default group of that
    moment for ever, and threads of a destroyed Gloo group run on. None means the default group too.
    """
    for function in vars(sys.modules.get("torch.distributed.nn.functional", sys)).values():
        defaults = getattr(function, "__defaults__", None)
        if isinstance(function, FunctionType) and defaults:
            function.__defaults__ = tuple(None if isinstance(value, dist.ProcessGroup) else value for value in defaults)


# Returns True if a profiler of this process is recording, or if unknown.
profiler_active: Callable[[], bool] = functools.partial(getattr, torch.autograd.profiler, "_is_profiler_enabled", True)


def global_step_hooks() -> list[Callable[..., Any]]:
    """Return the hooks around the step of every optimizer; none if unknown."""
    optimizer_module = sys.modules[torch.optim.Optimizer.__module__]
    found = (getattr(optimizer_module, f"_global_optimizer_{kind}_hooks", {}) for kind in ("pre", "post"))
    return [hook for hooks in found for hook in hooks.values()]


# What torch does not document about autograd and modules; tests/test_compat.py fails if a version differs.

LEAF_NUMBER = 2**64 - 1  # `number_of` nodes that accumulate into a leaf

# Returns the number of the next graph node on this thread.
number_now: Callable[[], int] = torch.autograd._get_sequence_nr

# Returns the innermost pair of saved-tensor hooks, or None (True: also where tracing ignores them).
saved_hooks_in_force: Callable[[bool], Any] = torch._C._autograd._top_saved_tensors_default_hooks

# Returns the reason why saved-tensor hooks are disabled, or None.
reason_against_saved_hooks: Callable[[], str | None] = (
    torch._C._autograd._saved_tensors_hooks_get_disabled_error_message
)


def number_of(node: Node) -> int:
    """Return the creation number of a node, which increases, or `LEAF_NUMBER`."""
    return node._sequence_nr()


def version_counter(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor without values that shares the version counter of another one."""
    with without_overrides():
        counter = tensor.detach()
        counter.data = torch.empty(0, device=tensor.device)
    return counter


def detached_with_version(tensor: torch.Tensor) -> torch.Tensor:
    """Return a detached tensor that shares the version counter, also in a dispatch mode, where `detach` does not."""
    with torch._C._SetExcludeDispatchKeyGuard(torch._C.DispatchKey.ADInplaceOrView, False):
        return tensor.detach()


def share_version_counter(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return True if in-place changes of either tensor are counted for both, as for a tensor and its views."""
    # Equal numbers are no proof: pieces of one storage (`torch.unsafe_split`) may have their own counters.
    version = one._version
    if other._version != version:
        return False
    set_version = torch._C._autograd._unsafe_set_version_counter
    set_version((one,), (version + 1,))
    try:
        return other._version != version
    finally:
        set_version((one,), (version,))


def check_version(counter: torch.Tensor, version: int, tensor: torch.Tensor) -> None:
    """Raise autograd's error for a saved tensor that was modified; with hooks, autograd leaves this check to them.

    `counter` shares the version counter of the saved tensor, `version` is the saved version.
    """
    if counter._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: a "
            f"{tensor.dtype} tensor of shape {tuple(tensor.shape)} is at version {counter._version}; expected "
            f"version {version} instead"
        )


# Returns the number of this thread's backward pass, unique in the process, or -1.
number_of_pass: Callable[[], int] = torch._C._current_graph_task_id


def backward_pass() -> int | None:
    """Return the number of the backward pass that autograd runs on this thread, or None."""
    number = number_of_pass()
    return None if number == -1 else number


def current_node() -> Node | None:
    """Return the node that a backward pass runs now on this thread, or None."""
    return torch._C._current_autograd_node()


def keep_with_graph(tensor: torch.Tensor, key: Any, value: Any) -> None:
    """Keep a value alive as long as the graph of a tensor, if it has one."""
    if tensor.grad_fn is not None:
        metadata: Any = tensor.grad_fn.metadata  # stubs take it for a method
        metadata[key] = value


def shape_in_graph(parameter: torch.Tensor) -> tuple[int, ...]:
    """Return the shape that a parameter's gradients must have: in a live graph, that at the parameter's creation."""
    if not parameter.requires_grad:
        return tuple(parameter.shape)
    (expected,) = torch.autograd.graph.get_gradient_edge(parameter).node._input_metadata
    return tuple(expected.shape)


def result_shapes(node: Node) -> list[tuple[int, ...]]:
    """Return the shapes of a graph node's results in the forward pass."""
    results: Any = node._input_metadata
    return [tuple(result.shape) for result in results]


def will_run(node: Node) -> bool:
    """Return True if the running backward pass executes a node that accumulates into a parameter."""
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:
        return False  # torch.autograd.grad hands the parameter's gradient out, and nothing is accumulated


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Call a function at the end of the running backward pass, unless an exception ends the pass."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def local_of(frame: FrameType, name: str) -> Any:
    """Return a local variable of a running function, or None."""
    values = frame.f_locals
    found = values.get(name)
    if sys.version_info < (3, 13) and frame.f_code.co_flags & inspect.CO_OPTIMIZED:  # else they are the globals
        # Before Python 3.13 the frame keeps a copy of all locals, and tensors alive, until the function returns.
        values.clear()
    return found


def calls_running(module: torch.nn.Module | None) -> int:
    """Return the number of calls of a module on this thread's stack."""
    calls = 0
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        calls += frame.f_code.co_name == "_call_impl" and local_of(frame, "self") is module
        frame = frame.f_back
    return calls


def belongs_to_transformers(hook: Any) -> bool:
    """Return True for a forward hook of transformers, by which a model collects its outputs (router logits).

    The hook collects into a context variable, and does nothing in an empty context.
    """
    return str(getattr(hook, "__module__", "")).startswith("transformers.")


def only_counts_steps(step: Any) -> bool:
    """Return True if an optimizer's `step` is wrapped by a scheduler, which counts the calls."""
    return bool(getattr(step, "_wrapped_by_lr_sched", False))


def grouped_product(weight: torch.Tensor) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor] | None:
    """Return torch's product of runs of rows, each with its own matrix of `weight` [number, out, in]; None if unusable.

    It takes rows, matrices [number, in, out] and the ends of the runs as int32. None on a CPU, where it is no faster
    than separate products; for GPUs before compute capability 8.0; for other dtypes than bf16; and for matrix rows that
    are no multiples of 16 bytes.
    """
    product = getattr(torch.nn.functional, "grouped_mm", None)
    if product is None or weight.device.type != "cuda" or weight.dtype != torch.bfloat16:
        return None
    aligned = all(size * weight.element_size() % 16 == 0 for size in weight.shape[-2:])
    if not aligned or torch.cuda.get_device_capability(weight.device) < (8, 0):
        return None
    return lambda rows, matrices, ends: product(rows, matrices, offs=ends)


def assert_later(condition: torch.Tensor, message: str) -> None:
    """Fail on the device with a message of up to 250 characters unless a condition holds; the host does not wait.

    On CUDA the next call that learns of the failure raises, and later kernels and collectives do not run.
    """
    torch._assert_async(condition, message[:250])


def writes_empty_groups(device: torch.device) -> bool:
    """Return True if the backward pass of torch's grouped product writes gradients of matrices without rows."""
    # From compute capability 10.0 on these may stay uninitialised (pytorch#172439).
    return device.type != "cuda" or torch.cuda.get_device_capability(device) < (10, 0)


def flash_attention_applies(query: torch.Tensor) -> bool:
    """Return True if torch's flash attention computes (rows, heads, tokens, width) tensors like `query`."""
    if query.device.type == "cpu":
        return query.dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16)
    if query.device.type != "cuda" or query.dtype not in (torch.bfloat16, torch.float16):
        return False
    backend = torch.backends.cuda
    fits = query.shape[-1] % 8 == 0 and query.shape[-1] <= 256
    usable = fits and backend.flash_sdp_enabled() and backend.is_flash_attention_available()
    return usable and torch.cuda.get_device_capability(query.device) >= (8, 0)


def flash_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool, scale: float
) -> tuple[torch.Tensor, torch.Tensor, tuple[torch.Tensor, ...]]:
    """Return output, log-sum-exp (rows, heads, tokens) and what else the backward pass needs; not differentiable.

    All tensors have the same heads; `causal` is for as many queries as keys.
    """
    if query.device.type == "cpu":
        cpu = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        return (*cpu(query, key, value, 0.0, causal, scale=scale), ())
    found = torch.ops.aten._scaled_dot_product_flash_attention(query, key, value, 0.0, causal, False, scale=scale)
    return found[0], found[1], (found[6], found[7])


def flash_attention_backward(
    given: tuple[torch.Tensor, ...], causal: bool, scale: float, more: tuple[torch.Tensor, ...]
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of query, key and value.

    `given`: gradient of the output, query, key, value, output and log-sum-exp, all contiguous. The last two may be
    those of more keys: then the result is the part of these keys.
    """
    _, query, key, *_ = given
    if query.device.type == "cpu":
        found = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(*given, 0.0, causal, scale=scale)
    else:
        lengths = (None, None, query.shape[2], key.shape[2])
        found = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            *given, *lengths, 0.0, causal, *more, scale=scale
        )
    return found[0], found[1], found[2]
