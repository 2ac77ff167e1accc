"""Plain fp32 weights of a checkpoint, with DeepSpeed's names for scripts.

    python -m shardwise_deepspeed.zero_to_fp32 runs/a weights

New code uses `shardwise export` or `shardwise.checkpoint.export`, with more formats and dtypes. Only the returned
tensors are in memory, and reading never runs code from a file.
"""

from __future__ import annotations

import io
import os
import sys
from typing import Any, NoReturn

import torch
from torch import nn

from shardwise.checkpoint.exporting import export
from shardwise.checkpoint.formats.deepspeed.index import find_files, recognised
from shardwise.checkpoint.manifest import Manifest, StoredTensor, outline
from shardwise.checkpoint.opening import open_source
from shardwise.checkpoint.reader import Checkpoint
from shardwise.checkpoint.weights_reader import WeightsReader
from shardwise.errors import CheckpointError
from shardwise.utils.logging import logger
from shardwise_deepspeed.options import Parser, run


class LazyTensor:
    """A tensor on disk; `contiguous` returns its values in `dtype`."""

    def __init__(self, path: str, tensor: StoredTensor) -> None:
        self._path = path
        self._tensor = tensor
        self.shape = torch.Size(tensor.shape)
        self.dtype = _target(tensor.torch_dtype)

    def numel(self) -> int:
        """Return the number of elements."""
        return self._tensor.numel

    def contiguous(self) -> torch.Tensor:
        """Read and return the tensor, without caching it."""
        with open_source(self._path) as source:
            return _read(source, self._tensor)

    def __repr__(self) -> str:
        return f"LazyTensor({self._tensor.name!r}, shape={tuple(self.shape)}, dtype={self.dtype})"


def _target(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype.is_floating_point else dtype


def _read(source: WeightsReader, tensor: StoredTensor) -> torch.Tensor:
    values = torch.empty(tensor.shape, dtype=_target(tensor.torch_dtype), device="cpu")
    source.read_into(tensor, 0, values.view(-1))
    return values


def get_fp32_state_dict_from_zero_checkpoint(
    checkpoint_dir: str | os.PathLike[str],
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
    lazy_mode: bool = False,
) -> dict[str, Any]:
    """Return the weights of a checkpoint as a state dict on the CPU that a plain module loads.

    Floating-point tensors are in fp32; all names of a tied parameter have the same tensor.

    Args:
        checkpoint_dir: directory of checkpoints, as in `save_checkpoint`, or one checkpoint.
        tag: name of the checkpoint; None: the one that `latest` names, or the newest complete one.
        exclude_frozen_parameters: leave out parameters that were not trained.
        lazy_mode: values are `LazyTensor`; each is read when its `contiguous()` is called.

    Raises:
        CheckpointError: there is no such checkpoint, or it is damaged.
    """
    found: dict[str, Any] = {}
    with open_source(checkpoint_dir, tag) as source:
        everything = source.tensors().values()
        tensors = [t for t in everything if not exclude_frozen_parameters or t.trainable is not False]
        source.check(tensors)
        for tensor in tensors:
            value = LazyTensor(source.path, tensor) if lazy_mode else _read(source, tensor)
            found.update(dict.fromkeys((tensor.name, *tensor.aliases), value))
    return found


def convert_zero_checkpoint_to_fp32_state_dict(
    checkpoint_dir: str | os.PathLike[str],
    output_dir: str | os.PathLike[str],
    max_shard_size: int | str | None = "5GB",
    safe_serialization: bool = False,
    tag: str | None = None,
    exclude_frozen_parameters: bool = False,
) -> None:
    """Write the weights of a checkpoint in fp32: `pytorch_model.bin`, or several such files with an index.

    Args:
        checkpoint_dir: directory of checkpoints, or one checkpoint.
        output_dir: directory; created if needed. Existing weights are replaced.
        max_shard_size: of one file; None: one file.
        safe_serialization: write safetensors files (`model.safetensors`) instead, as Hugging Face prefers them.
        tag: name of the checkpoint; None: the one that `latest` names, or the newest complete one.
        exclude_frozen_parameters: leave out parameters that were not trained.

    Raises:
        CheckpointError: there is no such checkpoint, it is damaged, or writing failed.
    """
    done = export(
        checkpoint_dir,
        output_dir,
        format="hf" if safe_serialization else "pt",
        dtype="float32",
        max_shard_size=sys.maxsize if max_shard_size is None else max_shard_size,
        exclude_frozen=exclude_frozen_parameters,
        tag=tag,
        overwrite=True,
    )
    for line in done.warnings:
        logger.warning("%s", line)


def load_state_dict_from_zero_checkpoint(
    model: nn.Module, checkpoint_dir: str | os.PathLike[str], tag: str | None = None
) -> nn.Module:
    """Load the weights of a checkpoint into a plain module, one tensor at a time, and return the module on the CPU.

    Names that only the checkpoint or only the module has are logged.

    Raises:
        CheckpointError: there is no such checkpoint, it is damaged, or a shape differs.
    """
    model = model.cpu()
    targets = {name: value for name, value in model.state_dict().items() if isinstance(value, torch.Tensor)}
    with open_source(checkpoint_dir, tag) as source:
        tensors, found = list(source.tensors().values()), source.by_any_name()
        source.check(tensors)
        both = [name for name in targets if name in found]
        for name in both:
            shape, own = found[name].shape, targets[name].shape
            if shape != tuple(own):
                raise CheckpointError(f"{source.path}: {name!r} has shape {list(shape)}, in the model {list(own)}")
        for name in both:
            targets[name].copy_(source.read(found[name]))
    missing = [name for name in targets if name not in found]
    unexpected = [tensor.name for tensor in tensors if targets.keys().isdisjoint((tensor.name, *tensor.aliases))]
    for what, names in (("not in the checkpoint", missing), ("not in the model", unexpected)):
        if names:
            logger.warning("%s: %s: %s", checkpoint_dir, what, outline(names))
    return model


class StateFile(io.BytesIO):
    """File in memory with the content of a DeepSpeed checkpoint file, made from a checkpoint of shardwise.

    `torch.load` accepts it in place of a path. Checkpoints of shardwise have no such files, and none is written.
    """

    def __init__(self, content: dict[str, Any]) -> None:
        super().__init__()
        torch.save(content, self)
        self.seek(0)


def get_optim_files(checkpoint_dir: str | os.PathLike[str]) -> list[Any]:
    """Return the files of optimizer states of one checkpoint `<save_dir>/<tag>`, for `torch.load`.

    For a checkpoint of DeepSpeed these are the paths of its files, by rank. For one of shardwise a single `StateFile`
    has only the stage, `["optimizer_state_dict"]["zero_stage"]`; `shardwise.checkpoint.Checkpoint` reads states.

    Raises:
        CheckpointError: the directory is no checkpoint, or an incomplete one.
        FileNotFoundError: a checkpoint of DeepSpeed without optimizer states (stage 0).
    """
    path = os.fspath(checkpoint_dir)
    if recognised(path):
        parts = find_files(path)
        found = {(rank, part): name for part, files in parts.items() for rank, name in files.optimizer.items()}
        if not found:
            raise FileNotFoundError(f"{path}: a DeepSpeed checkpoint without files of optimizer states")
        return [os.path.join(path, found[place]) for place in sorted(found)]
    with Checkpoint(path) as saved:
        return [StateFile({"optimizer_state_dict": {"zero_stage": _stage(path, saved.manifest)}})]


def get_model_state_file(checkpoint_dir: str | os.PathLike[str], zero_stage: int) -> Any:
    """Return the file of the first rank's model states of one checkpoint `<save_dir>/<tag>`, for `torch.load`.

    For a checkpoint of DeepSpeed this is a path. For one of shardwise a `StateFile` has the client state,
    `global_steps`, `skipped_steps`, `dp_world_size` and `mp_world_size`; `get_fp32_state_dict_from_zero_checkpoint`
    returns weights. `zero_stage` is the stage at saving, from `get_optim_files`; not needed for DeepSpeed's.

    Raises:
        CheckpointError: the directory is no checkpoint, is incomplete or damaged, or was saved with another stage.
        FileNotFoundError: a checkpoint of DeepSpeed that lacks the file.
    """
    path = os.fspath(checkpoint_dir)
    if recognised(path):
        first = find_files(path).get(0)
        name = None if first is None else first.model.get(0, first.shared)
        if name is None:
            raise FileNotFoundError(f"{path}: a DeepSpeed checkpoint without the first rank's file of model states")
        return os.path.join(path, name)
    with Checkpoint(path) as saved:
        found = saved.manifest
        if _stage(path, found) != zero_stage:
            raise CheckpointError(f"{path}: was saved with ZeRO stage {_stage(path, found)}, not {zero_stage}")
        saved.verify(saved.blocks((), [found.client]))
        facts: dict[str, Any] = {"dp_world_size": len(found.ranks), "mp_world_size": 1}
        facts |= {name: found.counters[name] for name in ("global_steps", "skipped_steps") if name in found.counters}
        return StateFile({**facts, **saved.decode(found.client)})


def _stage(path: str, found: Manifest) -> int:
    stage = found.layout.get("stage")
    if not isinstance(stage, int):
        raise CheckpointError(
            f"{path}: does not say with which ZeRO stage it was saved (layout.stage in its manifest is {stage!r}). "
            "`shardwise export` writes its weights without a stage"
        )
    return stage


def _convert(arguments: list[str]) -> None:
    given = vars(Parser("zero_to_fp32").given(arguments))
    if given.pop("debug"):
        with open_source(given["checkpoint_dir"], given["tag"]) as source:
            for tensor in source.tensors().values():
                print(tensor.name, list(tensor.shape), tensor.torch_dtype, *tensor.aliases)
    convert_zero_checkpoint_to_fp32_state_dict(**given)


def main(arguments: list[str] | None = None) -> NoReturn:
    """Run the command and exit with its code; `arguments` default to those of this process."""
    run("zero_to_fp32", _convert, arguments)


if __name__ == "__main__":
    main()
