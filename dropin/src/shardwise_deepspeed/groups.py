"""Process groups and ranks of a script without its engine, by DeepSpeed's getters: the newest engine's data-parallel
group, and sequence-parallel and tensor-parallel groups (`shardwise.parallel`). Other kinds of parallelism have size 1.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from shardwise.comm.api import get_rank, get_world_size
from shardwise.errors import UsageError
from shardwise.parallel import current_tensors
from shardwise.parallel.sequence import SequenceGroup, current
from shardwise_deepspeed.helpers import (
    bwc_tensor_model_parallel_group,
    bwc_tensor_model_parallel_rank,
    bwc_tensor_model_parallel_world_size,
)

if TYPE_CHECKING:
    from shardwise.comm.communicator import Communicator
    from shardwise.engine import Engine

mpu: Any = None
"""The model-parallel unit that provides the groups; None: those of the newest engine, without one all ranks."""

_newest: weakref.ref[Engine] | None = None

mesh_device: Any = None
"""Device mesh; there is none."""


def initialize(ep_size: int = 1, mpu: Any = None) -> None:
    """Set the model-parallel unit, which has `get_data_parallel_group()` and so on; None keeps the present one. Raises
    UsageError if `ep_size` is not 1.
    """
    if ep_size != 1:
        raise UsageError(f"groups.initialize(ep_size={ep_size}): it is an argument of each MoE layer; leave it out")
    if mpu is not None:
        globals()["mpu"] = mpu


def note(engine: Engine) -> None:
    """Record the newest engine."""
    global _newest
    _newest = weakref.ref(engine)


def get_data_parallel_group() -> Any:
    """Return the data-parallel group (a collective at first use)."""
    data = _data()
    if data is None and mpu is not None:
        return mpu.get_data_parallel_group()
    group = None if data is None else data.process_group
    return dist.group.WORLD if group is None else group


def get_data_parallel_rank() -> int:
    """Return this process's rank in the data-parallel group."""
    data = _data()
    return get_rank(get_data_parallel_group()) if data is None else data.rank


def get_data_parallel_world_size() -> int:
    """Return the size of the data-parallel group."""
    data = _data()
    return get_world_size(get_data_parallel_group()) if data is None else data.world


def get_model_parallel_group() -> Any:
    """Return the tensor-parallel group, or None without tensor parallelism."""
    tensors = current_tensors()
    if mpu is None and tensors is not None:
        return tensors.comm.process_group
    return bwc_tensor_model_parallel_group(mpu)


def get_model_parallel_rank() -> int:
    """Return this process's rank in the tensor-parallel group."""
    tensors = current_tensors()
    return tensors.place if mpu is None and tensors is not None else bwc_tensor_model_parallel_rank(mpu)


def get_model_parallel_world_size() -> int:
    """Return the size of the tensor-parallel group."""
    tensors = current_tensors()
    return tensors.size if mpu is None and tensors is not None else bwc_tensor_model_parallel_world_size(mpu)


def _get_sequence_parallel_group() -> Any:
    return getattr(_shared(), "group", None)


def _get_sequence_parallel_rank() -> int:
    return getattr(_shared(), "rank", 0)


def _get_sequence_parallel_world_size() -> int:
    return getattr(_shared(), "size", 1)


def _get_sequence_data_parallel_group() -> Any:
    return get_data_parallel_group() if _shared() is None else dist.group.WORLD


def _get_sequence_data_parallel_rank() -> int:
    return get_data_parallel_rank() if _shared() is None else get_rank(dist.group.WORLD)


def _get_sequence_data_parallel_world_size() -> int:
    return get_data_parallel_world_size() if _shared() is None else get_world_size(dist.group.WORLD)


def _data() -> Communicator | None:
    shared = _shared()
    if shared is not None:
        return shared.data
    if mpu is not None:
        return None
    tensors, engine = current_tensors(), None if _newest is None else _newest()
    if tensors is not None:
        return tensors.data
    return None if engine is None or engine.sharded.closed else engine.data


def _shared() -> SequenceGroup | None:
    group = current()
    return group if group is not None and group.data is not None else None


get_tensor_parallel_group = get_model_parallel_group
get_tensor_parallel_rank = get_model_parallel_rank
get_tensor_parallel_world_size = get_model_parallel_world_size
_get_data_parallel_group = get_data_parallel_group
_get_data_parallel_rank = get_data_parallel_rank
_get_data_parallel_world_size = get_data_parallel_world_size
