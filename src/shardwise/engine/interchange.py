"""Whole weights of an engine, for scripts and other programs, and theirs for an engine.

The files are the business of `shardwise.checkpoint`; whole checkpoints are that of `shardwise.engine.checkpointing`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from shardwise.checkpoint import weights
from shardwise.checkpoint.agree import phase
from shardwise.checkpoint.directory import check_directory
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
        directory: str | os.PathLike[str],
        format: str = "hf",
        dtype: str | torch.dtype = KEEP,
        max_shard_size: int | str | None = None,
        exclude_frozen_parameters: bool = False,
        all_names: bool = False,
        overwrite: bool = False,
    ) -> None:
        """Write whole weights for other programs, as `shardwise export` makes them from a checkpoint.

        What is written are the values that the optimizer steps: master weights, where there are any. Rank 0 writes;
        the others send it what they hold, in pieces of 8 MiB, so that no rank needs memory for the model. The files
        appear when all of them are complete. Beside the whole weights (`hf`) of a model of transformers its
        `config.json` and `generation_config.json` are written, so that `from_pretrained(directory)` makes it again.

        Args:
            directory: of the files, on rank 0; created if needed.
            format: `hf` (safetensors, as Hugging Face's `from_pretrained` loads them) or `pt` (a state dict of tensors,
                as `torch.save` writes it).
            dtype: of floating-point tensors: `float32`, `bfloat16`, `float16`, or `keep` for that of the values.
            max_shard_size: of one file, as "5GB" or a number of bytes; None: 5GB for `hf`, one file for `pt`.
            exclude_frozen_parameters: leave out parameters that do not require a gradient, and the configuration.
            all_names: `hf`: write a tied tensor under each of its names instead of once.
            overwrite: replace weights that are in `directory`. A configuration is replaced in any case.

        Raises:
            CheckpointPathError: the directory cannot be used, or holds weights already.
            CheckpointError: an argument is wrong, or writing failed; raised on all ranks.

        Example:
            >>> import os, shardwise, tempfile
            >>> engine, *_ = shardwise.initialize(model=torch.nn.Linear(4, 1), config={"train_batch_size": 2})
            >>> directory = tempfile.mkdtemp()
            >>> engine.export(directory, dtype="bfloat16")
            >>> os.listdir(directory)
            ['model.safetensors']
            >>> engine.destroy()
        """
        self._sharded.check_there("engine.export()")
        with phase(self._job, "export"):
            request = request_of(
                directory, format, dtype, max_shard_size, exclude_frozen_parameters, all_names, overwrite
            )
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
        """Read weights of another program into the shards: each rank reads what it holds, and nobody has all of them.

        Master weights take the values with all their digits. Optimizer state, schedule and counters stay; gradients of
        an unfinished accumulation window are dropped, as they are of other weights.

        Args:
            path: weights as Hugging Face keeps them (a directory, or a file .safetensors, .index.json, .bin, .pt), a
                directory of torch.distributed.checkpoint, or a checkpoint; the same on every rank.
            strict: every parameter and buffer must be in the files, and everything in the files have a place.
            rename: name in the files -> name in the model, as a mapping (names that it does not have stay) or a
                function; None for a name leaves the tensor out.
            tag: of a checkpoint in a directory of checkpoints.

        Returns:
            (missing, unexpected): names that only the model, and only the files have; both empty if `strict`.

        Raises:
            CheckpointPathError: there are no weights at `path`.
            CheckpointError: names (if `strict`) or shapes do not fit, or a file is damaged; nothing has been changed
                then.

        Example: a model of Hugging Face's, never whole on any rank.
            >>> config = AutoConfig.from_pretrained(folder)  # doctest: +SKIP
            >>> with shardwise.zero.Init():  # doctest: +SKIP
            ...     model = AutoModelForCausalLM.from_config(config)
            >>> engine, *_ = shardwise.initialize(model=model, config="config.json")  # doctest: +SKIP
            >>> engine.load_weights(folder)  # doctest: +SKIP
        """
        self._sharded.check_there("engine.load_weights()")
        self._sharded.hooks.settle()
        found = load_weights(self._sharded, path, tag=tag, strict=strict, rename=rename)
        self._step.drop_gradients()
        if self._sharded.compressor is not None:
            self._sharded.compressor.clear()  # it is of gradients at other values
        return found

    def save_16bit_model(
        self,
        save_dir: str | os.PathLike[str],
        save_filename: str = "model.safetensors",
        exclude_frozen_parameters: bool = False,
        max_shard_size: int | str | None = None,
    ) -> bool:
        """Write whole weights to one file that plain PyTorch can load.

        Values have the dtype that the module computes with (so they are 16-bit where training is). Rank 0 writes
        while units are gathered one by one; no rank ever holds more than one whole unit. All names of tied parameters
        are in it. `export` writes master weights, and tied parameters as Hugging Face does.

        Args:
            save_dir: directory; created if needed.
            save_filename: ends in `.safetensors`, or in `.bin`, `.pt` or `.pth` for a state dict of tensors as
                `torch.save` writes it (`torch.load(weights_only=True)` reads it).
            exclude_frozen_parameters: leave out parameters that do not require a gradient.
            max_shard_size: write several files of at most this many bytes, or "5GB", with an index. None: one file.

        Returns:
            True.

        Raises:
            CheckpointPathError: the directory or the name cannot be used.
            CheckpointError: `max_shard_size` is not a size, or writing failed; raised on all ranks.

        Example:
            >>> engine.save_16bit_model("out")  # doctest: +SKIP
            True
            >>> model.load_state_dict(safetensors.torch.load_file("out/model.safetensors"))  # doctest: +SKIP
        """
        self._sharded.check_there("engine.save_16bit_model()", values=True)
        parent = check_directory(save_dir, "save_dir")
        weights.write_weights(
            self._sharded,
            parent,
            weights.check_file_name(save_filename),
            exclude_frozen=exclude_frozen_parameters,
            max_shard_size=None if max_shard_size is None else parse_size(max_shard_size),
        )
        return True

    def module_state_dict(
        self,
        destination: dict[str, Any] | None = None,
        prefix: str = "",
        keep_vars: bool = False,
        exclude_frozen_parameters: bool = False,
    ) -> dict[str, Any]:
        """Return the module's whole state dict, on the CPU, with real values on every rank.

        Args:
            destination: dictionary to add to; a new one if None.
            prefix: put before every name.
            keep_vars: only False: values are copies.
            exclude_frozen_parameters: leave out parameters that do not require a gradient.

        Raises:
            UsageError: `keep_vars` is set.
        """
        self._sharded.check_there("engine.module_state_dict()", values=True)
        if keep_vars:
            raise UsageError("module_state_dict(keep_vars=True): values are gathered copies; use keep_vars=False")
        found = weights.state_dict(self._sharded, exclude_frozen=exclude_frozen_parameters)
        destination = {} if destination is None else destination
        destination.update((prefix + name, value) for name, value in found.items())
        return destination

    def _consolidated_16bit_state_dict(self, exclude_frozen_parameters: bool = False) -> dict[str, Any] | None:
        """Return the whole state dict on rank 0 and None elsewhere (called by trainers)."""
        self._sharded.check_there("engine._consolidated_16bit_state_dict()", values=True)
        found = weights.state_dict(self._sharded, exclude_frozen=exclude_frozen_parameters, to_first=True)
        return found if self._job.rank == 0 else None

    def load_module_state_dict(
        self,
        checkpoint: Mapping[str, Any],
        strict: bool = True,
        custom_load_fn: CustomLoad | None = None,
        fetch_z3_params: bool = False,
        allowed_missing_keys: Iterable[str] | None = None,
    ) -> None:
        """Take over a whole state dict of the module; the same values on every rank. Optimizer state stays.

        Args:
            checkpoint: state dict, or a dictionary that has it under the key "module".
            strict: names must be the same in module and state dict.
            custom_load_fn: called as `custom_load_fn(src=state_dict, dst=module)` with all parameters whole instead.
            fetch_z3_params: accepted for existing scripts; parameters are always reached.
            allowed_missing_keys: names that the state dict may lack although `strict` is set; they keep their values.

        Raises:
            CheckpointError: names or shapes do not fit; nothing is changed then.
        """
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
