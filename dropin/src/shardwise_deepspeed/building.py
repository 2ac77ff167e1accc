"""Building models on a device and in a dtype, and functions that scripts replace around `zero.Init`."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardwise import zero
from shardwise.engine import Engine
from shardwise.zero.units import released

_orig_torch_arange = torch.arange


def zero_wrapper_for_fp_tensor_constructor(
    fn: Callable[..., Any], target_fp_dtype: torch.dtype | None = None, **options: Any
) -> Callable[..., Any]:
    """Return `fn`, because `zero.Init` does not replace constructors (DeepSpeed sets dtype and device)."""
    return fn


class MiCS_Init(zero.Init):
    """`zero.Init`; the engine makes the groups of ranks (`zero_optimization.mics_shard_size`)."""

    def __init__(
        self,
        module: nn.Module | None = None,
        data_parallel_group: dist.ProcessGroup | None = None,
        sequence_data_parallel_group: dist.ProcessGroup | None = None,
        mem_efficient_linear: bool = True,
        remote_device: str | None = None,
        pin_memory: bool = False,
        config_dict_or_path: Any = None,
        config: Any = None,
        enabled: bool = True,
        dtype: torch.dtype | None = None,
        mpu: Any = None,
    ) -> None:
        same = (mem_efficient_linear, remote_device, pin_memory, config_dict_or_path, config, enabled, dtype, mpu)
        super().__init__(module, data_parallel_group, *same, sequence_data_parallel_group=sequence_data_parallel_group)


def is_zero_param(parameter: Any) -> bool:
    """Return True if an engine or `zero.Init` owns a parameter."""
    return isinstance(parameter, torch.Tensor) and released.owner_of(parameter) is not None


@contextlib.contextmanager
def unwrap_model_for_generation(model: Engine) -> Iterator[Any]:
    """Unshard all parameters of an engine (a collective) and yield its module (`engine.gathered()`)."""
    with model.gathered():
        yield model.module


class OnDevice:
    """Context that creates modules and tensors on a device ("meta" takes no memory) and, if floating, in a dtype.

    >>> with OnDevice(dtype=torch.float16):
    ...     layer = torch.nn.Linear(2, 2)
    >>> layer.weight.device, layer.weight.dtype
    (device(type='meta'), torch.float16)
    """

    def __init__(self, dtype: torch.dtype, device: str | torch.device = "meta", enabled: bool = True) -> None:
        self.dtype = dtype
        self.device = device
        self.enabled = enabled
        self._entered = contextlib.ExitStack()

    def __enter__(self) -> OnDevice:
        if self.enabled:
            self._entered.callback(torch.set_default_dtype, torch.get_default_dtype())
            self._entered.enter_context(torch.device(self.device))
            torch.set_default_dtype(self.dtype)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._entered.close()
