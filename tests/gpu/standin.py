"""A CUDA device that is not there: what these tests do on one is tried on the CPU.

Memory of the device is memory of the CPU with a label. Tensors that lie in it say "cuda:0" of themselves; what is
computed from them lies there too; an operation on tensors of the host and of the device fails as on a device. Nothing
runs late on its streams: tests/device checks the order of uses of memory. NCCL is Gloo.

What the stand-in has no answer for (bytes that the allocator has reserved, names of kernels, times) tests leave out
with `rehearsing()`; what cannot be tried at all (Triton, `torch.compile`) they skip with `needs_device`.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
import time
import types
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import handle_torch_function, has_torch_function_unary
from torch.utils._device import DeviceContext, _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode

from shardwise import compat
from shardwise.device import streams
from shardwise.zero.units import released  # noqa: F401 - it looks at methods of tensors, and must see torch's own
from tests.device.recording import waits

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")

_TOTAL = 80 << 30
_original: dict[str, Any] = {}
_state = types.SimpleNamespace(installed=False, sync="default", peak=0)
_local = threading.local()
_live: dict[int, weakref.ref[Any]] = {}
_registered: dict[int, int] = {}
calls: list[tuple[str, int]] = []
"""Calls that have pinned memory, unpinned it or waited for an event, with their current device."""


def rehearsing() -> bool:
    """Whether the device is the one that is not there."""
    return bool(_state.installed)


needs_device = pytest.mark.needs_device
"""Of tests that cannot be tried without a device; they are skipped then (`conftest.py`)."""


# -- where tensors lie -------------------------------------------------------------------------------------------------


def _storage(tensor: torch.Tensor) -> Any:
    """The memory of a tensor, with the labels that it has been given; None: it has none of its own."""
    with torch._C.DisableTorchFunctionSubclass():
        if tensor.layout is not torch.strided:
            return _storage(torch._C.TensorBase._values(tensor)) if tensor.layout is torch.sparse_coo else None
        try:
            return tensor.untyped_storage()
        except (NotImplementedError, RuntimeError):
            return None


def place_of(tensor: torch.Tensor) -> torch.device | None:
    """Where a tensor lies; None: nobody has said so, and it goes with whatever it meets."""
    return getattr(_storage(tensor), "standin_place", None)


def _put(tensor: torch.Tensor, place: torch.device | None, *, anew: bool = False) -> torch.Tensor:
    storage = _storage(tensor)
    if storage is None or place is None or (not anew and hasattr(storage, "standin_place")):
        return tensor
    storage.standin_place = place
    return tensor


def _pin(tensor: torch.Tensor) -> torch.Tensor:
    _storage(tensor).standin_pinned = True
    return _put(tensor, CPU, anew=True)


def _is_pinned(tensor: torch.Tensor) -> bool:
    storage = _storage(tensor)
    if storage is None or not compat.has_values(tensor) or place_of(tensor) == CUDA:
        return False
    address = storage.data_ptr()
    return hasattr(storage, "standin_pinned") or any(a <= address < a + n for a, n in _registered.items())


def _real(device: Any) -> torch.device | None:
    """The device that an argument names."""
    if device is None or isinstance(device, torch.device):
        return device
    return torch.device("cuda", device) if isinstance(device, int) else torch.device(device)


def _waits(what: str) -> None:
    """The host waits for the device, as far as torch can tell (`torch.cuda.set_sync_debug_mode`)."""
    if _state.sync == "error":
        raise RuntimeError(f"called a synchronizing CUDA operation: {what}")
    if _state.sync == "warn":
        warnings.warn(f"called a synchronizing CUDA operation: {what}", stacklevel=2)


_MIXING = {"copy_", "_foreach_copy_", "_to_copy", "index", "index_put_", "_index_put_impl_", "index_put", "set_"}
"""Operations that take tensors of several devices; so do those with tensors of the CPU without dimensions."""


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for part in value:
            yield from _tensors(part)


class _Places(TorchDispatchMode):
    """Labels what operations make, and refuses those that no device would do."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            if not all(compat.has_values(tensor) for tensor in _tensors([*args, *kwargs.values()])):
                return func(*args, **kwargs)
            return self._run(func, args, kwargs)

    def _run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = func._schema.name.removeprefix("aten::")
        given = list(_tensors([*args, *kwargs.values()]))
        places = {tensor: place_of(tensor) for tensor in given}
        # A number that torch has wrapped has no place.
        on_host = [t for t, place in places.items() if place == CPU and (t.dim() or name == "cat")]
        place = CUDA if CUDA in places.values() else CPU if CPU in places.values() else None
        if place == CUDA and on_host and name not in _MIXING:
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu! "
                f"({name} of {[(tuple(t.shape), str(p)) for t, p in places.items()]})"
            )
        if name in ("index", "index_put_", "copy_", "_foreach_copy_") and given:
            place = places[given[0]] or place
        if place == CUDA and waits(func, args, kwargs):
            _waits(name)
        if name == "copy_" and {places[t] for t in given[:2]} == {CUDA, CPU} and not _later(args, kwargs):
            _waits("copy_ between the device and the host")
        result = func(*args, **kwargs)
        for tensor in _tensors(result):
            _put(tensor, place)
            if place == CUDA:
                _count(tensor)
        return result


def _later(args: Sequence[Any], kwargs: dict[str, Any]) -> bool:
    return bool(kwargs.get("non_blocking", args[2] if len(args) > 2 else False))


def _count(tensor: torch.Tensor) -> None:
    storage = _storage(tensor)
    if storage is not None and id(storage) not in _live:
        key = id(storage)
        _live[key] = weakref.ref(storage, lambda _: _live.pop(key, None))
        _state.peak = max(_state.peak, memory_allocated())


def memory_allocated(device: Any = None) -> int:
    """Bytes of the device that tensors hold."""
    found = [reference() for reference in list(_live.values())]
    return sum(s.nbytes() for s in found if s is not None and s.standin_place == CUDA)


# -- torch's functions -------------------------------------------------------------------------------------------------


def _maker(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that makes tensors, where it is told to."""

    @functools.wraps(function)
    def make(*args: Any, **kwargs: Any) -> Any:
        device = _real(kwargs.get("device"))
        if device is not None and device.type not in ("cuda", "cpu"):
            return function(*args, **kwargs)
        pinned = kwargs.pop("pin_memory", False)
        if device is not None:
            kwargs["device"] = CPU
        if torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.FAKE) is not None:
            return function(*args, **kwargs)
        like = next((arg for arg in args[:1] if isinstance(arg, torch.Tensor)), None)
        if like is not None and function.__name__ in ("tensor", "as_tensor"):
            return torch.Tensor.to(like.detach().clone() if function.__name__ == "tensor" else like, device)
        if pinned and device is not None and device.type == "cuda":
            raise RuntimeError("Only dense CPU tensors can be pinned")
        data = function.__name__ in ("tensor", "as_tensor")
        if data and device is not None and device.type == "cuda":
            _waits("a tensor of values of the host")
        if pinned:
            return _pin(function(*args, **kwargs))
        place = device if device is not None else CPU if like is None else None
        made = function(*args, **kwargs)
        if place is not None and place.type == "cuda":
            _put(made, CUDA, anew=True)
            _count(made)
        else:
            _put(made, place, anew=device is not None)
        return made

    return make


def _of_host(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A function that makes tensors of memory of the host."""
    return functools.wraps(function)(lambda *args, **kwargs: _put(function(*args, **kwargs), CPU, anew=True))


def _method(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A method of tensors that classes of tensors may answer themselves, as torch's own."""

    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        def method(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            if has_torch_function_unary(self):
                return handle_torch_function(method, (self,), self, *args, **kwargs)
            return function(self, *args, **kwargs)

        method.__name__ = name
        return method

    return wrap


_base = torch._C.TensorBase


def _device(self: torch.Tensor) -> torch.device:
    found: torch.device = _base.device.__get__(self)  # type: ignore[attr-defined]
    if found.type == "cpu" and place_of(self) == CUDA:
        return CUDA
    return found


def _to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    rest = list(args)
    device = _real(kwargs.pop("device", None))
    if rest and isinstance(rest[0], torch.Tensor):
        like = rest.pop(0)
        device, kwargs["dtype"] = like.device, like.dtype
    elif rest and (rest[0] is None or isinstance(rest[0], (str, int, torch.device))):
        device = _real(rest.pop(0)) or device
    if rest and isinstance(rest[0], torch.dtype):
        kwargs["dtype"] = rest.pop(0)
    for key in ("non_blocking", "copy"):
        if rest:
            kwargs[key] = rest.pop(0)
    if device is None or device.type not in ("cpu", "cuda") or not compat.has_values(self) or self.is_meta:
        device = CPU if device is not None and device.type == "cuda" and not self.is_meta else device
        return _base.to(self, **({} if device is None else {"device": device}), **kwargs)
    here = _device(self)
    if here.type == device.type:
        return _put(_base.to(self, **kwargs), device if device.type == "cuda" else None)
    if not kwargs.get("non_blocking"):
        _waits(f"to {device}")
    dtype = kwargs.get("dtype") or self.dtype
    made = _base.to(self, dtype=dtype, copy=True, memory_format=kwargs.get("memory_format", torch.preserve_format))
    _put(made, CUDA if device.type == "cuda" else CPU, anew=True)
    if device.type == "cuda":
        _count(made)
    return made


def _made_on_own(name: str) -> Callable[..., Any]:
    function = getattr(_base, name)

    def make(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        device, pinned = _real(kwargs.pop("device", None)) or _device(self), kwargs.pop("pin_memory", False)
        if not compat.has_values(self):
            return function(self, *args, **kwargs)
        made = function(self, *args, **kwargs, device=CPU if device.type == "cuda" else device)
        _put(made, CUDA if device.type == "cuda" else device, anew=True)
        return _pin(made) if pinned else made

    return make


def _tolist(self: torch.Tensor) -> Any:
    if place_of(self) == CUDA:
        _waits("tolist")
    return _base.tolist(self)


def _numpy(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    if place_of(self) == CUDA:
        raise TypeError("can't convert cuda:0 device type tensor to numpy. Use Tensor.cpu() to copy it first.")
    return _base.numpy(self, *args, **kwargs)


def _pin_memory(self: torch.Tensor, device: Any = None) -> torch.Tensor:
    if place_of(self) == CUDA:
        raise RuntimeError("cannot pin 'torch.cuda.FloatTensor' only dense CPU tensors can be pinned")
    return self if _is_pinned(self) else _pin(self.detach().clone())


_METHODS: dict[str, Callable[..., Any]] = {
    "to": _to,
    "cuda": lambda self, device=None, non_blocking=False, memory_format=torch.preserve_format: _to(
        self, CUDA, non_blocking=non_blocking, memory_format=memory_format
    ),
    "cpu": lambda self, memory_format=torch.preserve_format: _to(self, CPU, memory_format=memory_format),
    "get_device": lambda self: 0 if _device(self).type == "cuda" else -1,
    "pin_memory": _pin_memory,
    "is_pinned": lambda self, device=None: _is_pinned(self),
    "record_stream": lambda self, stream: None,
    "tolist": _tolist,
    "numpy": _numpy,
    **{name: _made_on_own(name) for name in ("new_empty", "new_zeros", "new_ones", "new_full", "new_tensor")},
}
_GETTERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "device": _device,
    "is_cuda": lambda self: _device(self).type == "cuda",
    "is_cpu": lambda self: _device(self).type == "cpu",
}


# -- torch.cuda --------------------------------------------------------------------------------------------------------


class Stream:
    """See `torch.cuda.Stream`."""

    _numbers: ClassVar[Iterator[int]] = itertools.count()

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        found = _real(device)
        self.device, self.priority = CUDA if found is None or found.index is None else found, priority
        self.cuda_stream = self.stream_id = next(self._numbers)

    def wait_event(self, event: Event) -> None: ...

    def wait_stream(self, other: Stream) -> None: ...

    def record_event(self, event: Event | None = None) -> Event:
        event = Event() if event is None else event
        event.record(self)
        return event

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


class Event:
    """See `torch.cuda.Event`."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        self._time, self.device = 0.0, CUDA

    def record(self, stream: Stream | None = None) -> None:
        self._time = time.perf_counter()

    def wait(self, stream: Stream | None = None) -> None: ...

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        calls.append(("wait", current_device()))

    def elapsed_time(self, end: Event) -> float:
        return max(1e-6, 1e3 * (end._time - self._time))


_DEFAULT = Stream()


def current_stream(device: Any = None) -> Stream:
    """See `torch.cuda.current_stream`: a thread's own."""
    return getattr(_local, "stream", _DEFAULT)


@contextlib.contextmanager
def on_stream(stream: Stream | None) -> Iterator[None]:
    """See `torch.cuda.stream`."""
    before = current_stream()
    if stream is not None:
        set_stream(stream)
    try:
        yield
    finally:
        set_stream(before)


def set_stream(stream: Stream) -> None:
    """See `torch.cuda.set_stream`."""
    _local.stream = stream


class _Device(contextlib.AbstractContextManager[None]):
    """See `torch.cuda.device`."""

    def __init__(self, device: Any) -> None:
        found = _real(device)
        self._index = current_device() if found is None or found.index is None else found.index

    def __enter__(self) -> None:
        self._before, _local.device = current_device(), self._index

    def __exit__(self, *_: object) -> None:
        _local.device = self._before


def current_device() -> int:
    """See `torch.cuda.current_device`: a thread's own."""
    return getattr(_local, "device", 0)


def _set_sync_debug_mode(mode: Any) -> None:
    _state.sync = {0: "default", 1: "warn", 2: "error"}.get(mode, mode)


def _register(address: int, size: int, flags: int) -> int:
    _registered[address] = size
    calls.append(("pin", current_device()))
    return 0


def _unregister(address: int) -> int:
    _registered.pop(address)
    calls.append(("unpin", current_device()))
    return 0


def _peak(device: Any = None) -> int:
    return max(_state.peak, memory_allocated())


def _reset_peak(device: Any = None) -> None:
    _state.peak = 0


def _nothing(*_: Any, **__: Any) -> None:
    pass


def _properties(device: Any = None) -> Any:
    return types.SimpleNamespace(
        name="stand-in",
        total_memory=_TOTAL,
        major=8,
        minor=0,
        multi_processor_count=108,
        uuid="00",
        L2_cache_size=1 << 25,
    )


_CUDA: dict[str, Any] = {
    "is_available": lambda: True,
    "is_initialized": lambda: True,
    "_is_in_bad_fork": lambda: False,
    "is_current_stream_capturing": lambda: False,
    "device_count": lambda: 1,
    "current_device": current_device,
    "get_device_name": lambda device=None: "stand-in",
    "get_device_capability": lambda device=None: (8, 0),
    "get_device_properties": _properties,
    "is_bf16_supported": lambda including_emulation=True: True,
    "mem_get_info": lambda device=None: (_TOTAL - memory_allocated(), _TOTAL),
    "memory_allocated": memory_allocated,
    "memory_reserved": memory_allocated,
    "max_memory_allocated": _peak,
    "max_memory_reserved": _peak,
    "reset_peak_memory_stats": _reset_peak,
    "memory_stats": lambda device=None: {"allocated_bytes.all.current": memory_allocated()},
    "get_per_process_memory_fraction": lambda device=None: 1.0,
    "Stream": Stream,
    "Event": Event,
    "current_stream": current_stream,
    "default_stream": lambda device=None: _DEFAULT,
    "stream": on_stream,
    "set_stream": set_stream,
    "device": _Device,
    "set_sync_debug_mode": _set_sync_debug_mode,
    "get_sync_debug_mode": lambda: ["default", "warn", "error"].index(_state.sync),
    "cudart": lambda: types.SimpleNamespace(cudaHostRegister=_register, cudaHostUnregister=_unregister),
    "get_rng_state": lambda device=None: torch.get_rng_state(),
    "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
    "initial_seed": torch.initial_seed,
    "default_generators": (torch.default_generator,),
    **dict.fromkeys(("manual_seed", "manual_seed_all"), torch.default_generator.manual_seed),
    **dict.fromkeys(
        ("init", "_lazy_init", "set_device", "synchronize", "_sleep", "empty_cache", "ipc_collect"), _nothing
    ),
}


# -- torch.distributed -------------------------------------------------------------------------------------------------


def _grouped(function: Callable[..., Any], place: int) -> Callable[..., Any]:
    """A function that makes a process group for the backend that it is given."""

    @functools.wraps(function)
    def make(*args: Any, **kwargs: Any) -> Any:
        given = list(args)
        if len(given) > place:
            given[place] = _backends(given[place])
        else:
            kwargs["backend"] = _backends(kwargs.get("backend"))
        kwargs.pop("device_id", None)
        return function(*given, **kwargs)

    return make


def _backends(asked: str | None) -> str | None:
    return "cpu:gloo,cuda:gloo" if asked is None or "nccl" in asked else asked


def _config(group: dist.ProcessGroup | None = None) -> str:
    found = str(_original["get_backend_config"](group))
    return found.replace("cuda:gloo", "cuda:nccl")


def _backend(group: dist.ProcessGroup | None = None) -> str:
    return "nccl" if "cuda" in str(_original["get_backend_config"](group)) else str(_original["get_backend"](group))


# -- switching it on ---------------------------------------------------------------------------------------------------


class _Generators(type(torch._C.Generator)):  # type: ignore[misc]
    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, torch._C.Generator)


class _Generator(torch._C.Generator, metaclass=_Generators):
    def __new__(cls, device: Any = None) -> Any:
        return torch._C.Generator("cpu")


def _in_thread(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def run(self: threading.Thread) -> None:
        with _Places():
            function(self)

    return run


def _by_default(self: Any, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
    """What `torch.set_default_device` does."""
    kwargs = kwargs or {}
    if func in _device_constructors() and kwargs.get("device") is None:
        return _maker(func)(*args, **{**kwargs, "device": self.device})
    return func(*args, **kwargs)


def install() -> None:
    """Let this process have the device, until it ends."""
    if _state.installed:
        return
    _state.installed = True
    import torch._dynamo  # it makes a table of torch's own functions, and must not find these

    for function in (*_device_constructors(), *(getattr(torch, f"{name}_like") for name in _LIKE)):
        module = torch.fft if function.__name__.startswith("fft") else torch
        if getattr(module, function.__name__, None) is function:
            setattr(module, function.__name__, _maker(function))
    torch.frombuffer = _of_host(torch.frombuffer)
    for name, method in _METHODS.items():
        setattr(torch.Tensor, name, _method(name)(method))
    for name, getter in _GETTERS.items():
        setattr(torch.Tensor, name, property(_method(name)(getter)))
    torch.cuda.nccl.version = lambda: (2, 0, 0)
    block = streams.CudaStreams.block

    def blocked(self: Any, mark: Any, limit: Any) -> bool:
        # torch's mode sees no polling; a wait that may go on for ever is an event's, which it does not see either.
        if limit != timedelta.max:
            _waits("polling of an event")
        return block(self, mark, timedelta.max)  # nothing runs late, and nobody else ends a loop of queries

    streams.CudaStreams.block = blocked  # type: ignore[method-assign]
    for name, value in _CUDA.items():
        setattr(torch.cuda, name, value)
    make = FakeTensor.__new__

    def made(cls: Any, mode: Any, element: torch.Tensor, device: torch.device, **kwargs: Any) -> Any:
        # Fake tensors of a device need a build of torch that knows it.
        return make(cls, mode, element, CPU if device.type == "cuda" else device, **kwargs)

    FakeTensor.__new__ = made  # type: ignore[method-assign]
    torch.Generator = _Generator  # type: ignore[misc]
    DeviceContext.__torch_function__ = _by_default  # type: ignore[method-assign]
    autocast, begin = torch.autocast, torch.autocast.__init__

    def started(self: Any, device_type: str, *args: Any, **kwargs: Any) -> None:
        begin(self, "cpu" if device_type == "cuda" else device_type, *args, **kwargs)

    autocast.__init__ = started  # type: ignore[method-assign]
    for name in ("get_backend_config", "get_backend"):
        _original[name] = getattr(dist, name)
    for module in (dist, dist.distributed_c10d):
        module.get_backend_config, module.get_backend = _config, _backend  # type: ignore[attr-defined]
        module.is_nccl_available = lambda: True  # type: ignore[attr-defined]
    dist.is_backend_available = lambda name: True
    dist.init_process_group = _grouped(dist.init_process_group, 0)
    dist.new_group = _grouped(dist.new_group, 2)
    make_group = compat.make_group

    def grouped(ranks: Any, name: str, timeout: Any, backend: str, options: Any, device: Any) -> Any:
        return make_group(ranks, name, timeout, str(_backends(backend)), None, None)

    compat.make_group = grouped
    streams.CudaStreams.make = lambda self, name, **_: streams._CudaStream(  # type: ignore[method-assign]
        Stream(self._device)  # type: ignore[arg-type]
    )
    threading.Thread._bootstrap_inner = _in_thread(threading.Thread._bootstrap_inner)  # type: ignore[attr-defined]
    _Places().__enter__()


_LIKE = ("empty", "zeros", "ones", "full", "rand", "randn", "randint")
