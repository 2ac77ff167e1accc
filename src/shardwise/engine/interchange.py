"""Whole weights of an engine, for scripts and other programs, and theirs for an engine.

The files are the business of `shardwise.checkpoint`; whole checkpoints are that of `shardwise.engine.checkpointing`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from shardwise.checkpoint import directory, weights
from shardwise.checkpoint.agree import phase
from shardwise.checkpoint.exporting import KEEP, export_model, request_of
from shardwise.checkpoint.importing import LoadedWeights, Rename, load_weights
from shardwise.checkpoint.sharded_weights import parse_size
from shardwise.errors import UsageError
from shardwise.memory import Category

if TYPE_CHECKING:
    from shardwise.comm.communicator import Communicator
    from shardwise.engine.step import TrainStep
    from shardwise.zero.model import ShardedModel

CustomLoad = Callable[..., None]
"""Called as `custom_load_fn(src=state_dict, dst=module)`."""


class Interchange:
    """Export and import of weights. Every method is called by all ranks together.

    Args:
        sharded: the model.
        job: all ranks that act together.
        step: drops what it knows of gradients at other values.
    """

    def __init__(self, sharded: ShardedModel, job: Communicator, step: TrainStep) -> None:
        self._sharded = sharded
        self._job = job
        self._step = step

    def export(
        self,
        path: str | os.PathLike[str],
        format: str = "hf",
        dtype: str | torch.dtype = KEEP,
        max_shard_size: int | str | None = None,
        exclude_frozen_parameters: bool = False,
        all_names: bool = False,
        overwrite: bool = False,
    ) -> None:
        """See `Engine.export`."""
        self._sharded.check_there("engine.export()")
        with phase(self._job, "export"):
            request = request_of(path, format, dtype, max_shard_size, exclude_frozen_parameters, all_names, overwrite)
        self._sharded.hooks.settle()
        accountant = self._sharded.accountant
        export_model(self._sharded, request, lambda tensor: accountant.hold(Category.BUFFERS, tensor))

    def load_weights(
        self,
        path: str | os.PathLike[str],
        strict: bool = True,
        rename: Rename | None = None,
        tag: str | int | None = None,
    ) -> LoadedWeights:
        """See `Engine.load_weights`."""
        self._sharded.check_there("engine.load_weights()")
        self._sharded.hooks.settle()
        found = load_weights(self._sharded, path, tag=tag, strict=strict, rename=rename)
        self._step.drop_gradients()
        if self._sharded.compressor is not None:
            self._sharded.compressor.clear()  # it is of gradients at other values
        return found

    def save_16bit(
        self,
        save_dir: str | os.PathLike[str],
        save_filename: str,
        exclude_frozen_parameters: bool,
        max_shard_size: int | str | None,
    ) -> None:
        """See `Engine.save_16bit_model`."""
        self._sharded.check_there("engine.save_16bit_model()", values=True)
        parent = directory.check_directory(save_dir, "save_dir")
        weights.write_weights(
            self._sharded,
            parent,
            weights.check_file_name(save_filename),
            exclude_frozen=exclude_frozen_parameters,
            max_shard_size=None if max_shard_size is None else parse_size(max_shard_size),
        )

    def state_dict(self, exclude_frozen_parameters: bool, keep_vars: bool) -> dict[str, Any]:
        """See `Engine.module_state_dict`."""
        self._sharded.check_there("engine.module_state_dict()", values=True)
        if keep_vars:
            raise UsageError("module_state_dict(keep_vars=True): values are gathered copies; use keep_vars=False")
        return weights.state_dict(self._sharded, exclude_frozen=exclude_frozen_parameters)

    def consolidated(self, exclude_frozen_parameters: bool) -> dict[str, Any] | None:
        """Return the whole state dict on rank 0 and None elsewhere."""
        self._sharded.check_there("engine._consolidated_16bit_state_dict()", values=True)
        found = weights.state_dict(self._sharded, exclude_frozen=exclude_frozen_parameters, to_first=True)
        return found if self._job.rank == 0 else None

    def load_state_dict(
        self,
        checkpoint: Mapping[str, Any],
        strict: bool,
        custom_load_fn: CustomLoad | None,
        allowed_missing_keys: Iterable[str] | None,
    ) -> None:
        """See `Engine.load_module_state_dict`."""
        self._sharded.check_there("engine.load_module_state_dict()")
        self._sharded.hooks.settle()
        inner = checkpoint.get("module")
        values = inner if isinstance(inner, Mapping) else checkpoint
        if custom_load_fn is not None:
            load_custom(self._sharded, self._job, custom_load_fn, values)
        else:
            may_lack = frozenset(allowed_missing_keys or ())
            weights.load_state_dict(self._sharded, values, strict=strict, may_lack=may_lack)


def load_custom(sharded: ShardedModel, job: Communicator, function: CustomLoad, values: Mapping[str, Any]) -> None:
    """Let a function of the script's fill the module, whose parameters are whole meanwhile; rank 0's values count."""
    parameters = sharded.registry.parameters
    gathered = sharded.gather(parameters)
    try:
        with phase(job, "custom_load_fn"), torch.no_grad():
            function(src=values, dst=sharded.module)
    except BaseException:
        sharded.put_back(parameters, gathered, None)
        raise
    ranks = sharded.comm
    sharded.put_back(parameters, gathered, ranks.members[0])
