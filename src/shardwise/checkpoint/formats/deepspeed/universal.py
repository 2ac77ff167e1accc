"""Files of DeepSpeed's universal checkpoint format: a directory `zero/<parameter>/` for each parameter.

`fp32.pt` has its master values, `<entry>.pt` an entry of its optimizer state: a tensor, or a dictionary with the tensor
`param`, unsharded or flattened. `step.pt` is its step count, which files from stage 3 do not have.
`zero/optimizer_state.pt` has the settings of parameter groups. Model states are as in other checkpoints of DeepSpeed.

A rank opens the files of its own parameters only. Their names, shapes and dtypes follow from the model states and from
the files of one parameter, and are checked when a file is opened.
"""

from __future__ import annotations

import functools
import os
import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from shardwise.checkpoint.formats.deepspeed.index import UNIVERSAL
from shardwise.checkpoint.formats.deepspeed.neutral import Content, as_scalar, same
from shardwise.checkpoint.formats.deepspeed.zero_partitions import settings_of
from shardwise.checkpoint.formats.torch_file import TorchFile
from shardwise.checkpoint.manifest import BUFFER, OPTIMIZER, PARAMETER, Slice, StoredTensor, name_of, outline
from shardwise.errors import CheckpointError

MASTER, STEP, STATE = "fp32", "step", f"{UNIVERSAL}/optimizer_state.pt"
_MOST_OPENED = 64
"""Files of parameters that stay mapped at a time."""


def file_of(name: str, entry: str) -> str:
    """Return the path of a file of a parameter inside of the checkpoint."""
    return f"{UNIVERSAL}/{name}/{entry}.pt"


def entry_of(tensor: StoredTensor) -> str:
    """Return the entry of a tensor: that of optimizer state, else the master weights."""
    return tensor.kind.removeprefix(OPTIMIZER) if tensor.kind.startswith(OPTIMIZER) else MASTER


class UniversalFiles:
    """Files of the parameters of one checkpoint in directory `path`; `expected` are the described tensors by file."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.names = set(os.listdir(os.path.join(path, UNIVERSAL)))
        self.expected: dict[str, StoredTensor] = {}
        self._steps: dict[str, Any] = {}  # by the file of the master weights
        self._opening = threading.Lock()
        self._mapped = functools.lru_cache(_MOST_OPENED)(self._open)

    def entries(self, name: str) -> list[str]:
        """Return the entries of optimizer state of a parameter."""
        found = os.listdir(os.path.join(self.path, UNIVERSAL, name))
        return sorted({file.removesuffix(".pt") for file in found if file.endswith(".pt")} - {MASTER, STEP})

    def stored(self, name: str, entry: str) -> torch.Tensor:
        """Return the tensor of a file, in the form of the file."""
        return _tensor(TorchFile(os.path.join(self.path, file_of(name, entry))))

    def placed(self, tensor: StoredTensor, name: str) -> StoredTensor:
        """Return a tensor with its place in the files of a parameter, or of a buffer."""
        place = Slice(file_of(name, entry_of(tensor)), "param", 0, tensor.numel)
        self.expected[place.file] = replace(tensor, slices=(place,) if tensor.numel else ())
        return self.expected[place.file]

    def values(self, file: str) -> torch.Tensor:
        """Return the flattened values of a file, mapped."""
        with self._opening:
            return self._mapped(file)

    def _open(self, file: str) -> torch.Tensor:
        return self._checked(file, TorchFile(os.path.join(self.path, file)))

    def verify(self, file: str) -> None:
        """Check a file: its checksums, shape and dtype; with master weights the step count. Raises CheckpointError."""
        opened = TorchFile(os.path.join(self.path, file))
        opened.verify(range(opened.records))
        self._checked(file, opened)
        counted = os.path.join(os.path.dirname(opened.path), f"{STEP}.pt")
        if file in self._steps and os.path.exists(counted):
            found, expected = _count(counted), self._steps[file]
            if not same(found, expected):
                raise CheckpointError(
                    f"{counted}: the step count is {float(found):g}, and {float(expected):g} for the first parameter "
                    "of the group: files of two checkpoints"
                )

    def _checked(self, file: str, opened: TorchFile) -> torch.Tensor:
        expected, values = self.expected[file], _tensor(opened)
        shapes = (expected.shape, (expected.numel,))
        if tuple(values.shape) not in shapes or values.dtype != expected.torch_dtype:
            raise CheckpointError(
                f"{opened.path}: {expected.kind} {expected.name!r}: expected {expected.dtype} of shape "
                f"{list(expected.shape)}, found {name_of(values.dtype)} of shape {list(values.shape)}: files of two "
                "checkpoints, or a layout that is not known"
            )
        return values.reshape(-1)

    # -- conversion --------------------------------------------------------------------------------------------------

    def describe(
        self,
        content: Content,
        model: Mapping[str, Any],
        state: Mapping[str, Any],
        shape_of: Mapping[str, tuple[int, ...]] | None,
    ) -> None:
        """Add the parameters and buffers of a stage that are not in its model states. `shape_of` has unsplit shapes of
        parameters of several model-parallel ranks, where they are known; None: there is one rank.
        """
        shapes: Sequence[Mapping[str, Any]] = model["param_shapes"]
        trained = {name: tuple(shape) for group in shapes for name, shape in group.items()}
        if missing := [name for name in trained if name not in self.names]:
            raise CheckpointError(
                f"{UNIVERSAL}: the directories of parameters are missing: {outline(missing)}. The checkpoint is "
                "incomplete: converting it was interrupted, or files were not copied"
            )
        content.settings = [settings_of(group) for group in state["param_groups"]]
        inner = state.get("optimizer_state_dict") or {}
        owner = {sub: number for number, group in enumerate(inner.get("param_groups", ())) for sub in group["params"]}
        first = next(iter(trained), None)
        entries = {} if first is None else {e: name_of(self.stored(first, e).dtype) for e in self.entries(first)}
        for number, group in enumerate(shapes):
            step = self._step(next(iter(group)), inner.get("state", {}).get(number)) if group and entries else None
            for name in group:
                shape = trained[name]
                if shape_of is not None:  # the model states have the shapes of parts
                    shape = shape_of.get(name) or tuple(self.stored(name, MASTER).shape)
                content.group[name] = owner.get(number, 0) if state.get("zero_stage") == 3 else number
                known = content.tensors.get((name, PARAMETER, None))
                known = known or StoredTensor(name, PARAMETER, shape, "float32", (), compute_dtype="float32")
                known = replace(known, shape=shape, dtype="float32", trainable=True, group=content.group[name])
                content.keep(self.placed(known, name))
                for entry, dtype in entries.items():
                    content.keep(self.placed(StoredTensor(name, OPTIMIZER + entry, shape, dtype, ()), name))
                if step is not None:
                    content.set_value(name, STEP, step, file_of(name, STEP))
                    self._steps[file_of(name, MASTER)] = step
        there = {name for name, _, _ in content.tensors}
        for name in (*(model.get("frozen_param_shapes") or {}), *model["buffer_names"]):
            if name not in there and name in self.names:
                values = self.stored(name, MASTER)
                found = StoredTensor(name, BUFFER, tuple(values.shape), name_of(values.dtype), ())
                if name not in model["buffer_names"]:
                    found = replace(found, kind=PARAMETER, trainable=False, compute_dtype=found.dtype)
                content.keep(self.placed(found, name))

    def _step(self, name: str, of_group: Any) -> Any:
        """Return the step count of the first parameter of a group, which is that of the others."""
        if not os.path.exists(os.path.join(self.path, file_of(name, STEP))) and of_group is not None:
            return as_scalar(of_group["step"])
        return _count(os.path.join(self.path, file_of(name, STEP)))


def _count(path: str) -> torch.Tensor:
    content = TorchFile(path).content
    if isinstance(content, torch.Tensor) and content.numel() == 1:
        content = content.item()
    if isinstance(content, bool) or not isinstance(content, (int, float)):
        raise CheckpointError(f"{path}: expected a number of steps, found {type(content).__name__}")
    count: torch.Tensor = as_scalar(content)
    return count


def _tensor(opened: TorchFile) -> torch.Tensor:
    found = opened.content.get("param") if isinstance(opened.content, Mapping) else opened.content
    if not isinstance(found, torch.Tensor):
        raise CheckpointError(
            f"{opened.path}: expected a tensor, or a dictionary with the tensor 'param', found {type(found).__name__}"
        )
    return found
