"""Files of DeepSpeed's universal checkpoint format: a directory `zero/<parameter>/` for each parameter.

`fp32.pt` has its master values, `<entry>.pt` an entry of its optimizer state: a tensor, or a dictionary with the tensor
`param`, unsharded or flattened. `step.pt` is its step count, which files from stage 3 do not have.
`zero/optimizer_state.pt` has the settings of parameter groups. Model states are as in other checkpoints of DeepSpeed.

A rank opens the files of its own parameters only. Their names, shapes and dtypes follow from the model states and from
the files of one parameter, and are checked when a file is opened.
"""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from shardwise.checkpoint.deepspeed.directory import UNIVERSAL
from shardwise.checkpoint.deepspeed.files import TorchFile
from shardwise.checkpoint.deepspeed.zero_partitions import as_scalar, same
from shardwise.checkpoint.manifest import PARAMETER, Slice, StoredTensor, name_of, outline
from shardwise.errors import CheckpointError

MASTER, STEP, STATE = "fp32", "step", f"{UNIVERSAL}/optimizer_state.pt"
_MOST_OPENED = 64
"""Files of parameters that stay mapped at a time."""


class UniversalFiles:
    """Files of the parameters of one checkpoint in directory `path`."""

    def __init__(self, path: str) -> None:
        self.path = path
        try:
            self.names = set(os.listdir(os.path.join(path, UNIVERSAL)))
        except OSError as error:
            raise CheckpointError(f"{os.path.join(path, UNIVERSAL)}: cannot be listed: {error.strerror}") from error
        self._expected: dict[str, StoredTensor] = {}
        self._steps: dict[str, Any] = {}
        self._opened: OrderedDict[str, torch.Tensor] = OrderedDict()
        self._opening = threading.Lock()

    @staticmethod
    def file(name: str, entry: str) -> str:
        """Return the path of a file inside of the checkpoint."""
        return f"{UNIVERSAL}/{name}/{entry}.pt"

    def require(self, names: Mapping[str, Any]) -> None:
        """Raise CheckpointError if parameters have no directory."""
        missing = [name for name in names if name not in self.names]
        if missing:
            raise CheckpointError(
                f"{os.path.join(self.path, UNIVERSAL)}: the directories of parameters are missing: {outline(missing)}. "
                "The checkpoint is incomplete: converting it was interrupted, or files were not copied"
            )

    def entries(self, name: str) -> list[str]:
        """Return the entries of optimizer state of a parameter."""
        try:
            found = os.listdir(os.path.join(self.path, UNIVERSAL, name))
        except OSError as error:
            raise CheckpointError(
                f"{os.path.join(self.path, UNIVERSAL, name)}: cannot be listed: {error.strerror}"
            ) from error
        return sorted({file.removesuffix(".pt") for file in found if file.endswith(".pt")} - {MASTER, STEP})

    def stored(self, name: str, entry: str) -> torch.Tensor:
        """Return the tensor of a file, in the form of the file."""
        return _tensor(TorchFile(os.path.join(self.path, self.file(name, entry))))

    def step(self, name: str) -> Any:
        """Return the step count of a parameter."""
        content = TorchFile(os.path.join(self.path, self.file(name, STEP))).content
        if isinstance(content, torch.Tensor) and content.numel() == 1:
            return as_scalar(content.reshape(()))
        if isinstance(content, (int, float)):
            return as_scalar(content)
        raise CheckpointError(f"{os.path.join(self.path, self.file(name, STEP))}: expected a number of steps")

    def expect_step(self, name: str, step: Any) -> None:
        """Record the step count of a parameter, which `verify` compares."""
        self._steps[self.file(name, STEP)] = step

    def add(self, tensor: StoredTensor, name: str) -> StoredTensor:
        """Return a tensor with its place in the files of a parameter, or of a buffer."""
        entry = tensor.kind.rpartition("/")[2] if "/" in tensor.kind else MASTER
        place = Slice(self.file(name, entry), "param", 0, tensor.numel)
        found = replace(tensor, slices=(place,) if tensor.numel else ())
        self._expected[place.file] = found
        return found

    def has(self, file: str) -> bool:
        """Return True for the file of a parameter."""
        return file in self._expected or file in self._steps

    def blocks(self, tensors: Any) -> list[str]:
        """Return the files of some tensors, or of all (None), with those of step counts."""
        if tensors is None:
            return sorted({*self._expected, *self._steps})
        held = {part.file for tensor in tensors for part in tensor.slices if part.file in self._expected}
        steps = {f"{os.path.dirname(t.slices[0].file)}/{STEP}.pt" for t in tensors if "/" in t.kind and t.slices}
        return sorted(held | (steps & self._steps.keys()))

    def values(self, file: str) -> torch.Tensor:
        """Return the flattened values of a file, mapped."""
        with self._opening:
            if file in self._opened:
                self._opened.move_to_end(file)
                return self._opened[file]
            found = self._opened[file] = self._checked(file, TorchFile(os.path.join(self.path, file)))
            if len(self._opened) > _MOST_OPENED:
                self._opened.popitem(last=False)
            return found

    def verify(self, file: str) -> None:
        """Check a file: its checksums, shape and dtype, or step count. Raises CheckpointError."""
        opened = TorchFile(os.path.join(self.path, file))
        opened.verify(list(range(opened.records)))
        if file in self._expected:
            self._checked(file, opened)
            return
        name = os.path.basename(os.path.dirname(file))
        found, expected = self.step(name), self._steps[file]
        if not same(found, expected):
            raise CheckpointError(
                f"{opened.path}: the step count of {name!r} is {_number(found)}, and {_number(expected)} of the first "
                "parameter of its group: step counts that differ inside of a group cannot be loaded"
            )

    def close(self) -> None:
        """Release all files."""
        self._opened.clear()

    def _checked(self, file: str, opened: TorchFile) -> torch.Tensor:
        expected, values = self._expected[file], _tensor(opened)
        flat = values.dim() == 1 and values.numel() == expected.numel
        if (tuple(values.shape) != expected.shape and not flat) or values.dtype != expected.torch_dtype:
            raise CheckpointError(
                f"{opened.path}: {expected.kind} {expected.name!r}: expected {expected.dtype} of shape "
                f"{list(expected.shape)}, found {name_of(values.dtype)} of shape {list(values.shape)}: files of two "
                "checkpoints, or a layout that is not known"
            )
        return values.reshape(-1)


def _tensor(opened: TorchFile) -> torch.Tensor:
    content = opened.content
    found = content.get("param") if isinstance(content, Mapping) else content
    if not isinstance(found, torch.Tensor):
        raise CheckpointError(
            f"{opened.path}: expected a tensor, or a dictionary with the tensor 'param', found "
            f"{outline(sorted(map(str, content))) if isinstance(content, Mapping) else type(content).__name__}"
        )
    return found


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) else value


def steps_of_groups(files: UniversalFiles, shapes: list[dict[str, Any]], state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the step count of each parameter: of the first of its group, or that of the (sub-)group at stage 3."""
    inner = state.get("optimizer_state_dict")
    counts = inner.get("state", {}) if isinstance(inner, Mapping) else {}
    found: dict[str, Any] = {}
    for number, group in enumerate(shapes):
        first = next(iter(group), None)
        if first is None:
            continue
        try:
            value = files.step(first)
        except CheckpointError:
            if os.path.exists(os.path.join(files.path, files.file(first, STEP))) or number not in counts:
                raise
            value = as_scalar(counts[number]["step"])
        else:
            for name in group:
                files.expect_step(name, value)
        found.update(dict.fromkeys(group, value))
    return found


def trained(tensor: StoredTensor | None, name: str, shape: tuple[int, ...], group: int) -> StoredTensor:
    """Return the description of a trained parameter, from that of the module if there is one."""
    made = tensor or StoredTensor(name, PARAMETER, shape, "float32", (), compute_dtype="float32")
    return replace(made, shape=shape, dtype="float32", trainable=True, group=group)
