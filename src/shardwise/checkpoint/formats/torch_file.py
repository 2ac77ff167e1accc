"""One file of `torch.save`, mapped and read without running its code.

`torch.load(weights_only=True)` refuses unknown classes before it calls them. DeepSpeed's files have four small classes.
They are allowed by name, and become objects with attributes and no methods, or a number: LossScaler and
DynamicLossScaler (loss scale and counts), fragment_address (place of a piece of a parameter in a partition),
ZeroStageEnum.
"""

from __future__ import annotations

import contextlib
import os
import zipfile
from collections.abc import Iterable
from typing import Any

import torch
from torch.serialization import get_unsafe_globals_in_checkpoint, safe_globals

from shardwise.checkpoint.manifest import outline
from shardwise.errors import CheckpointError

_CHUNK = 4 << 20

_LEGACY = b"\x80\x02\x8a\x0a\x6c\xfc\x9c\x46\xf9\x20\x6a\xa8\x50\x19\x2e"
"""First bytes of torch's old file format without a zip archive, still written on request."""


class TensorAttributes:
    """Attributes of an object of DeepSpeed."""


_HARMLESS: list[Any] = [
    (TensorAttributes, "deepspeed.runtime.fp16.loss_scaler.LossScaler"),
    (TensorAttributes, "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler"),
    (TensorAttributes, "deepspeed.utils.tensor_fragment.fragment_address"),
    (int, "deepspeed.runtime.zero.config.ZeroStageEnum"),
]


class TorchFile:
    """An opened file of `torch.save`, with tensors on the CPU and mapped, if it is an archive (with `mapped` others are
    refused); `records` counts parts with a checksum.
    """

    def __init__(self, path: str, *, mapped: bool = False) -> None:
        self.path = path
        try:
            facts = os.stat(path)
            with open(path, "rb") as file:
                self._archived = file.read(len(_LEGACY)) != _LEGACY
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be opened: {error.strerror}") from error
        if mapped and not self._archived:
            raise CheckpointError(
                f"{path}: a file of a version before torch 1.6, or in its form, which cannot be mapped; load it with "
                "torch.load(weights_only=True) and save it again"
            )
        self.size, self.modified, self.records = facts.st_size, facts.st_mtime, 0
        if self._archived:
            self.verify()
        self.content = self._load()

    def _load(self) -> Any:
        with safe_globals(_HARMLESS):
            try:
                return torch.load(self.path, map_location="cpu", weights_only=True, mmap=self._archived)
            except Exception as error:
                # A damaged pickle can fail in any way; nothing that it names has been called.
                strange: list[str] = []
                with contextlib.suppress(Exception):  # of the damage that is being reported
                    strange = sorted(get_unsafe_globals_in_checkpoint(self.path))
                if self._archived and strange:
                    raise CheckpointError(
                        f"{self.path}: holds objects of {outline(strange)}, which are not tensors, numbers, strings or "
                        "containers of these. Nothing of the file was used, because rebuilding them runs code. Save it "
                        "again without them (in checkpoints they are most often in client_state); if you trust their "
                        "classes, name them with torch.serialization.add_safe_globals() before loading"
                    ) from error
                raise CheckpointError(
                    f"{self.path}: damaged: cannot be read ({type(error).__name__}: {error!s:.300})"
                ) from error

    def verify(self, numbers: Iterable[int] | None = None) -> None:
        """Compare records (None: the description of the objects) with CRC-32s of `torch.save`. Raises CheckpointError
        if they differ or are unreadable.
        """
        try:
            with zipfile.ZipFile(self.path) as archive:
                entries = archive.infolist()
                self.records = len(entries)
                described = [n for n, entry in enumerate(entries) if entry.filename.endswith("/data.pkl")]
                if len(described) != 1:
                    raise ValueError("it has no data.pkl")
                for number in described if numbers is None else numbers:
                    with archive.open(entries[number]) as record:
                        while record.read(_CHUNK):
                            pass
        except (zipfile.BadZipFile, OSError, ValueError, IndexError, NotImplementedError, EOFError) as error:
            raise CheckpointError(
                f"{self.path}: truncated or damaged, or not written by torch.save ({self.size} bytes; {error}). Load "
                "another checkpoint by its tag, or restore this file from a copy"
            ) from error
