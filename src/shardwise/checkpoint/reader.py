"""A checkpoint opened for reading: any range of any tensor, from whatever files have it."""

from __future__ import annotations

import os
from collections.abc import Iterable
from types import TracebackType
from typing import Any

import torch

from shardwise.checkpoint import codec, manifest
from shardwise.checkpoint.directory import Hold
from shardwise.checkpoint.manifest import Slice, StoredTensor
from shardwise.checkpoint.tensorfile import BLOCK, TensorFile
from shardwise.errors import CheckpointError


class Checkpoint:
    """A checkpoint on disk.

    Args:
        path: its directory.

    Raises:
        CheckpointError: it is incomplete, or its manifest is damaged or of another format.

    Example: read ten elements of a parameter, wherever they are.
        >>> with Checkpoint("runs/a/global_step100") as saved:  # doctest: +SKIP
        ...     weight = saved.find("h.0.attn.weight")
        ...     out = torch.empty(10, dtype=weight.torch_dtype)
        ...     saved.read_into(weight, 100, out)
    """

    def __init__(self, path: str) -> None:
        self.path = path
        self._hold = Hold(path)  # before it is known to be there: it must not go away in between
        self.manifest = manifest.load(path)
        self._files: dict[str, TensorFile] = {}

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close all files, and let the checkpoint be removed."""
        self._hold.release()
        for file in self._files.values():
            file.close()
        self._files = {}

    def find(self, name: str, kind: str = manifest.PARAMETER) -> StoredTensor:
        """Return the description of a tensor.

        Raises:
            CheckpointError: the checkpoint has none of this name and kind.
        """
        for tensor in self.manifest.tensors:
            if tensor.kind == kind and (tensor.name == name or name in tensor.aliases):
                return tensor
        raise CheckpointError(f"{self.path}: there is no {kind} {name!r}")

    def read_into(self, tensor: StoredTensor, start: int, out: torch.Tensor) -> None:
        """Read elements of the flattened tensor, from `start` on, into a 1-D tensor of any dtype and device.

        Raises:
            CheckpointError: they are not stored, or a file cannot be read.
        """
        for part, first, last in tensor.runs(start, start + out.numel()):
            self._file(part).read_into(part.key, first - part.start, out[first - start : last - start])

    def read(self, tensor: StoredTensor) -> torch.Tensor:
        """Return a whole tensor, on the CPU."""
        values = torch.empty(tensor.shape, dtype=tensor.torch_dtype, device="cpu")
        self.read_into(tensor, 0, values.view(-1))
        return values

    def module_values(self) -> dict[str, torch.Tensor]:
        """Return all parameters and buffers whole, on the CPU, under all their names."""
        values: dict[str, torch.Tensor] = {}
        for tensor in self.manifest.of_module():
            if tensor.rank is None:
                values.update(dict.fromkeys((tensor.name, *tensor.aliases), self.read(tensor)))
        return values

    def decode(self, tree: Any) -> Any:
        """Return the Python value of a tree in the manifest."""
        return codec.decode(tree, lambda ref: self._file(Slice(ref["file"], ref["key"], 0, 0)).read(ref["key"]))

    def _file(self, part: Slice) -> TensorFile:
        if part.file not in self._files:
            # Names come from the manifest: only files of the checkpoint's own directory are opened.
            if part.file not in self.manifest.files or os.path.basename(part.file) != part.file:
                raise CheckpointError(f"{self.path}: the manifest does not list the file {part.file!r}")
            self._files[part.file] = TensorFile(os.path.join(self.path, part.file))
        return self._files[part.file]

    def check_sizes(self, files: Iterable[str]) -> None:
        """Check that files are there and have the size they should have.

        Raises:
            CheckpointError: one is missing or has another size.
        """
        for name in files:
            path = os.path.join(self.path, name)
            expected = self.manifest.files[name].size
            try:
                found = os.path.getsize(path)
            except OSError as error:
                raise CheckpointError(f"{path}: expected a file of {expected} bytes: {error.strerror}") from error
            if found != expected:
                raise CheckpointError(
                    f"{path}: expected {expected} bytes, found {found}: the file is truncated or was changed"
                )

    def blocks(self, tensors: Iterable[StoredTensor] | None = None) -> list[tuple[str, int]]:
        """Return (file, block) of the blocks that hold some tensors; of all blocks if None."""
        if tensors is None:
            return [
                (name, n)
                for name in sorted(self.manifest.files)
                for n in range(len(self.manifest.files[name].checksums))
            ]
        found: set[tuple[str, int]] = set()
        for tensor in tensors:
            for part in tensor.slices:
                file = self._file(part)
                if part.key not in file.specs:
                    raise CheckpointError(f"{file.path}: there is no tensor {part.key!r}")
                begin, end = file.span(part.key)
                # The header tells where the tensor lies, so it has to be right as well.
                found.update((part.file, n) for n in range(-(-file.data // BLOCK)))
                found.update((part.file, n) for n in range(begin // BLOCK, -(-end // BLOCK)))
        return sorted(found)

    def verify(self, blocks: Iterable[tuple[str, int]]) -> None:
        """Compare the bytes of some blocks with their checksums.

        Raises:
            CheckpointError: a file is damaged; the message names the first wrong bytes and what they belong to.
        """
        by_file: dict[str, list[int]] = {}
        for name, block in blocks:
            by_file.setdefault(name, []).append(block)
        for name, numbers in by_file.items():
            file = self._file(Slice(name, "", 0, 0))
            wrong = file.wrong_blocks(self.manifest.files[name].checksums, numbers)
            if wrong:
                begin = wrong[0] * BLOCK
                raise CheckpointError(
                    f"{file.path}: damaged: the checksum of bytes [{begin}, {begin + BLOCK}) is "
                    f"wrong{self._holders(file, begin)}. Load another checkpoint by its tag, or restore this file "
                    "from a copy"
                )

    def _holders(self, file: TensorFile, begin: int) -> str:
        names = [name for name in file.specs if file.span(name)[0] < begin + BLOCK and file.span(name)[1] > begin]
        return f" (they hold {manifest.outline(names, 3)})" if names else ""


def verify(path: str) -> manifest.Manifest:
    """Read a whole checkpoint and compare every byte with its checksum.

    Args:
        path: directory of the checkpoint, as `save_dir/tag`.

    Returns:
        Its manifest.

    Raises:
        CheckpointError: anything is missing, damaged, or of another format.
    """
    with Checkpoint(path) as saved:
        saved.check_sizes(saved.manifest.files)
        saved.verify(saved.blocks())
        return saved.manifest
