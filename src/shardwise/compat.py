"""Names of torch that differ between versions, or that torch does not document, in one place.

2.13 renamed `all_gather_into_tensor` and `reduce_scatter_tensor` to `*_single` and warns at every call of the old
names, so the new name is taken where it exists. Undocumented names are looked up, with a fallback where they
are missing.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from types import FrameType, FunctionType
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch.autograd.graph import Node
from torch.distributed import distributed_c10d

all_gather_single: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
reduce_scatter_single: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

_coalescing_manager: Any = getattr(distributed_c10d, "_coalescing_manager", None)
_captured = (all_gather_single, reduce_scatter_single)
"""Collectives that the manager joins by itself; others need a backend that can begin and end a joint launch."""

_sends_itself = hasattr(dist.ProcessGroup, "send") and hasattr(dist.ProcessGroup, "recv")
"""The group's own methods cost less than `isend` and `irecv`, which check what is known here (4 of 23 us)."""


def backend_of(group: dist.ProcessGroup | None, device: torch.device) -> str | None:
    """Return the name of the backend that serves tensors of a device in a group, or None if there is none.

    `torch.distributed.get_backend` gives the requested backend, which may be a list ("cpu:gloo,cuda:nccl") or
    nothing at all ("undefined").
    """
    served = dict(entry.split(":", 1) for entry in dist.get_backend_config(group).split(","))
    return served.get(device.type)


def timeout_of(group: dist.ProcessGroup | None, device: torch.device) -> timedelta | None:
    """Return a group's limit for one collective, or None where torch does not tell."""
    try:
        backend: Any = (group or dist.group.WORLD)._get_backend(device)  # type: ignore[union-attr]
        found = backend.options._timeout
    except (AttributeError, RuntimeError):
        return None
    return found if isinstance(found, timedelta) else None


def launched_of(group: dist.ProcessGroup) -> int:
    """Return how many collectives this rank has launched in a group, or -1 where torch does not tell."""
    try:
        return int(group._get_sequence_number_for_group())  # type: ignore[attr-defined]
    except (AttributeError, RuntimeError):
        return -1


def group_named(name: str) -> dist.ProcessGroup | None:
    """Return the process group of a name, or None if this rank has none or torch does not tell."""
    try:
        found = distributed_c10d._resolve_process_group(name)  # type: ignore[attr-defined, arg-type, unused-ignore]
    except (AttributeError, RuntimeError):
        return None
    return found if isinstance(found, dist.ProcessGroup) else None


@contextlib.contextmanager
def connecting_alone() -> Iterator[None]:
    """Have groups that are made inside of the block connect by themselves.

    If the default group has a device (`init_process_group(device_id=...)`), torch makes NCCL's communicators by
    splitting that of the default group, for which it needs all of its ranks, and waits for those that are elsewhere.
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
    """Make a process group of some ranks under a given name; only these ranks call.

    `torch.distributed.new_group` takes no name. Its own name depends on how many groups the process has, which may
    differ between ranks.

    Args:
        ranks: global numbers, this one among them.
        name: the same on all of them, and of no other group.
        timeout: limit for one collective.
        backend: name of torch's backend.
        options: of the backend.
        device: the group connects at once for this device; None: at its first collective.
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


def urgent_options(backend: str, timeout: timedelta) -> Any:
    """Return options of a group whose kernels go before those that wait on other streams; None: there are none.

    NCCL's kernels are short and others wait for them, while a model's fill the device with blocks that are queued.

    Args:
        backend: of the group.
        timeout: of the group, which torch compares with that of its options.
    """
    options = getattr(getattr(dist, "ProcessGroupNCCL", None), "Options", None) if backend == "nccl" else None
    if options is None:
        return None
    made = options(is_high_priority_stream=True)
    made._timeout = timeout
    return made


def allocator_settings() -> str:
    """Return how torch's allocator of device memory has been set last; empty: not at all, or torch does not tell."""
    tell: Callable[[], str] = getattr(torch._C, "_accelerator_getAllocatorSettings", lambda: "")
    return tell()


def set_allocator_settings(settings: str) -> bool:
    """Set torch's allocator of device memory; return whether it can be."""
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
    """Return the store through which the default group has met; None where torch does not tell."""
    try:
        store = distributed_c10d._get_default_store()
    except (AttributeError, RuntimeError, ValueError):
        return None
    return store if isinstance(store, dist.Store) else None


def store_host() -> str | None:
    """Return the host of the store through which the default group has met, as all ranks know it; None if unknown."""
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
    """Call `op(output, input)` for each pair, as one collective where the backend can join them.

    Gloo is given each by itself: it would copy all into one tensor of the first one's dtype, which rounds the others.

    Args:
        op: the collective.
        arguments: the pairs.
        group: the ranks.
        async_op: do not block. False, on NCCL: run on the current stream, which costs no events and no other stream.

    Returns:
        What is to be waited for.
    """
    device = arguments[0][0].device if arguments else torch.device("cpu")
    joint = device if op not in _captured else None
    if (
        len(arguments) < 2
        or device.type == "cpu"
        or _coalescing_manager is None
        or not (joint is None or _can_join(group, device))
    ):
        return [op(output, given, group=group, async_op=async_op) for output, given in arguments]
    with _coalescing_manager(group, joint, async_ops=async_op) as together:
        for output, given in arguments:
            op(output, given, group=group, async_op=async_op)
    return [together] if async_op else []


def _can_join(group: dist.ProcessGroup, device: torch.device) -> bool:
    try:
        return bool(group._get_backend(device).supports_coalescing)
    except (AttributeError, RuntimeError):
        return False


_Function = TypeVar("_Function", bound=Callable[..., Any])


def never_compiled(function: _Function) -> _Function:
    """Keep `torch.compile` out of a function and of its callees; a graph that reaches it ends there.

    It costs nothing at a call, and the compiler is not imported for it (1 to 2 s), which
    `torch.compiler.disable` would do. Compiled functions that are called from inside stay compiled.
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


_peek_transform: Callable[[], Any] = getattr(
    getattr(torch._C, "_functorch", None), "peek_interpreter_stack", lambda: None
)


@never_compiled
def transforming() -> bool:
    """Whether a transform of torch.func (grad, vjp, jacrev, vmap, ...) runs; False where torch does not tell."""
    return _peek_transform() is not None


without_overrides = torch._C.DisableTorchFunctionSubclass
"""Context without dispatch to `__torch_function__` of tensor subclasses."""


def storage_users(tensor: torch.Tensor) -> int | None:
    """Return how many tensors and other objects refer to the memory behind a tensor; None where torch does not tell."""
    count: Callable[[int], int] | None = getattr(torch._C, "_storage_Use_Count", None)
    return None if count is None else count(tensor.untyped_storage()._cdata)


def is_shared(tensor: torch.Tensor) -> bool:
    """Whether other tensors or objects refer to the memory behind a tensor, or may do so."""
    users = storage_users(tensor)
    return users is None or users != _users_of_one()


@functools.cache
def _users_of_one() -> int | None:
    return storage_users(torch.empty(0, device="cpu"))


can_hand_memory_on = hasattr(torch.UntypedStorage, "_swap_data_ptr_")
"""Whether memory can go from one storage to another (from torch 2.12 on); both keep their tensors."""


def hand_memory_on(giver: torch.UntypedStorage, heir: torch.UntypedStorage) -> None:
    """Let a storage that has no memory have that of another one of the same device, which has none afterwards."""
    heir._swap_data_ptr_(giver)  # type: ignore[attr-defined]


def copy_together(flat: torch.Tensor, pieces: Sequence[torch.Tensor]) -> None:
    """Copy tensors of one dtype, none of them empty or 0-D, one behind the other into a 1-D tensor that they fill."""
    if _copies_together is not None:
        _copies_together(pieces, dim=0, num_chunks=1, out=flat.view(1, -1))  # without a view of each: 7 us, not 14
    else:
        torch.cat([piece.reshape(-1) for piece in pieces], out=flat)


_copies_together: Callable[..., Any] | None = getattr(torch, "_chunk_cat", None)


def share_memory(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two tensors lie in the same memory, of which those of a dry run have none that could be compared."""
    return one.untyped_storage()._cdata == other.untyped_storage()._cdata


def watch_clipping(report: Callable[[list[torch.Tensor]], None]) -> None:
    """Call `report` with the parameters of each call of `torch.nn.utils.clip_grad_norm_` in this process.

    The function calls a helper by its name in its own module, so that also names imported before are seen. It does what
    it did before. A second call of `watch_clipping` does nothing.
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


def fake_tensor() -> type | None:
    """Return the class of torch's fake tensors; None: there are none, because it has not been imported."""
    return getattr(sys.modules.get("torch._subclasses.fake_tensor"), "FakeTensor", None)


def has_values(tensor: torch.Tensor) -> bool:
    """Whether a tensor has values: not if its class dispatches operators, as that of torch's fake tensors does."""
    return type(tensor).__torch_dispatch__ is torch.Tensor.__torch_dispatch__


def allow_gradient_dtype(parameter: torch.Tensor, dtype: torch.dtype) -> None:
    """Let a parameter have a gradient of another dtype than its own."""
    if dtype is not parameter.dtype and hasattr(parameter, "grad_dtype"):
        parameter.grad_dtype = dtype


def fused_step(algorithm: str, device: torch.device, dtype: torch.dtype) -> Callable[..., None] | None:
    """Return torch's kernel for a whole step of an algorithm on lists of tensors, or None where there is none.

    Args:
        algorithm: "adam" or "adamw": the kernel takes (parameters, gradients, exp_avgs, exp_avg_sqs, max_exp_avg_sqs,
            steps) and the options by keyword.
        device: of the tensors.
        dtype: of the tensors.
    """
    kernel: Callable[..., None] | None = getattr(torch, f"_fused_{algorithm}_", None)
    return kernel if kernel is not None and _runs_fused(algorithm, device.type, dtype) else None


@functools.cache
def _runs_fused(algorithm: str, device_type: str, dtype: torch.dtype) -> bool:
    """Try a kernel on nothing: which devices it serves is not public, and changes between versions."""
    one = torch.ones((), dtype=torch.float32, device=device_type)
    tensors = [[torch.zeros(1, dtype=dtype, device=device_type)] for _ in range(4)]
    options: dict[str, Any] = {"lr": 0.0, "beta1": 0.0, "beta2": 0.0, "weight_decay": 0.0, "eps": 1.0}
    try:
        getattr(torch, f"_fused_{algorithm}_")(*tensors, [], [one], **options, amsgrad=False, maximize=False)
    except (NotImplementedError, RuntimeError, TypeError):
        return False
    return True


def forget_groups() -> None:
    """Let go of process groups that torch has taken as default values of arguments.

    `torch.distributed.nn.functional`, which the first optimizer imports, otherwise keeps the default group of that
    moment for ever, and the threads of a Gloo group that has been destroyed run on. None means the default group too.
    """
    for function in vars(sys.modules.get("torch.distributed.nn.functional", sys)).values():
        defaults = getattr(function, "__defaults__", None)
        if isinstance(function, FunctionType) and defaults:
            function.__defaults__ = tuple(None if isinstance(value, dist.ProcessGroup) else value for value in defaults)


def profiler_active() -> bool:
    """Whether a profiler of this process is recording; True if this version of torch does not tell."""
    return bool(getattr(torch.autograd.profiler, "_is_profiler_enabled", True))


def global_step_hooks() -> list[Callable[..., Any]]:
    """Return the hooks that run around the step of every optimizer; none where torch does not tell."""
    optimizer_module = sys.modules[torch.optim.Optimizer.__module__]
    found = (getattr(optimizer_module, f"_global_optimizer_{kind}_hooks", {}) for kind in ("pre", "post"))
    return [hook for hooks in found for hook in hooks.values()]


# What torch does not document about autograd and modules; tests/test_compat.py fails where a version has it otherwise.

LEAF_NUMBER = 2**64 - 1
"""`number_of` nodes that accumulate into a leaf."""

number_now: Callable[[], int] = torch.autograd._get_sequence_nr
"""Return the number that the next node of a graph gets on this thread."""

saved_hooks_in_force: Callable[[bool], Any] = torch._C._autograd._top_saved_tensors_default_hooks
"""Return the innermost pair of saved-tensor hooks, or None (True: also where tracing ignores them)."""

reason_against_saved_hooks: Callable[[], str | None] = (
    torch._C._autograd._saved_tensors_hooks_get_disabled_error_message
)
"""Return why there must be no saved-tensor hooks now; None: there may be."""


def number_of(node: Node) -> int:
    """Return the number of a node, which is higher the later it was made, or `LEAF_NUMBER`."""
    return node._sequence_nr()


def version_counter(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor that has the version counter of another one, and no values: it counts changes of that one."""
    with without_overrides():
        counter = tensor.detach()
        counter.data = torch.empty(0, device=tensor.device)
    return counter


def share_version_counter(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return True if in-place changes of either tensor are counted for both, as those of a tensor and its views are.

    Equal numbers do not tell: pieces of one storage (`torch.unsafe_split`) may have counters of their own.
    """
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
    """Raise as autograd does where a saved tensor has been changed since; with hooks it leaves the check to them.

    Args:
        counter: has the version counter of what was saved.
        version: what it was.
        tensor: named in the message.
    """
    if counter._version != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: a "
            f"{tensor.dtype} tensor of shape {tuple(tensor.shape)} is at version {counter._version}; expected "
            f"version {version} instead"
        )


number_of_pass: Callable[[], int] = torch._C._current_graph_task_id
"""Return the number of the backward pass that autograd is in on this thread, or -1; no pass has that of another."""


def backward_pass() -> int | None:
    """Return the number of the backward pass that autograd is in on this thread, or None."""
    number = number_of_pass()
    return None if number == -1 else number


def current_node() -> Node | None:
    """Return the node that a backward pass runs now on this thread, or None."""
    return torch._C._current_autograd_node()


def keep_with_graph(tensor: torch.Tensor, key: Any, value: Any) -> None:
    """Hold a value for as long as the graph of a tensor is alive, if it has one."""
    if tensor.grad_fn is not None:
        metadata: Any = tensor.grad_fn.metadata  # stubs take it for a method
        metadata[key] = value


def shape_in_graph(parameter: torch.Tensor) -> tuple[int, ...]:
    """Return the shape that gradients of a parameter must have: in a graph that is still alive, that of its making."""
    if not parameter.requires_grad:
        return tuple(parameter.shape)
    (expected,) = torch.autograd.graph.get_gradient_edge(parameter).node._input_metadata
    return tuple(expected.shape)


def result_shapes(node: Node) -> list[tuple[int, ...]]:
    """Return the shapes of what a node of a graph has computed in the forward pass."""
    results: Any = node._input_metadata
    return [tuple(result.shape) for result in results]


def will_run(node: Node) -> bool:
    """Whether the backward pass that autograd is in runs a node that accumulates into a parameter."""
    try:
        return torch._C._will_engine_execute_node(node)
    except RuntimeError:
        return False  # torch.autograd.grad hands the parameter's gradient out, and nothing is accumulated


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Have autograd call something when the backward pass that it is in ends; dropped if an exception ends it."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def local_of(frame: FrameType, name: str) -> Any:
    """Return a local variable of a running function; None if it has none of this name.

    Because Python before 3.13 leaves a copy of all locals on a frame whose `f_locals` is read, which would keep tensors
    alive until the function returns, the copy is emptied.
    """
    values = frame.f_locals
    found = values.get(name)
    if sys.version_info < (3, 13) and frame.f_code.co_flags & inspect.CO_OPTIMIZED:  # else they are the globals
        values.clear()
    return found


def calls_running(module: torch.nn.Module | None) -> int:
    """Return how many calls of a module are on this thread's stack."""
    calls = 0
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        calls += frame.f_code.co_name == "_call_impl" and local_of(frame, "self") is module
        frame = frame.f_back
    return calls


def belongs_to_transformers(hook: Any) -> bool:
    """Return True for a forward hook of transformers, by which a model collects what it returns (router logits).

    It collects into a context variable: in an empty context it does nothing.
    """
    return str(getattr(hook, "__module__", "")).startswith("transformers.")


def only_counts_steps(step: Any) -> bool:
    """Whether what stands in the place of an optimizer's `step` is a scheduler's, which counts the calls."""
    return bool(getattr(step, "_wrapped_by_lr_sched", False))


def grouped_product(weight: torch.Tensor) -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor] | None:
    """Return torch's product of runs of rows, each with a matrix of its own, if it can be used with these matrices.

    It takes rows, matrices [number, in, out] and the ends of the runs as int32. None on a CPU, where it is no faster
    than one product after the other; for GPUs before compute capability 8.0; for other dtypes than bf16; and for rows
    of matrices that are not multiples of 16 bytes.

    Args:
        weight: the matrices, [number, out, in].
    """
    product = getattr(torch.nn.functional, "grouped_mm", None)
    if product is None or weight.device.type != "cuda" or weight.dtype != torch.bfloat16:
        return None
    aligned = all(size * weight.element_size() % 16 == 0 for size in weight.shape[-2:])
    if not aligned or torch.cuda.get_device_capability(weight.device) < (8, 0):
        return None
    return lambda rows, matrices, ends: product(rows, matrices, offs=ends)


def writes_empty_groups(device: torch.device) -> bool:
    """Whether the backward pass of torch's grouped product writes gradients of matrices without rows.

    On GPUs of compute capability 10.0 and above it may leave them as the memory was (pytorch#172439).
    """
    return device.type != "cuda" or torch.cuda.get_device_capability(device) < (10, 0)
