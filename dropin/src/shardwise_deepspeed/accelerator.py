"""get_accelerator(): this process's device (CUDA if present, else CPU) with DeepSpeed's interface, for scripts only."""

from __future__ import annotations

import contextlib
import functools
import os
import time
from collections.abc import Callable
from typing import Any

import torch

from shardwise.errors import UsageError
from shardwise.memory import peak_resident_bytes, resident_bytes
from shardwise.utils.nvtx import range_pop, range_push
from shardwise_deepspeed.operators import create_op_builder, op_builder

VARIABLE = "DS_ACCELERATOR"
KINDS = ("cuda", "cpu")


class _HostEvent:
    """An event of a synchronous device: the time at which it was recorded."""

    def __init__(self, enable_timing: bool = False, **_: Any) -> None:
        self._time = 0.0

    def record(self, stream: Any = None) -> None:
        self._time = time.perf_counter()

    def synchronize(self) -> None:
        """Do nothing: no work is pending."""

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: _HostEvent) -> float:
        return (end._time - self._time) * 1e3


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _no_context(*_: Any, **__: Any) -> Any:
    return contextlib.nullcontext()


def _memory_stats() -> dict[str, int]:
    return {
        "allocated_bytes.all.current": resident_bytes() or 0,
        "allocated_bytes.all.peak": peak_resident_bytes() or 0,
    }


_ON_CPU: dict[str, Any] = {
    "Stream": None,
    "Event": _HostEvent,
    "current_device": lambda: "cpu",
    "initial_seed": torch.initial_seed,
    "set_device": _nothing,
    **dict.fromkeys(("device", "stream"), _no_context),
    **dict.fromkeys(("is_available", "is_bf16_supported"), lambda: True),
    **dict.fromkeys(("manual_seed", "manual_seed_all"), torch.manual_seed),
}
"""Name in torch.cuda -> its equivalent on the CPU."""

_OF_DEVICE: dict[str, Callable[[], Any]] = {
    "memory_stats": _memory_stats,
    **dict.fromkeys(("memory_allocated", "memory_reserved"), lambda: resident_bytes() or 0),
    **dict.fromkeys(("max_memory_allocated", "max_memory_reserved"), lambda: peak_resident_bytes() or 0),
    **dict.fromkeys(("current_stream", "default_stream"), _nothing),
    **dict.fromkeys(("empty_cache", "reset_peak_memory_stats", "synchronize"), _nothing),
}
"""Function of torch.cuda that takes the number of a device -> its equivalent on the CPU."""

_ALIASES = {
    "memory_cached": "memory_reserved",
    "max_memory_cached": "max_memory_reserved",
    **dict.fromkeys(("reset_max_memory_allocated", "reset_max_memory_cached"), "reset_peak_memory_stats"),
}

_TENSORS = [f"{kind}Tensor" for kind in ("BFloat16", "Byte", "Double", "Float", "Half", "Int", "Long")]


class Accelerator:
    """A kind of device, "cuda" or "cpu". Further methods are those of torch.cuda, or their equivalents on the CPU."""

    create_op_builder = staticmethod(create_op_builder)
    get_op_builder = staticmethod(op_builder)

    def __init__(self, kind: str) -> None:
        self._name = kind
        self._cuda = kind == "cuda"
        self._torch: Any = torch.cuda if self._cuda else torch
        self._communication_backend_name = "nccl" if self._cuda else "gloo"
        self._compile_backend = "inductor"

    def __getattr__(self, name: str) -> Any:
        name = _ALIASES.get(name, name)
        if name in _TENSORS:
            return functools.partial(torch.tensor, dtype=getattr(torch, name).dtype, device=self._name)
        if name in _OF_DEVICE:
            return functools.partial(self._on_device, name)
        if name in _ON_CPU:
            return getattr(torch.cuda, name) if self._cuda else _ON_CPU[name]
        raise AttributeError(f"get_accelerator() has no attribute {name!r}")

    @staticmethod
    def range_push(msg: str, domain: Any = None, category: Any = None) -> int:
        """Begin a range; torch's ranges have neither domains nor categories."""
        return range_push(msg)

    @staticmethod
    def range_pop(domain: Any = None) -> int:
        """End the newest range."""
        return range_pop()

    def _on_device(self, name: str, device_index: int | None = None) -> Any:
        if not self._cuda:
            return _OF_DEVICE[name]()
        return torch.cuda.empty_cache() if name == "empty_cache" else getattr(torch.cuda, name)(device_index)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *_ALIASES, *_TENSORS, *_OF_DEVICE, *_ON_CPU})

    # -- devices ------------------------------------------------------------------------------------------------------

    def device_name(self, device_index: int | str | None = None) -> str:
        return f"cuda:{device_index}" if self._cuda and device_index is not None else self._name

    def current_device_name(self) -> str:
        return self.device_name(torch.cuda.current_device() if self._cuda else None)

    def device_count(self) -> int:
        """Return the number of devices: of CPUs LOCAL_SIZE or LOCAL_WORLD_SIZE, the processes of this machine."""
        if self._cuda:
            return torch.cuda.device_count()
        return int(os.environ.get("LOCAL_SIZE") or os.environ.get("LOCAL_WORLD_SIZE") or 1)

    def is_synchronized_device(self) -> bool:
        """Return True if a call returns when its work is done."""
        return not self._cuda

    use_host_timers = resolves_data_dependency = handles_memory_backpressure = is_synchronized_device

    def visible_devices_envs(self) -> list[str]:
        return ["CUDA_VISIBLE_DEVICES"]

    def set_visible_devices_envs(self, current_env: dict[str, str], local_accelerator_ids: list[int]) -> None:
        for name in self.visible_devices_envs():
            current_env[name] = ",".join(map(str, local_accelerator_ids))

    def export_envs(self) -> list[str]:
        return ["NCCL", "LD_LIBRARY", "PATH"] if self._cuda else []

    def on_accelerator(self, tensor: torch.Tensor) -> bool:
        return tensor.device.type == self._name

    def communication_backend_name(self) -> str:
        return self._communication_backend_name

    def communication_backend_version(self) -> Any:
        return torch.cuda.nccl.version() if self._cuda else None

    # -- random numbers -----------------------------------------------------------------------------------------------

    def random(self) -> Any:
        return torch.random

    def set_rng_state(self, new_state: torch.Tensor, device_index: int | None = None) -> None:
        self._torch.set_rng_state(new_state, *self._device_of(device_index))

    def get_rng_state(self, device_index: int | None = None) -> torch.Tensor:
        return self._torch.get_rng_state(*self._device_of(device_index))

    def _device_of(self, index: int | None) -> list[int | str]:
        return ["cuda" if index is None else index] if self._cuda else []

    def default_generator(self, device_index: int) -> torch.Generator:
        return torch.cuda.default_generators[device_index] if self._cuda else torch.default_generator

    # -- memory -------------------------------------------------------------------------------------------------------

    def total_memory(self, device_index: int | None = None) -> int:
        if not self._cuda:
            return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        index = torch.cuda.current_device() if device_index is None else device_index
        return int(torch.cuda.get_device_properties(index).total_memory)

    def available_memory(self, device_index: int | None = None) -> int:
        """Return the bytes that are free or cached."""
        if self._cuda:
            return self.total_memory(device_index) - torch.cuda.memory_allocated(device_index)
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")

    def pin_memory(self, tensor: torch.Tensor, align_bytes: int = 1) -> torch.Tensor:
        return tensor.pin_memory() if self._cuda else tensor

    def unpin_memory(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone() if self.is_pinned(tensor) else tensor

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return self._cuda and tensor.is_pinned()

    # -- features -----------------------------------------------------------------------------------------------------

    def is_fp16_supported(self) -> bool:
        return True

    def supported_dtypes(self) -> list[torch.dtype]:
        return [torch.float32, torch.float16, *([torch.bfloat16] if self.is_bf16_supported() else [])]

    def is_triton_supported(self) -> bool:
        """Return True if Triton's kernels run on the device; shardwise has none."""
        return self._cuda and torch.cuda.get_device_capability() >= (7, 0)

    def lazy_call(self, callback: Callable[[], Any]) -> Any:
        if self._cuda:
            torch.cuda.init()
        return callback()

    def create_graph(self) -> Any:
        return torch.cuda.CUDAGraph() if self._cuda else None

    def capture_to_graph(self, graph: Any, pool: Any = None, stream: Any = None) -> Any:
        return torch.cuda.graph(graph, pool=pool, stream=stream) if self._cuda else contextlib.nullcontext()

    def replay_graph(self, graph: Any) -> None:
        if not self._cuda:
            raise UsageError("get_accelerator().replay_graph(): the CPU has no graphs")
        graph.replay()

    def get_compile_backend(self) -> str:
        return self._compile_backend

    def set_compile_backend(self, backend: str) -> None:
        self._compile_backend = backend


_chosen: Any = None


def get_accelerator() -> Any:
    """Return the accelerator of `set_accelerator`, of DS_ACCELERATOR, or of the present device. Raises UsageError if
    DS_ACCELERATOR is neither cuda nor cpu, or is cuda without a GPU.
    """
    global _chosen
    if _chosen is None:
        requested = os.environ.get(VARIABLE)
        if requested is not None and requested not in KINDS:
            raise UsageError(f"{VARIABLE}={requested}: this version runs on {' and '.join(KINDS)}; unset it")
        if requested == "cuda" and not torch.cuda.is_available():
            raise UsageError(f"{VARIABLE}=cuda, but torch finds no CUDA device; unset it")
        _chosen = Accelerator(requested or ("cuda" if torch.cuda.is_available() else "cpu"))
    return _chosen


def set_accelerator(accel_obj: Any) -> None:
    """Set the object that `get_accelerator` returns; the library does not read it."""
    global _chosen
    _chosen = accel_obj


def is_current_accelerator_supported() -> bool:
    """Return True if the accelerator is one of this version's."""
    return isinstance(get_accelerator(), Accelerator)
