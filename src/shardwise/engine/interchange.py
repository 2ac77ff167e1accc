"""Weights of an engine for other programs, and theirs for an engine.

The files are the business of `shardwise.checkpoint`; whole checkpoints are that of `shardwise.engine.checkpointing`.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import torch

from shardwise.checkpoint.agree import phase
from shardwise.checkpoint.exporting import KEEP, export_model, request_of
from shardwise.checkpoint.importing import LoadedWeights, Rename, load_weights
from shardwise.comm.communicator import Communicator
from shardwise.memory import Accountant, Category

if TYPE_CHECKING:
    from shardwise.zero.model import ShardedModel


class Interchange:
    """Mixin of `Engine`: export and import of weights. Every method is called by all ranks together, and raises a
    `UsageError` once the engine has been destroyed.
    """

    sharded: ShardedModel
    device: torch.device
    accountant: Accountant
    _comm: Communicator

    if TYPE_CHECKING:  # defined by another mixin

        def drop_gradients(self) -> None:
            """Forget the gradients that the engine has accumulated."""

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
        appear when all of them are complete.

        Args:
            directory: of the files, on rank 0; created if needed.
            format: `hf` (safetensors, as Hugging Face's `from_pretrained` loads them) or `pt` (a state dict of tensors,
                as `torch.save` writes it).
            dtype: of floating-point tensors: `float32`, `bfloat16`, `float16`, or `keep` for that of the values.
            max_shard_size: of one file, as "5GB" or a number of bytes; None: 5GB for `hf`, one file for `pt`.
            exclude_frozen_parameters: leave out parameters that do not require a gradient.
            all_names: `hf`: write a tied tensor under each of its names instead of once.
            overwrite: replace weights that are in `directory`.

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
        self.sharded.check_open("engine.export()")
        with phase(self._comm, "export"):
            request = request_of(
                directory, format, dtype, max_shard_size, exclude_frozen_parameters, all_names, overwrite
            )
        self.sharded.hooks.settle()
        export_model(self.sharded, request, lambda tensor: self.accountant.hold(Category.BUFFERS, tensor))

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
        self.sharded.check_open("engine.load_weights()")
        self.sharded.hooks.settle()
        found = load_weights(self.sharded, path, tag=tag, strict=strict, rename=rename)
        self.drop_gradients()
        if self.sharded.compressor is not None:
            self.sharded.compressor.clear()  # it is of gradients at other values
        return found
