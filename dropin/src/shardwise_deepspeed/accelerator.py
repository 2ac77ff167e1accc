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
from shardwise_deepspeed.operators import OpBuilder, create_op_builder, op_builder

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


class Accelerator:
    """A kind of device, "cuda" or "cpu". Methods are those of torch.cuda, or their equivalents on the CPU."""

    def __init__(self, kind: str) -> None:
        self._name = kind
        self._communication_backend_name = "nccl" if kind == "cuda" else "gloo"
        self._compile_backend = "inductor"

    @property
    def _cuda(self) -> bool:
        return self._name == "cuda"

    # -- devices ------------------------------------------------------------------------------------------------------

    def device_name(self, device_index: int | str | None = None) -> str:
        return f"cuda:{device_index}" if self._cuda and device_index is not None else self._name

    def current_device(self) -> int | str:
        return torch.cuda.current_device() if self._cuda else "cpu"

    def current_device_name(self) -> str:
        return self.device_name(torch.cuda.current_device() if self._cuda else None)

    def device(self, device_index: int | None = None) -> Any:
        return torch.cuda.device(device_index) if self._cuda else contextlib.nullcontext()

    def set_device(self, device_index: int) -> None:
        if self._cuda:
            torch.cuda.set_device(device_index)

    def device_count(self) -> int:
        """Return the number of devices: of CPUs LOCAL_SIZE or LOCAL_WORLD_SIZE, the processes of this machine."""
        if self._cuda:
            return torch.cuda.device_count()
        return int(os.environ.get("LOCAL_SIZE") or os.environ.get("LOCAL_WORLD_SIZE") or 1)

    def is_available(self) -> bool:
        return torch.cuda.is_available() if self._cuda else True

    def synchronize(self, device_index: int | None = None) -> None:
        if self._cuda:
            torch.cuda.synchronize(device_index)

    def is_synchronized_device(self) -> bool:
        """Return True if a call returns when its work is done."""
        return not self._cuda

    def use_host_timers(self) -> bool:
        """Return True if the host's clock measures work on the device."""
        return not self._cuda

    def resolves_data_dependency(self) -> bool:
        """Return True if the device itself orders streams."""
        return not self._cuda

    def handles_memory_backpressure(self) -> bool:
        """Return True if the device itself waits for memory."""
        return not self._cuda

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
        if self._cuda:
            torch.cuda.set_rng_state(new_state, "cuda" if device_index is None else device_index)
        else:
            torch.set_rng_state(new_state)

    def get_rng_state(self, device_index: int | None = None) -> torch.Tensor:
        if self._cuda:
            return torch.cuda.get_rng_state("cuda" if device_index is None else device_index)
        return torch.get_rng_state()

    def manual_seed(self, seed: int) -> Any:
        return torch.cuda.manual_seed(seed) if self._cuda else torch.manual_seed(seed)

    def manual_seed_all(self, seed: int) -> Any:
        return torch.cuda.manual_seed_all(seed) if self._cuda else torch.manual_seed(seed)

    def initial_seed(self) -> int:
        return torch.cuda.initial_seed() if self._cuda else torch.initial_seed()

    def default_generator(self, device_index: int) -> torch.Generator:
        return torch.cuda.default_generators[device_index] if self._cuda else torch.default_generator

    # -- streams and memory -------------------------------------------------------------------------------------------

    @property
    def Stream(self) -> Any:
        return torch.cuda.Stream if self._cuda else None

    @property
    def Event(self) -> Any:
        return torch.cuda.Event if self._cuda else _HostEvent

    def stream(self, stream: Any) -> Any:
        return torch.cuda.stream(stream) if self._cuda else contextlib.nullcontext()

    def current_stream(self, device_index: int | None = None) -> Any:
        return torch.cuda.current_stream(device_index) if self._cuda else None

    def default_stream(self, device_index: int | None = None) -> Any:
        return torch.cuda.default_stream(device_index) if self._cuda else None

    def empty_cache(self) -> None:
        if self._cuda:
            torch.cuda.empty_cache()

    def memory_allocated(self, device_index: int | None = None) -> int:
        """Return the allocated bytes; of a CPU, the resident memory of the process."""
        return torch.cuda.memory_allocated(device_index) if self._cuda else resident_bytes() or 0

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        return torch.cuda.max_memory_allocated(device_index) if self._cuda else peak_resident_bytes() or 0

    def memory_reserved(self, device_index: int | None = None) -> int:
        """Return the bytes that torch's allocator holds; of a CPU, the resident memory."""
        return torch.cuda.memory_reserved(device_index) if self._cuda else resident_bytes() or 0

    def max_memory_reserved(self, device_index: int | None = None) -> int:
        return torch.cuda.max_memory_reserved(device_index) if self._cuda else peak_resident_bytes() or 0

    memory_cached = memory_reserved
    max_memory_cached = max_memory_reserved

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        if self._cuda:
            torch.cuda.reset_peak_memory_stats(device_index)

    reset_max_memory_allocated = reset_peak_memory_stats
    reset_max_memory_cached = reset_peak_memory_stats

    def memory_stats(self, device_index: int | None = None) -> dict[str, Any]:
        """Return torch's figures by name; two of them on the CPU."""
        if self._cuda:
            return dict(torch.cuda.memory_stats(device_index))
        return {
            "allocated_bytes.all.current": self.memory_allocated(),
            "allocated_bytes.all.peak": self.max_memory_allocated(),
        }

    def total_memory(self, device_index: int | None = None) -> int:
        if self._cuda:
            return int(torch.cuda.get_device_properties(self._index(device_index)).total_memory)
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def available_memory(self, device_index: int | None = None) -> int:
        """Return the bytes that are free or cached."""
        if self._cuda:
            return self.total_memory(device_index) - self.memory_allocated(device_index)
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")

    def _index(self, device_index: int | None) -> int:
        return torch.cuda.current_device() if device_index is None else device_index

    def pin_memory(self, tensor: torch.Tensor, align_bytes: int = 1) -> torch.Tensor:
        return tensor.pin_memory() if self._cuda else tensor

    def unpin_memory(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.clone() if self.is_pinned(tensor) else tensor

    def is_pinned(self, tensor: torch.Tensor) -> bool:
        return tensor.is_pinned() if self._cuda else False

    # -- features ----------------------------------------------------------------------------------------------------

    def is_bf16_supported(self) -> bool:
        return torch.cuda.is_bf16_supported() if self._cuda else True

    def is_fp16_supported(self) -> bool:
        return True

    def supported_dtypes(self) -> list[torch.dtype]:
        return [torch.float32, torch.float16, *([torch.bfloat16] if self.is_bf16_supported() else [])]

    def is_triton_supported(self) -> bool:
        """Return True if Triton's kernels run on the device; shardwise has none."""
        return self._cuda and torch.cuda.get_device_capability() >= (7, 0)

    def range_push(self, msg: str) -> int:
        return range_push(msg)

    def range_pop(self) -> int:
        return range_pop()

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

    def create_op_builder(self, class_name: str) -> OpBuilder:
        return create_op_builder(class_name)

    def get_op_builder(self, class_name: str) -> type[OpBuilder] | None:
        return op_builder(class_name)

    def get_compile_backend(self) -> str:
        return self._compile_backend

    def set_compile_backend(self, backend: str) -> None:
        self._compile_backend = backend

    def _tensors_of(self, dtype: torch.dtype) -> Callable[..., torch.Tensor]:
        return functools.partial(torch.tensor, dtype=dtype, device=self._name)

    @property
    def BFloat16Tensor(self) -> Callable[..., torch.Tensor]:
        return self._tensors_of(torch.bfloat16)

    @property
    def ByteTensor(self) -> Callable[..., torch.Tensor]:
        return self._tensors_of(torch.uint8)

    @property
    def DoubleTensor(self) -> Callable[..., torch.Tensor]:
        return self._tensors_of(torch.float64)

    @property
    def FloatTensor(self) -> Callable[..., torch.Tensor]:
        return self._tensors_of(torch.float32)

    @property
    def HalfTensor(self) -> Callable[..., torch.Tensor]:
        return self._tensors_of(torch.float16)

    @property
    def IntTensor(self) -> Callable[..., torch.Tensor]:
        return self._tensors_of(torch.int32)

    @property
    def LongTensor(self) -> Callable[..., torch.Tensor]:
        return self._tensors_of(torch.int64)


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
